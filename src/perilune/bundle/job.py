"""job.json: what a bundle asks to be run. Frozen, typed, unknown keys forbidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.files import with_field

SCHEMA_VERSION = 1


class Frozen(BaseModel):
    """A value that cannot change and takes no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InputReference(Frozen):
    """One staged input of a bundle.

    `name` is the field of the stage that consumes it ("checkpoint", "data"), the field of the environment
    that names a file of tasks ("environment.path"), or what the stage's plugin calls it ("source"); `path` is
    relative to the bundle ("inputs/checkpoint");
    `digest` is the SHA-256 over its files' names and contents.
    """

    name: str
    path: str = Field(pattern=r"^inputs/[A-Za-z0-9_][A-Za-z0-9._-]*$")
    digest: str
    kind: Literal[
        "checkpoint", "dataset", "preferences", "reward_model", "player", "evaluation", "tasks", "files"
    ]


class Resources(Frozen):
    """What one attempt may use."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    threads: int = Field(
        0, ge=0, description="threads of a process on a CPU; 0 shares out every core that may be used"
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that a training stage runs in, on each machine; others run in one",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=64,
        description="machines that a training stage runs on together, where its placement has several;"
        " others run on one",
    )
    sharded: bool | None = Field(
        None,
        description="whether several processes cut weights, gradients and moments (FSDP) instead of each"
        " keeping them; by default on cuda",
    )


class Job(Frozen):
    """What to run.

    Attributes:
        task: name of the task plugin (entry-point group `perilune.tasks`).
        stage: name of the stage in its recipe.
        spec: the stage's own fields, validated by the plugin's `spec` model, every default filled in.
        model: the recipe's model section, every default filled in; empty where it has none.
        environment: the recipe's environment section, likewise.
        seed: the one seed from which every random number is derived.
        secrets: names of environment variables the run needs; never values.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    stage: str
    spec: dict[str, Any]
    model: dict[str, Any]
    environment: dict[str, Any]
    seed: int
    resources: Resources
    inputs: tuple[InputReference, ...] = ()
    entrypoint: tuple[str, ...] = ("perilune", "worker")
    secrets: tuple[str, ...] = ()

    def at(self, root: Path) -> Job:
        """The job as it runs in the bundle at `root`: the environment's files by absolute paths."""
        section = self.environment
        for reference in self.inputs:
            if reference.kind == "tasks":
                key = reference.name.removeprefix("environment.")
                section = with_field(section, key, str((root / reference.path).absolute()))
        return self.model_copy(update={"environment": section})
