"""Test that a schedule log determines an asynchronous run: repeated on busy cores, and killed ten times.

    python benchmarks/schedule.py [--kills 10]

Runs the stage `ahead_2` of asynchronous.yaml, repeats it with its schedule log while other processes keep
every core busy, repeats it again with SIGKILL at random instants, and compares all results byte for byte.
Writes results/schedule.json.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.freeze import copy_for_attempt
from perilune.bundle.workspace import SCHEDULE
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines, sha256_file
from recipe_runs import HERE, document, run_recipe, write

STAGE = "ahead_2"
SAVE_EVERY = 5
SHORT = (  # stages that this benchmark does not need
    *("synchronous.steps=1", "ahead_1.steps=1", "before.tasks=2"),
    *("after_synchronous.tasks=2", "after_ahead_1.tasks=2", "after_ahead_2.tasks=2"),
)
WEIGHTS = "artifacts/checkpoints/final/model.safetensors"
ABOUT = """\
The first run has staleness 2, in an environment that waits before it answers, and writes a schedule log. Two
more runs follow the log. During the first of them, other processes keep every core busy. The second is killed
with SIGKILL at random times, and resumes from its last checkpoint. It writes a checkpoint every 5 steps. We
compare `metrics.jsonl`, the episodes, the schedule log and the final checkpoint, byte for byte."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "schedule.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        changes = ["environment.seconds=0.02", f"{STAGE}.save_every={SAVE_EVERY}", *SHORT]
        run = run_recipe(HERE / "asynchronous.yaml", 0, changes, Path(folder) / "home")[STAGE]
        first = run["folder"]
        bundle = first.parents[1] / "bundle"
        rows = [row("first run", first, first, 0)]
        with busy_cores():
            rows.append(row("busy cores", first, *follow(bundle, first, Path(folder) / "busy", 0)))
        killed = follow(bundle, first, Path(folder) / "killed", arguments.kills)
        rows.append(row("killed and resumed", first, *killed))
        mixed = fmean(line["mixed_versions"] for line in run["metrics"])
    findings = [f"{mixed:.0%} of the episodes were sampled by several versions of the weights."]
    result = {
        "title": "An asynchronous run repeated from its schedule log",
        "about": ABOUT,
        "findings": findings,
    }
    write(arguments.out, result | {"runs": rows} | document("schedule.py", sys.argv[1:], began))


def follow(bundle: Path, first: Path, folder: Path, kills: int) -> tuple[Path, int]:
    """Run a bundle with the log of its first run. Return the last attempt and the number of kills.

    A kill after 7.3 steps comes 0.3 times the seconds of a step after the metrics of step 7, so kills hit
    all parts of a step.
    """
    seconds = [
        sum(line[part] for part in ("sampling", "scoring", "learning", "other"))
        for line in read_json_lines(first / "artifacts" / "timings.jsonl")
    ]
    instants = sorted(random.Random(0).uniform(0, len(seconds)) for _ in range(kills))
    attempt, hits = next_attempt(bundle, first, folder, None), 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-m", "perilune.execution.task_process", str(attempt), str(os.getpid())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        )
        while process.poll() is None and (not instants or steps(attempt) < int(instants[0])):
            time.sleep(0.005)
        if process.poll() is None:
            time.sleep(instants[0] % 1 * median(seconds))
        if process.poll() is not None:
            assert process.returncode == 0, f"exit code {process.returncode}"
            return attempt, hits
        process.kill()
        process.wait()
        hits += 1
        del instants[0]
        attempt = next_attempt(bundle, first, folder, attempt)


def next_attempt(bundle: Path, first: Path, folder: Path, previous: Path | None) -> Path:
    """A copy of the bundle with the schedule log and the outputs of the attempt before."""
    attempt = folder / str(0 if previous is None else int(previous.name) + 1)
    folder.mkdir(exist_ok=True)
    copy_for_attempt(bundle, attempt)
    shutil.copyfile(first / "artifacts" / SCHEDULE, attempt / "runtime" / SCHEDULE)
    if previous is not None:
        restore_outputs(previous / "artifacts", attempt / "artifacts")
    return attempt


def steps(attempt: Path) -> int:
    path = attempt / "artifacts" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in loads:
            process.kill()


def row(name: str, first: Path, attempt: Path, kills: int) -> dict[str, Any]:
    return {
        "run": name,
        "kills": kills,
        "steps": steps(attempt),
        "differences": len(compare_artifacts(first, attempt)),
        "final weights (sha256)": sha256_file(attempt / WEIGHTS)[:16],
    }


if __name__ == "__main__":
    main()
