"""black_box: run an unmodified external program as a stage, and record a manifest of its files.

The bundle contains the program's code at one commit. The program runs from its own copy, in its own virtual
environment, without Perilune. It receives its inputs through its command, and its outputs are files. A
program that trains writes a Hugging Face folder, which later stages use like any other checkpoint, so its
result is measured in the same way as ours.
"""

import json
import math
import os
import shutil
import string
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from perilune.bundle.job import Job
from perilune.bundle.manifest import manifest_bytes
from perilune.bundle.plugin import Consumes, NamesPath
from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json_lines, sha256_file, write_json
from perilune.frozen import Frozen
from perilune.tasks.black_box.environment import (
    check_pinned,
    installed,
    interpreter,
    lock_lines,
    record_digests,
)
from perilune.tasks.black_box.source import fetch_source, is_url

TERM_SECONDS = 10.0  # time to exit after SIGTERM
PLACEHOLDERS = ("seed", "outputs", "threads", "checkpoint", "data")


class BlackBoxSpec(Frozen):
    """Fields of a black_box stage."""

    source: Annotated[str, NamesPath()] = Field(
        description="source of the program: a folder, a git repository, or a repository's URL"
    )
    commit: str | None = Field(
        None, description="for a repository: the commit to run, as 40 hexadecimal digits"
    )
    origin: str = Field("", description="the original source; filled in when the bundle is made")
    command: tuple[str, ...] = Field(
        min_length=1,
        description="argument list; {seed}, {outputs}, {threads}, {checkpoint} and {data} are filled in",
    )
    requirements: tuple[str, ...] | str = Field(
        (),
        description="packages of the program's virtual environment: a list of name==version, or the path"
        " of a lock file in the source",
    )
    checkpoint: Annotated[str | None, Consumes("checkpoint")] = Field(
        None, description="stage whose model the program receives, as the folder {checkpoint}"
    )
    data: Annotated[str | None, Consumes("dataset")] = Field(
        None, description="stage whose traces the program receives, as the folder {data}"
    )
    outputs: tuple[str, ...] = Field(
        (),
        description="patterns of files in the program's working folder to keep, besides all files in"
        " {outputs}",
    )
    figures: dict[str, str] = Field(
        {},
        description="figures of the summary by name, each as FILE#KEY.KEY: a number in a JSON file among"
        " the outputs",
    )
    metrics: str | None = Field(
        None,
        description="JSON Lines file among the outputs; each line has a `step`, and metrics of that step",
    )

    @field_validator("outputs")
    @classmethod
    def _check_patterns(cls, outputs: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in outputs:
            parts = Path(pattern).parts
            if not parts or Path(pattern).is_absolute() or ".." in parts:
                raise ValueError(f"'{pattern}' is not below the program's folder")
        return outputs

    @field_validator("command")
    @classmethod
    def _check_placeholders(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        for word in command:
            for _, name, _, _ in string.Formatter().parse(word):
                if name is not None and name not in PLACEHOLDERS:
                    known = ", ".join(PLACEHOLDERS)
                    raise ValueError(f"{{{name}}} is none of {known}; write {{{{ for a brace")
        return command


class BlackBoxTrainingSpec(BlackBoxSpec):
    """Fields of a black_box_training stage."""

    model: str = Field(description="the Hugging Face folder among the outputs")


class BlackBox:
    """Runs a program that writes files."""

    name: str = "black_box"
    spec: type[BlackBoxSpec] = BlackBoxSpec
    produces: Literal["evaluation", "checkpoint"] = "evaluation"
    output: str = "artifacts/summary.json"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Return the source, the command and the packages.

        Raises:
            RequestError: when a version is not exact, or a repository has no commit.
        """
        spec = self.spec.model_validate(job.spec)
        packages = spec.requirements
        if not isinstance(packages, str):
            check_pinned(packages)
        if is_url(spec.source) and spec.commit is None:
            raise RequestError(
                "a repository needs a commit", where="commit", remedy="set commit to all 40 digits"
            )
        return {
            "source": f"{spec.origin or spec.source}{f' at {spec.commit[:12]}' if spec.commit else ''}",
            "command": " ".join(spec.command),
            "packages": packages if isinstance(packages, str) else ", ".join(packages) or "none",
        }

    def stage(self, job: Job) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
        """Return the spec of the bundle, and the source code as its input."""
        source = str(job.spec["source"])
        folder = fetch_source(source, job.spec["commit"])
        origin = source if is_url(source) else Path(source).name
        return {**job.spec, "source": "inputs/source", "origin": origin}, {"source": folder}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Create the virtual environment, run the program, and collect its outputs."""
        spec = self.spec.model_validate(workspace.job.spec)
        work = workspace.runtime / "black-box"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(workspace.input("source"), work, copy_function=_copy_writable)
        outputs = workspace.artifacts / "outputs"
        shutil.rmtree(outputs, ignore_errors=True)
        outputs.mkdir()
        packages = spec.requirements
        requirements = lock_lines(work / packages) if isinstance(packages, str) else list(packages)
        python = interpreter(requirements)
        command = [word.format_map(_placeholders(spec, workspace, outputs)) for word in spec.command]
        start = time.monotonic()
        _run(command, work, python, workspace)
        seconds = time.monotonic() - start
        _copy_outputs(work, spec.outputs, outputs)
        files = {
            str(path.relative_to(outputs)): {"size": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(outputs.rglob("*"))
            if path.is_file()
        }
        record = {
            "origin": spec.origin,
            "commit": spec.commit,
            "command": command,
            "packages": installed(python),
            "record_digests": record_digests(python),
            "seconds": round(seconds, 3),
            "files": json.loads(manifest_bytes(files))["files"],
        }
        write_json(workspace.artifacts / "black_box.json", record)
        self._publish(spec, outputs, workspace)
        workspace.rewind(-1)  # removes the metrics of an earlier attempt
        if spec.metrics is not None:
            _copy_metrics(_output_path(outputs, spec.metrics), workspace)
        shutil.rmtree(work)
        figures = {name: _read_figure(outputs, source) for name, source in spec.figures.items()}
        return {
            "kind": "black_box",
            "origin": spec.origin,
            "commit": spec.commit,
            "files": len(files),
        } | figures

    def _publish(self, spec: BlackBoxSpec, outputs: Path, workspace: Workspace) -> None:
        """Copy the output to the path that later stages read."""


class BlackBoxTraining(BlackBox):
    """Runs a program that trains and writes a model."""

    name = "black_box_training"
    spec = BlackBoxTrainingSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"

    def _publish(self, spec: BlackBoxSpec, outputs: Path, workspace: Workspace) -> None:
        assert isinstance(spec, BlackBoxTrainingSpec)
        model = _output_path(outputs, spec.model)
        if not (model / "config.json").is_file():
            raise WorkFailedError(
                f"the program wrote no model to {spec.model}", remedy="correct `model` in the recipe"
            )
        final = workspace.root / self.output
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(model, final)


def _placeholders(spec: BlackBoxSpec, workspace: Workspace, outputs: Path) -> dict[str, str]:
    values = {
        "seed": str(workspace.job.seed),
        "outputs": str(outputs),
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    for name in ("checkpoint", "data"):
        if getattr(spec, name) is not None:
            values[name] = str(workspace.input(name))
    used = {name for word in spec.command for _, name, _, _ in string.Formatter().parse(word) if name}
    for name in sorted(used - values.keys()):
        raise RequestError(f"the command uses {{{name}}}, and the stage has no `{name}`", where="command")
    return values


def _run(command: list[str], work: Path, python: Path, workspace: Workspace) -> None:
    """Run the program; its output goes to the run's log."""
    excluded = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
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
        if program.poll() is None:  # this process was told to stop
            program.terminate()
            try:
                program.wait(TERM_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
    if code:
        result = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        raise WorkFailedError(f"the program {result}", remedy="see the log for its output")


def _copy_outputs(work: Path, patterns: tuple[str, ...], outputs: Path) -> None:
    """Copy the files that match the patterns to the outputs, under their relative paths."""
    for pattern in patterns:
        matches = [path for path in sorted(work.glob(pattern)) if not path.is_symlink()]
        if not matches:
            raise WorkFailedError(f"no file of the program matches '{pattern}'", where="outputs")
        for path in matches:
            target = outputs / path.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True, symlinks=True)
            else:
                shutil.copyfile(path, target)


def _output_path(outputs: Path, name: str) -> Path:
    path = outputs / name
    if not path.resolve().is_relative_to(outputs.resolve()) or not path.exists():
        raise WorkFailedError(f"the program wrote no {name}", where=str(outputs))
    return path


def _copy_metrics(path: Path, workspace: Workspace) -> None:
    """Append the program's metrics to those of the run."""
    for number, line in enumerate(read_json_lines(path), start=1):
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise WorkFailedError(
                "the metrics need lines that are JSON objects with a whole number `step`",
                where=f"{path}, line {number}",
            )
        step = line.pop("step")
        workspace.metric(step, **{name: value for name, value in line.items() if not _is_infinite(value)})


def _is_infinite(value: object) -> bool:
    """Return whether the value is NaN or infinite, which JSON cannot represent."""
    return isinstance(value, float) and not math.isfinite(value)


def _read_figure(outputs: Path, source: str) -> float:
    """Return the number at FILE#KEY.KEY."""
    name, _, keys = source.partition("#")
    try:
        value = json.loads(_output_path(outputs, name).read_bytes())
        for key in keys.split(".") if keys else ():
            value = value[int(key)] if isinstance(value, list) else value[key]
        figure = float(value)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, OSError):
        figure = math.nan
    if not math.isfinite(figure):
        raise WorkFailedError(f"there is no number at {source}", where="figures")
    return figure


def _copy_writable(source: str, target: str) -> str:
    """Copy a file as writable, and as executable if it starts with `#!`."""
    shutil.copyfile(source, target)
    with Path(source).open("rb") as file:
        Path(target).chmod(0o755 if file.read(2) == b"#!" else 0o644)
    return target


plugin = BlackBox()
training = BlackBoxTraining()
