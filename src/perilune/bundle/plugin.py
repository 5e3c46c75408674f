"""What a task plugin is, and how one is found.

A plugin is an object registered under the entry-point group `perilune.tasks`. The planes know only this
page; importing a plugin's module must stay light (no torch), so that recipes validate in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from perilune.bundle.job import Resources
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.bundle.workspace import Workspace

OutputKind = Literal["checkpoint", "dataset", "preferences", "reward_model", "player", "evaluation"]

PLUGIN_GROUP = "perilune.tasks"


@dataclass(frozen=True, slots=True)
class Consumes:
    """Marks a field of a stage's spec that names an earlier stage, and what it takes from it.

    Used as `checkpoint: Annotated[str, Consumes("checkpoint")]`. The reserved stage name "model" stands
    for the recipe's own model section.
    """

    kind: OutputKind


@dataclass(frozen=True, slots=True)
class Names:
    """Marks a field of a stage's spec that names a file, a folder or a URL; relative to its recipe."""


@runtime_checkable
class MemoryNeed(Protocol):
    """Memory that one process of a stage needs at its highest moment."""

    @property
    def total(self) -> int:
        """Bytes."""
        ...

    def fitting(self, available: int) -> str:
        """The change to the stage's fields that makes it fit into so many bytes; "" when none is known."""
        ...


class TaskPlugin(Protocol):
    """A kind of stage.

    Attributes:
        name: what `task:` says in a recipe.
        spec: pydantic model of the stage's own fields (frozen, unknown keys forbidden).
        produces: what other stages can take from it.
        output: where that lies in the bundle, e.g. "artifacts/checkpoints/final".

    A plugin may also have `parallel = True`: several processes may then run it together, as the ones here do
    through `perilune.learn.distributed`. One with `standalone = True` needs neither the model nor the
    environment of the recipe.
    """

    name: str
    spec: type[BaseModel]
    produces: OutputKind
    output: str

    def plan(self, job: Job) -> Mapping[str, object]:
        """Everything derived (batch sizes, steps, tokens, memory), name to printable value.

        Called before any work starts, without the inputs. A value that is a `MemoryNeed` is compared with the
        memory of the machine that runs the stage.

        Raises:
            RequestError: when the job cannot work (unknown environment, impossible value).
        """
        ...

    def run(self, workspace: Workspace) -> Mapping[str, Any]:
        """Do the work inside a bundle; return the summary written to artifacts/summary.json."""
        ...


@cache
def plugin_names() -> tuple[str, ...]:
    """Names of all installed task plugins, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=PLUGIN_GROUP)}))


@cache
def load_plugin(name: str) -> TaskPlugin:
    """Load the task plugin called `name`.

    Raises:
        RequestError: when none is installed under that name.
    """
    for point in entry_points(group=PLUGIN_GROUP):
        if point.name == name:
            plugin: TaskPlugin = point.load()
            return plugin
    raise RequestError(f"no task called '{name}' is installed", remedy=f"one of: {', '.join(plugin_names())}")


def runs_in_several(plugin: TaskPlugin) -> bool:
    """Whether several processes may run the task together."""
    return bool(getattr(plugin, "parallel", False))


def resources_of(plugin: TaskPlugin, resources: Resources) -> Resources:
    """What an attempt at the task may use of what is there: one process, where it cannot use several."""
    alone = {"processes": 1, "nodes": 1}
    return resources if runs_in_several(plugin) else resources.model_copy(update=alone)


def needs_a_model(plugin: TaskPlugin) -> bool:
    """Whether the task is about the recipe's model and environment."""
    return not getattr(plugin, "standalone", False)


def complete_spec(task: str, spec: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's fields, filled in further where its model has a class method `complete`.

    That is for defaults that depend on the recipe's model section.
    """
    complete = getattr(load_plugin(task).spec, "complete", None)
    return dict(spec) if complete is None else dict(complete(task, spec, model))


def naming_fields(spec: type[BaseModel]) -> list[str]:
    """Fields of `spec` that name files."""
    return [
        name
        for name, info in spec.model_fields.items()
        if any(isinstance(mark, Names) for mark in info.metadata)
    ]


def consumed_fields(spec: type[BaseModel]) -> dict[str, OutputKind]:
    """Fields of `spec` that name an earlier stage, with what each takes from it."""
    found: dict[str, OutputKind] = {}
    for name, info in spec.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, Consumes):
                found[name] = mark.kind
    return found
