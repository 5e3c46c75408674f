"""The field of a spec by which an environment borrows the tasks of another."""

from pydantic import BaseModel, ConfigDict, Field


class TasksSection(BaseModel):
    """The section of the environment that the tasks come from."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = Field(
        description="id of a single-turn environment, whose prompts are the tasks; it scores the answers. The"
        " section also takes its other keys"
    )
