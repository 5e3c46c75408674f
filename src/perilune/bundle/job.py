"""job.json: the job of a bundle. Immutable and typed; unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perilune.files import replace_field
from perilune.frozen import Frozen

SCHEMA_VERSION = 1

OutputKind = Literal[
    "checkpoint",
    "dataset",
    "preferences",
    "reward_model",
    "player",
    "utterances",
    "codec",
    "voice",
    "evaluation",
]
"""The kind of the output of a stage."""

Preset = Literal["tiny", "small", "base", "medium", "large"]
PRESET = "built-in architecture with random weights: 0.3, 0.7, 2.8, 9.3 or 28 million parameters"


class InputReference(Frozen):
    """One input of a bundle.

    Attributes:
        name: the key of the stage that consumes it ("checkpoint", "data"), the key that names a file of tasks
            ("environment.path", "spec.eval.sets.harder.path"), or a name of the task plugin ("source").
        path: relative to the bundle ("inputs/checkpoint").
        digest: SHA-256 over the names and contents of its files.
    """

    name: str
    path: str = Field(pattern=r"^inputs/[A-Za-z0-9_][A-Za-z0-9._-]*$")
    digest: str
    kind: Literal[OutputKind, "tasks", "files"]


class Resources(Frozen):
    """Resources of one attempt."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the tensors")
    threads: int = Field(
        0,
        ge=0,
        le=4096,
        description="threads of each process on a CPU; 0 divides the usable cores among the processes",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes of a training stage on each machine; other stages use one",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=64,
        description="machines of a training stage; more than one needs a placement with several machines."
        " Other stages use one",
    )
    sharded: bool | None = Field(
        None,
        description="shard weights, gradients and optimizer state over the processes of a stage (FSDP)."
        " Default: true for several processes on cuda, except with an adapter or a mixture of"
        " experts",
    )


class Job(Frozen):
    """A job: one stage with everything that it needs.

    Attributes:
        task: name of the task plugin (entry-point group `perilune.tasks`).
        stage: name of the stage in its recipe.
        spec: the keys of the stage, validated by the plugin's `spec` model, with every default filled in.
        model: the model section of the recipe with every default filled in; empty if there is none.
        environment: the environment section, likewise.
        seed: the seed of every random number.
        secrets: names of the secrets that the run needs; never values.
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
        """Return the job with absolute paths to the files of its environments in the bundle at `root`."""
        parts = {"environment": self.environment, "spec": self.spec}
        for reference in self.inputs:
            if reference.kind == "tasks":
                part, _, key = reference.name.partition(".")
                parts[part] = replace_field(parts[part], key, str((root / reference.path).absolute()))
        return self.model_copy(update=parts)
