"""The base of models for sections of a recipe and for files."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
