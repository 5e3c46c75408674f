"""Makes the files that a job names inputs of its bundle."""

from pathlib import Path

from perilune.bundle.job import InputReference, Job
from perilune.bundle.plugin import consumed_fields, environment_fields, file_fields, load_plugin
from perilune.files import get_field, replace_field
from perilune.recipe.resolve import import_environment_registry


def stage_files(job: Job) -> tuple[Job, dict[str, Path]]:
    """Add the files that a job names to its inputs; return the job and the paths to copy them from.

    In the returned job, the keys have the paths in the bundle, which are the same on every machine.
    """
    job, tasks = _stage_environments(job)
    job, data = _stage_data(job)
    files = tasks | data
    stage = getattr(load_plugin(job.task), "stage", None)
    if stage is None:
        return job, files
    spec, named = stage(job)
    references = [
        InputReference(name=name, path=f"inputs/{name}", digest="", kind="files") for name in sorted(named)
    ]
    return job.model_copy(update={"spec": dict(spec), "inputs": (*job.inputs, *references)}), files | named


def _stage_data(job: Job) -> tuple[Job, dict[str, Path]]:
    """Stage the user's own data files, which replace the outputs of earlier stages."""
    kind = load_plugin(job.task).spec
    files = {name: Path(path) for name, path in file_fields(kind, job.spec).items()}
    references = [
        InputReference(name=name, path=f"inputs/{name}", digest="", kind=consumed_fields(kind)[name])
        for name in files
    ]
    spec = {**job.spec, **{reference.name: reference.path for reference in references}}
    return job.model_copy(update={"spec": spec, "inputs": (*job.inputs, *references)}), files


def _stage_environments(job: Job) -> tuple[Job, dict[str, Path]]:
    """Stage the files of the job's environment, and of the environments in its spec."""
    registry = import_environment_registry()
    parts, references = {"environment": job.environment, "spec": job.spec}, list(job.inputs)
    sections = {"environment": job.environment}
    for field in environment_fields(load_plugin(job.task).spec):
        named = get_field(job.spec, field) or {}
        sections |= {f"spec.{field}.{name}": section for name, section in named.items()}
    files: dict[str, Path] = {}
    for location, section in sections.items():
        for key, path in registry.file_fields(section).items():
            name = f"{location}.{key}"
            reference = InputReference(name=name, path=f"inputs/{name}", digest="", kind="tasks")
            part, _, rest = name.partition(".")
            parts[part] = replace_field(parts[part], rest, reference.path)
            references.append(reference)
            files[name] = Path(path)
    return job.model_copy(update={**parts, "inputs": tuple(references)}), files
