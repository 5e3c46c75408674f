"""The input of the report: the stages of an experiment in order, and the folders of their attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import RequestError
from perilune.files import read_json

if TYPE_CHECKING:
    from perilune.control.queries.lookup import AttemptUse

SEARCH_DEPTH = 4  # levels to search; a home has runs/<run>/attempts/<n>


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage of an experiment.

    Attributes:
        state: state of its run ("queued", "active", "succeeded", "failed", "cancelled").
        attempt_dir: the folder of the current attempt, or None before the first.
        cause: why the run failed, or "".
        here: whether the run is on this machine; files of remote runs are copies and may be outdated.
    """

    name: str
    task: str
    run_id: str
    state: str
    attempt_dir: Path | None
    attempts: int = 1
    cause: str = ""
    here: bool = True


@dataclass(frozen=True, slots=True)
class ExperimentView:
    """An experiment.

    Attributes:
        recipe: the resolved recipe as YAML.
        placed: all attempts of the stages, with their machines; empty for a folder outside a home.
        declared: the settings of the stages in the recipe, by name; empty for a folder outside a home.
    """

    name: str
    seed: int
    recipe: str
    stages: tuple[StageView, ...]
    placed: tuple[AttemptUse, ...] = ()
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def view_folder(path: Path) -> ExperimentView:
    """Return the view of an attempt directory, or of a folder with attempts, without a control plane.

    Uses the newest attempt of each run. Orders stages by the start of their attempts.

    Raises:
        RequestError: when there is no attempt directory at or below `path`.
    """
    if (path / "job.json").is_file():
        folders = [path]
    else:
        depths = range(1, SEARCH_DEPTH + 1)
        folders = [job.parent for depth in depths for job in path.glob("*/" * depth + "job.json")]
    attempts = [folder for folder in folders if _has_begun(folder)]
    if not attempts:
        raise RequestError(
            "no attempt directory (job.json beside artifacts/ or runtime/) at or below this path",
            where=str(path),
            remedy="name an experiment or run of `perilune runs`, or the folder of an attempt",
        )
    runs: dict[Path | str, list[Path]] = {}
    for folder in attempts:
        is_numbered = folder.parent.name == "attempts" and folder.name.isdigit()
        runs.setdefault(folder.parent if is_numbered else folder, []).append(folder)
    stages = []
    for tries in runs.values():
        newest = max(tries, key=lambda folder: int(folder.name) if folder.name.isdigit() else 0)
        stages.append((_start_time(newest), _view_attempt(newest, len(tries))))
    stages.sort(key=lambda pair: pair[0])
    ordered = tuple(stage for _, stage in stages)
    return ExperimentView(path.resolve().name, derive_seed(ordered), "", ordered)


def derive_seed(stages: Sequence[StageView]) -> int:
    """Return the seed of the first stage that has begun; 0 without one."""
    jobs = [stage.attempt_dir / "job.json" for stage in stages if stage.attempt_dir is not None]
    return int(read_json(jobs[0]).get("seed", 0)) if jobs else 0


def _has_begun(folder: Path) -> bool:
    """Return whether `folder` is an attempt, not only a frozen bundle."""
    artifacts = folder / "artifacts"
    return (folder / "runtime" / "claim.json").exists() or (artifacts.is_dir() and any(artifacts.iterdir()))


def _start_time(attempt: Path) -> float:
    times = [file.stat().st_mtime for file in (attempt / "runtime").glob("*.json")]
    precheck = attempt / "artifacts" / "precheck.json"
    if precheck.exists():
        times.append(precheck.stat().st_mtime)
    return min(times, default=attempt.stat().st_mtime)


def _view_attempt(attempt: Path, attempts: int) -> StageView:
    job = read_json(attempt / "job.json")
    state, cause = read_state(attempt)
    is_numbered = attempt.parent.name == "attempts"
    run_id = attempt.parent.parent.name if is_numbered else attempt.resolve().name
    return StageView(str(job.get("stage")), str(job.get("task")), run_id, state, attempt, attempts, cause)


def read_state(attempt: Path) -> tuple[str, str]:
    """Return state and cause of an attempt from its files. It is active until result.json exists."""
    result_file = attempt / "runtime" / "result.json"
    if not result_file.exists():
        return "active", ""
    result = read_json(result_file)
    if result.get("exit_code") == 0:
        return "succeeded", ""
    return "failed", str(result.get("cause") or f"exit code {result.get('exit_code')}")
