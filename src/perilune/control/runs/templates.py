"""Templates: named YAML files that say where runs execute, with which resources, retries and time limits.

A template is read and recorded when a run is submitted, so an edit affects only later runs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from perilune.bundle.job import Job, Resources
from perilune.bundle.plugin import load_plugin, resources_of
from perilune.control.machines.leases import Rental
from perilune.control.record.home import Home
from perilune.control.runs.planner import Retry, RetryPolicy
from perilune.errors import RequestError
from perilune.execution.hosts.ssh import SshSettings
from perilune.execution.launchers.docker import Container
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.mirror import Bring
from perilune.execution.placements.remote import Site
from perilune.files import read_regular
from perilune.frozen import Frozen
from perilune.recipe.problems import ProblemsError, raise_problems, suggest_name, validate
from perilune.recipe.source import MAX_BYTES, Document, parse_yaml

LOCAL_TEMPLATE = "local"
TEMPLATE_FILE = "template.json"  # in a run's directory: the template of its submission


class LocalTarget(Frozen):
    """This machine."""

    name: Literal["local"] = "local"
    site: Site | None = Field(None, description="settings of this machine; only for containers")


class SshTarget(SshSettings):
    """A machine reached over ssh."""

    name: Literal["ssh"] = "ssh"
    site: Site = Field(Site(), description="settings of the machine")


class RentedTarget(Rental):
    """Machines that are rented for an experiment's stages and returned after them."""

    name: Literal["rented"] = "rented"
    site: Site = Field(Site(), description="settings of the machine")


class ResourcesChange(Frozen):
    """Resources of the machine, in place of those in the recipe."""

    device: Literal["auto", "cpu", "cuda"] | None = Field(None, description="device of the tensors")
    threads: int | None = Field(None, ge=0, description="threads of each process on a CPU")
    processes: int | None = Field(
        None, ge=1, le=64, description="processes of a training stage on each machine"
    )
    nodes: int | None = Field(None, ge=1, le=64, description="machines of a training stage")
    sharded: bool | None = Field(None, description="whether processes shard the weights")


def _launcher(value: Any) -> str | None:
    """Return the launcher's name, given alone or as the `name` of a section."""
    if isinstance(value, Container):
        return value.name
    name = value.get("name") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


_Process = Annotated[Literal["process"], Tag("process")]
_Docker = Annotated[Container, Tag("docker")]


class Template(Frozen):
    """The placement, resources, retries and limits of runs."""

    description: str = Field("", description="text for readers")
    placement: Annotated[LocalTarget | SshTarget | RentedTarget, Field(discriminator="name")] = Field(
        LocalTarget(), description="where: local, ssh with its address, or rented with its cost limits"
    )
    launcher: Annotated[_Process | _Docker, Discriminator(_launcher)] = Field(
        "process",
        description="how a worker starts at the placement: process, or a section with `name: docker`",
    )
    resources: ResourcesChange = Field(ResourcesChange(), description="resources of the machine")
    retry: Retry = Field(Retry(), description="how often a failed run is tried again")
    limits: AttemptLimits = Field(AttemptLimits(), description="time limits of an attempt on another machine")
    bring: Bring | None = Field(
        None,
        description="checkpoints to fetch from another machine: metrics (none), final (the final and the best"
        " weights), or all (also those to resume from, with the optimizer's moments); by default all from a"
        " rented machine and final from any other",
    )
    slots: int | None = Field(
        None, ge=1, description="maximum number of runs at this placement at once; further runs wait"
    )
    price: float | None = Field(
        None,
        ge=0,
        description="currency units that the machine costs per hour, for the costs that plans and runs print;"
        " not for a rented machine, whose provider states the price",
    )
    priority: int = Field(
        0, description="waiting runs start by priority, highest first, then in order of submission"
    )
    allowed_overrides: tuple[str, ...] = Field(
        (), description="keys that `perilune run --with KEY=VALUE` may change, such as limits.max_lifetime"
    )

    @model_validator(mode="after")
    def _price_of_own_machines(self) -> Template:
        if self.price is not None and isinstance(self.placement, RentedTarget):
            raise ValueError("price is for machines that you do not rent; a provider states its own prices")
        return self

    @model_validator(mode="after")
    def _site_of_containers(self) -> Template:
        if isinstance(self.placement, LocalTarget) and self.placement.site and self.container is None:
            raise ValueError("placement.site is only for containers: a local process uses your environment")
        return self

    @property
    def container(self) -> Container | None:
        """The container that workers run in; None for plain processes."""
        return None if self.launcher == "process" else self.launcher

    @property
    def is_remote(self) -> bool:
        """True if files are fetched from another machine, or from a container."""
        return not isinstance(self.placement, LocalTarget) or self.container is not None

    @property
    def effective_bring(self) -> Bring:
        """`bring` or its default: "all" for a rented machine, where files are lost with it, else "final"."""
        return self.bring or ("all" if isinstance(self.placement, RentedTarget) else "final")

    def retry_policy(self) -> RetryPolicy:
        lost_after = self.limits.given_up_after if self.is_remote else RetryPolicy().lost_after
        return RetryPolicy(**self.retry.model_dump(), lost_after=lost_after)

    def apply_resources(self, job: Job) -> Job:
        """Return the job with the resources of this template.

        Raises:
            RequestError: the job needs several machines, and the placement has one or isolates them.
        """
        changes = self.resources.model_dump(exclude_none=True)
        resources = Resources.model_validate(job.resources.model_dump() | changes)
        resources = resources_of(load_plugin(job.task), resources)
        if resources.nodes > 1 and not isinstance(self.placement, RentedTarget):
            raise RequestError(
                f"the job needs {resources.nodes} machines, and the placement {self.placement.name} has one",
                where="resources.nodes",
                remedy="use a template whose placement is rented",
            )
        if resources.nodes > 1 and self.container is not None and self.container.network != "host":
            raise RequestError(
                f"the job needs {resources.nodes} machines, and their containers have separate networks",
                where="launcher.network",
                remedy="network: host",
            )
        return job.model_copy(update={"resources": resources})


