"""The interface of task plugins, and how they are found.

A plugin is an object registered in the entry-point group `perilune.tasks`. Recipes and both planes depend
only on this module. The module of a plugin must import quickly (no torch), so that recipes validate in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

from pydantic import BaseModel

from perilune.bundle.job import OutputKind, Resources
from perilune.errors import RequestError
from perilune.extensions import CodeReference

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.bundle.workspace import Workspace

PLUGIN_GROUP = "perilune.tasks"


@dataclass(frozen=True, slots=True)
class Consumes:
    """Marks a field of a spec that names an earlier stage, with the kind of output that it takes.

    Used as `checkpoint: Annotated[str, Consumes("checkpoint")]`. The reserved stage name "model" means the
    model section of the recipe.

    Attributes:
        files: whether a file or folder of the user may stand in place of a stage, see `is_path`.
    """

    kind: OutputKind
    files: bool = False


@dataclass(frozen=True, slots=True)
class NamesPath:
    """Marks a field of a spec that names a file, a folder or a URL; paths are relative to the recipe."""


@dataclass(frozen=True, slots=True)
class ChangesEnvironment:
    """Marks a field of a spec, or of a section in it, that maps names to variants of the environment section.

    The user writes only the keys that differ. In a loaded recipe, each value is a whole section.
    """


@runtime_checkable
class MemoryNeed(Protocol):
    """Peak memory of one process of a stage."""

    @property
    def total(self) -> int:
        """Bytes."""

    def fitting(self, available: int) -> str:
        """Return a change of keys that makes the stage fit into `available` bytes; "" if none is known."""


class TaskPlugin(Protocol):
    """A kind of stage.

    Attributes:
        name: the value of `task:` in a recipe.
        spec: pydantic model of the keys of the stage (frozen, unknown keys forbidden).
        produces: the kind of output that other stages can consume.
        output: its path in the bundle, for example "artifacts/checkpoints/final".

    With the optional attribute `parallel = True`, several processes run the task together through
    `perilune.learn.distributed`. With `standalone = True`, the task needs neither the model nor the
    environment of the recipe; with `needs_environment = False`, it needs the model alone.
    """

    name: str
    spec: type[BaseModel]
    produces: OutputKind
    output: str

    def plan(self, job: Job) -> Mapping[str, object]:
        """Return values derived from the job (batch sizes, steps, tokens, memory) by name.

        Called before any work starts, without the inputs. A `MemoryNeed` is compared with the memory of the
        machine that runs the stage.

        Raises:
            RequestError: when the job cannot work (unknown environment, impossible value).
        """

    def run(self, workspace: Workspace) -> Mapping[str, Any]:
        """Run the task in a bundle; return the contents of artifacts/summary.json."""


@cache
def plugin_names() -> tuple[str, ...]:
    """Return the names of all installed task plugins, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=PLUGIN_GROUP)}))


@cache
def load_plugin(name: str) -> TaskPlugin:
    """Load the task plugin called `name`.

    Raises:
        RequestError: when no plugin of that name is installed.
    """
    for point in entry_points(group=PLUGIN_GROUP):
        if point.name == name:
            plugin: TaskPlugin = point.load()
            return plugin
    raise RequestError(f"no task '{name}' is installed", remedy=f"one of: {', '.join(plugin_names())}")


def is_parallel(plugin: TaskPlugin) -> bool:
    """Return whether several processes can run the task together."""
    return bool(getattr(plugin, "parallel", False))


def resources_of(plugin: TaskPlugin, resources: Resources) -> Resources:
    """Return `resources` for this task: one process on one machine if it is not parallel."""
    single = {"processes": 1, "nodes": 1}
    return resources if is_parallel(plugin) else resources.model_copy(update=single)


def uses_model(plugin: TaskPlugin) -> bool:
    """Return whether the task uses the model and the environment of the recipe."""
    return not getattr(plugin, "standalone", False)


def uses_environment(plugin: TaskPlugin) -> bool:
    """Return whether the task cannot run without the environment of the recipe."""
    return uses_model(plugin) and getattr(plugin, "needs_environment", True)


def complete_spec(
    kind: type[BaseModel], task: str, spec: Mapping[str, Any], model: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """Return the keys of a stage, completed by the class method `complete` of `kind` if there is one.

    `complete` fills in defaults that depend on the model section and the device of the recipe
    (`by_model_fields`).
    """
    complete = getattr(kind, "complete", None)
    return dict(spec) if complete is None else dict(complete(task, spec, model, device))


def by_model_fields(spec: type[BaseModel]) -> list[str]:
    """Return the fields of `spec` whose default depends on the model; None in a loaded recipe means unset."""
    return [name for name in getattr(spec, "by_model", ()) if name in spec.model_fields]


def path_fields(spec: type[BaseModel]) -> list[str]:
    """Return the fields of `spec` that name files, folders or URLs."""
    return [
        name
        for name, info in spec.model_fields.items()
        if any(isinstance(mark, NamesPath) for mark in info.metadata)
    ]


def code_fields(spec: type[BaseModel]) -> dict[str, CodeReference]:
    """Return the fields of `spec` that name code of the user, with the mark of each."""
    return {
        name: mark
        for name, info in spec.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, CodeReference)
    }


@cache
def environment_fields(spec: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of `spec` that map names to sections of environments; nested ones are dotted."""
    fields = []
    for name, info in spec.model_fields.items():
        if any(isinstance(mark, ChangesEnvironment) for mark in info.metadata):
            fields.append(name)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                fields += [f"{name}.{inner}" for inner in environment_fields(kind)]
    return tuple(fields)


def consumed_fields(spec: type[BaseModel]) -> dict[str, OutputKind]:
    """Return the fields of `spec` that name an earlier stage, with the kind of output that each takes."""
    return {name: mark.kind for name, mark in _consumed(spec)}


def file_fields(spec: type[BaseModel], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths in `values` that stand in place of a stage, by field."""
    paths = {name: values.get(name) for name, mark in _consumed(spec) if mark.files}
    return {name: value for name, value in paths.items() if isinstance(value, str) and is_path(value)}


def is_path(name: str) -> bool:
    """Return whether a value is a path rather than the name of a stage, which has no dot or slash."""
    return "." in name or "/" in name


def _consumed(spec: type[BaseModel]) -> list[tuple[str, Consumes]]:
    return [
        (name, mark)
        for name, info in spec.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Consumes)
    ]
