"""black_box: run somebody else's program as a stage, untouched, with a thin manifest beside what it made.

Its code is taken at one commit and travels in the bundle; it runs in an environment of its own, from a copy
of its own, and knows nothing of Perilune. What it is told stands in its command; what is wanted of it are
files. A program that trains leaves a Hugging Face folder, which later stages take like any other checkpoint,
so that its result is measured exactly as ours are.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from perilune.bundle.job import Frozen, Job
from perilune.bundle.manifest import manifest_bytes
from perilune.bundle.plugin import Consumes, NamesPath
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json_lines, sha256_file, write_json
from perilune.tasks.black_box.environment import (
    check_pinned,
    installed,
    interpreter,
    lock_lines,
    record_digests,
)
from perilune.tasks.black_box.source import fetched, is_url

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace

TERM_SECONDS = 10.0  # to leave after it was asked to
PLACES = ("seed", "outputs", "threads", "checkpoint", "data")


class BlackBoxSpec(Frozen):
    """Fields of a black_box stage."""

    source: Annotated[str, NamesPath()] = Field(description="a folder, a git repository, or the URL of one")
    commit: str | None = Field(None, description="of a repository: the 40 digits of the commit that is run")
    origin: str = Field("", description="where it came from; filled in when the bundle is made")
    command: tuple[str, ...] = Field(
        min_length=1,
        description="argument list; {seed}, {outputs}, {threads}, {checkpoint} and {data} are filled in",
    )
    requirements: tuple[str, ...] | str = Field(
        (),
        description="packages as name==version, or a lock file in the source; in an environment of its own",
    )
    checkpoint: Annotated[str | None, Consumes("checkpoint")] = Field(
        None, description="stage whose model it is given"
    )
    data: Annotated[str | None, Consumes("dataset")] = Field(
        None, description="stage whose traces it is given"
    )
    outputs: tuple[str, ...] = Field(
        (), description="patterns of further files to keep, beside all that it writes to {outputs}"
    )
    figures: dict[str, str] = Field(
        {}, description="figures of the summary: FILE#KEY.KEY, of a JSON file among the outputs"
    )
    metrics: str | None = Field(None, description="JSON Lines among the outputs with `step` and figures")

    @field_validator("command")
    @classmethod
    def _known_places(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        for word in command:
            for _, name, _, _ in string.Formatter().parse(word):
                if name is not None and name not in PLACES:
                    raise ValueError(f"{{{name}}} is none of {', '.join(PLACES)}; write {{{{ for a brace")
        return command


class BlackBoxTrainingSpec(BlackBoxSpec):
    """Fields of a black_box_training stage."""

    model: str = Field(description="the Hugging Face folder it leaves, among the outputs")


class BlackBox:
    """A program that leaves files."""

    name: str = "black_box"
    spec: type[BlackBoxSpec] = BlackBoxSpec
    produces: Literal["evaluation", "checkpoint"] = "evaluation"
    output: str = "artifacts/summary.json"

    def plan(self, job: Job) -> Mapping[str, object]:
        """What will be run, from where, among which packages."""
        spec = self.spec.model_validate(job.spec)
        packages = spec.requirements
        if not isinstance(packages, str):
            check_pinned(packages)
        if is_url(spec.source) and spec.commit is None:
            raise RequestError(
                "a repository is run at one commit", where="commit", remedy="commit: 40 digits"
            )
        return {
            "source": f"{spec.origin or spec.source}{f' at {spec.commit[:12]}' if spec.commit else ''}",
            "command": " ".join(spec.command),
            "packages": packages if isinstance(packages, str) else ", ".join(packages) or "none",
        }

    def stage(self, job: Job) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
        """The spec as it is frozen, and the code it names, which becomes an input."""
        source = str(job.spec["source"])
        folder = fetched(source, job.spec["commit"])
        origin = source if is_url(source) else Path(source).name
        return {**job.spec, "source": "inputs/source", "origin": origin}, {"source": folder}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Make the environment, run the program, take what it left."""
        spec = self.spec.model_validate(workspace.job.spec)
        work = workspace.runtime / "black-box"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(workspace.input("source"), work, copy_function=_writable)
        outputs = workspace.artifacts / "outputs"
        shutil.rmtree(outputs, ignore_errors=True)
        outputs.mkdir()
        listed = spec.requirements
        requirements = lock_lines(work / listed) if isinstance(listed, str) else list(listed)
        python = interpreter(requirements)
        command = [word.format_map(_places(spec, workspace, outputs)) for word in spec.command]
        began = time.monotonic()
        _run(command, work, python, workspace)
        seconds = time.monotonic() - began
        _take(work, spec.outputs, outputs)
        files = {
            str(path.relative_to(outputs)): {"size": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(outputs.rglob("*"))
            if path.is_file()
        }
        told = {
            "origin": spec.origin,
            "commit": spec.commit,
            "command": command,
            "packages": installed(python),
            "record_digests": record_digests(python),
            "seconds": round(seconds, 3),
            "files": json.loads(manifest_bytes(files))["files"],
        }
        write_json(workspace.artifacts / "black_box.json", told)
        self._publish(spec, outputs, workspace)
        if spec.metrics is not None:
            for line in read_json_lines(_within(outputs, spec.metrics)):
                workspace.metric(**line)
        shutil.rmtree(work)
        figures = {name: _figure(outputs, place) for name, place in spec.figures.items()}
        return {
            "kind": "black_box",
            "origin": spec.origin,
            "commit": spec.commit,
            "files": len(files),
        } | figures

    def _publish(self, spec: BlackBoxSpec, outputs: Path, workspace: Workspace) -> None:
        """Put the output where later stages take it from."""


class BlackBoxTraining(BlackBox):
    """A program that leaves a model."""

    name = "black_box_training"
    spec = BlackBoxTrainingSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"

    def _publish(self, spec: BlackBoxSpec, outputs: Path, workspace: Workspace) -> None:
        assert isinstance(spec, BlackBoxTrainingSpec)
        model = _within(outputs, spec.model)
        if not (model / "config.json").is_file():
            raise WorkFailedError(
                f"the program left no model at {spec.model}", remedy="see `model` in the recipe"
            )
        final = workspace.root / self.output
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(model, final)


def _places(spec: BlackBoxSpec, workspace: Workspace, outputs: Path) -> dict[str, str]:
    places = {
        "seed": str(workspace.job.seed),
        "outputs": str(outputs),
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    for name in ("checkpoint", "data"):
        if getattr(spec, name) is not None:
            places[name] = str(workspace.input(name))
    missing = {name for word in spec.command for _, name, _, _ in string.Formatter().parse(word) if name} - {
        *places
    }
    if missing:
        name = min(missing)
        raise RequestError(f"the command asks for {{{name}}}, and the stage has no `{name}`", where="command")
    return places


def _run(command: list[str], work: Path, python: Path, workspace: Workspace) -> None:
    """Run the program to its end; what it prints goes to the run's log."""
    ours = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    environment["VIRTUAL_ENV"] = str(python.parent.parent)
    workspace.log(f"running {' '.join(command)}")
    try:
        program = subprocess.Popen(command, cwd=work, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise RequestError(f"cannot run {command[0]}: {error.strerror}", where="command") from None
    try:
        code = program.wait()
    finally:
        if program.poll() is None:  # we are told to leave
            program.terminate()
            try:
                program.wait(TERM_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
    if code:
        ended = f"was ended by signal {-code}" if code < 0 else f"left with {code}"
        raise WorkFailedError(f"the program {ended}", remedy="its words are in the log")


def _take(work: Path, patterns: tuple[str, ...], outputs: Path) -> None:
    """Copy what the patterns name to the outputs, each file under the path it had."""
    for pattern in patterns:
        found = [path for path in sorted(work.glob(pattern)) if not path.is_symlink()]
        if not found:
            raise WorkFailedError(f"the program left nothing that fits '{pattern}'", where="outputs")
        for path in found:
            target = outputs / path.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True, symlinks=True)
            else:
                shutil.copyfile(path, target)


def _within(outputs: Path, name: str) -> Path:
    path = outputs / name
    if not path.resolve().is_relative_to(outputs.resolve()) or not path.exists():
        raise WorkFailedError(f"the program left no {name}", where=str(outputs))
    return path


def _figure(outputs: Path, place: str) -> float:
    """The number at FILE#KEY.KEY."""
    name, _, keys = place.partition("#")
    try:
        found = json.loads(_within(outputs, name).read_bytes())
        for key in keys.split(".") if keys else ():
            found = found[int(key)] if isinstance(found, list) else found[key]
        return float(found)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise WorkFailedError(f"there is no number at {place}", where="figures") from None


def _writable(source: str, target: str) -> str:
    """Copy a file so that the program may change its copy, and run it where it says with what."""
    shutil.copyfile(source, target)
    with Path(source).open("rb") as file:
        Path(target).chmod(0o755 if file.read(2) == b"#!" else 0o644)
    return target


plugin = BlackBox()
training = BlackBoxTraining()
