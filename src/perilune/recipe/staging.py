"""Turns the files that a job names into inputs of its bundle."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from perilune.bundle.job import InputReference, Job
from perilune.bundle.plugin import consumed_fields, file_fields, load_plugin
from perilune.files import with_field


def staged(job: Job) -> tuple[Job, dict[str, Path]]:
    """The job with the files that it names among its inputs, and the paths to copy them from.

    In the returned job, the keys contain the paths in the bundle, which are the same on every machine.
    """
    job, tasks = _environment(job)
    job, data = _data(job)
    files = tasks | data
    stage = getattr(load_plugin(job.task), "stage", None)
    if stage is None:
        return job, files
    spec, named = stage(job)
    references = [
        InputReference(name=name, path=f"inputs/{name}", digest="", kind="files") for name in sorted(named)
    ]
    return job.model_copy(update={"spec": dict(spec), "inputs": (*job.inputs, *references)}), files | named


def _data(job: Job) -> tuple[Job, dict[str, Path]]:
    """The user's own data files, in place of the outputs of earlier stages."""
    kind = load_plugin(job.task).spec
    found = {name: Path(path) for name, path in file_fields(kind, job.spec).items()}
    references = [
        InputReference(name=name, path=f"inputs/{name}", digest="", kind=consumed_fields(kind)[name])
        for name in found
    ]
    spec = {**job.spec, **{one.name: one.path for one in references}}
    return job.model_copy(update={"spec": spec, "inputs": (*job.inputs, *references)}), found


def _environment(job: Job) -> tuple[Job, dict[str, Path]]:
    registry = import_module(
        "perilune.environments.core.registry"
    )  # by name: see resolve.environment_registry
    section, references = job.environment, list(job.inputs)
    found: dict[str, Path] = {}
    for key, path in registry.file_fields(section).items():
        name = f"environment.{key}"
        reference = InputReference(name=name, path=f"inputs/{name}", digest="", kind="tasks")
        section = with_field(section, key, reference.path)
        references.append(reference)
        found[name] = Path(path)
    return job.model_copy(update={"environment": section, "inputs": tuple(references)}), found