BUILT_IN = {LOCAL_TEMPLATE: Template(description="this machine")}


def template_folder(home: Home) -> Path:
    return home.root / "templates"


def template_names(home: Home) -> list[str]:
    """Return the names of all templates, the user's own before the built-in ones."""
    own = sorted(path.stem for path in template_folder(home).glob("*.yaml"))
    return [*own, *(name for name in BUILT_IN if name not in own)]


def load_template(home: Home, name: str, changes: Sequence[str] = ()) -> Template:
    """Return the template called `name`, or in the file `name`, with `changes` ("key.key=value") applied.

    Raises:
        RequestError: there is no such template, it is invalid (file, line, key), or it forbids a change.
    """
    path = Path(name) if name.endswith(".yaml") else template_folder(home) / f"{name}.yaml"
    if not path.exists() and name not in BUILT_IN:
        raise RequestError(
            "no such file" if name.endswith(".yaml") else f"no template is called '{name}'",
            where=name if name.endswith(".yaml") else str(template_folder(home)),
            remedy=suggest_name(name, template_names(home)),
        )
    if not path.exists():
        document = Document(json.loads(BUILT_IN[name].model_dump_json()), {(): f"template {name}"})
    else:
        document = parse_yaml(_read_file(path), str(path))
    template = _validate(document)
    for change in changes:
        _apply_override(document, change, template.allowed_overrides, name)
    return _validate(document) if changes else template


def recorded_template(home: Home, run_id: str) -> Template | None:
    """Return the template that a run was submitted with.

    Raises:
        RequestError: the recorded file is damaged.
    """
    path = home.run(run_id) / TEMPLATE_FILE
    try:
        return Template.model_validate_json(path.read_bytes()) if path.exists() else None
    except (OSError, ValidationError) as error:
        raise RequestError(f"not the template of a run: {error}", where=str(path)) from None


def refresh_host_key(home: Home, template: Template) -> Template:
    """Return a recorded template with the host key that the user's templates now have for its machine.

    So a run that was refused because the machine has a new key can be retried once a template has that key.
    """
    if not isinstance(template.placement, SshTarget):
        return template
    where = template.placement.model_dump(include={"host", "port", "user", "config"})
    for name in template_names(home):
        with contextlib.suppress(RequestError):  # another template is invalid
            now = load_template(home, name).placement
            if isinstance(now, SshTarget) and now.model_dump(include=set(where)) == where:
                placement = template.placement.model_copy(update={"host_key": now.host_key})
                return template.model_copy(update={"placement": placement})
    return template


def _validate(document: Document) -> Template:
    value = document.value if document.value is not None else {}
    try:
        template = validate(Template, value, (), "")
    except ProblemsError as error:
        raise_problems(error.problems, document.locate)
    for key, ignored in (
        ("limits", not template.is_remote and template.limits != AttemptLimits()),
        ("bring", not template.is_remote and template.bring is not None),
    ):
        if ignored:
            what = f"the key {key} is for other machines and containers; a process on this machine ignores it"
            raise RequestError(what, where=document.locate((key,)), remedy=f"remove {key}")
    if template.slots is None and template.priority:
        what = "priority orders the runs that wait for a slot, and the template has no slots"
        raise RequestError(what, where=document.locate(("priority",)), remedy="add slots, or remove priority")
    return template


def _apply_override(document: Document, change: str, allowed: Sequence[str], name: str) -> None:
    key, equals, text = change.partition("=")
    where = f"--with {change}"
    if not equals or not key:
        raise RequestError("not of the form key=value", where=where, remedy="--with limits.max_lifetime=3600")
    if key not in allowed:
        remedy = f"it allows {', '.join(allowed)}" if allowed else "add the key to its allowed_overrides"
        raise RequestError(f"the template {name} does not allow changing '{key}'", where=where, remedy=remedy)
    value: Any = parse_yaml(text, where).value
    document.set(tuple(key.split(".")), value, where)


def _read_file(path: Path) -> str:
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the template: {error}", where=str(path)) from None
