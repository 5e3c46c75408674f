"""The field of a spec by which an environment borrows the tasks of another."""

from pydantic import BaseModel, ConfigDict, Field


class TasksSection(BaseModel):
    """The section of the environment that the tasks come from."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = Field(
        description="id of the single-turn environment that provides the prompts and scores the answers. This"
        " section also takes the keys of that environment"
    )
