"""The base of models for sections of a recipe and for files, and the errors of invalid values."""

from pydantic import BaseModel, ConfigDict, ValidationError

from perilune.errors import RequestError


class Frozen(BaseModel):
    """An immutable model without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def invalid_value(error: ValidationError, *, where: str = "", remedy: str = "") -> RequestError:
    """Return the first error of a pydantic model as an error that names the key."""
    first = error.errors(include_url=False)[0]
    key, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return RequestError(f"{key}: {what}" if key else what, where=where, remedy=remedy)
