"""What measurements of learning share: a recipe is run for several seeds, arms are compared by task."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from perilune.bundle.machine import describe_machine
from perilune.metrics.bootstrap import paired_difference

HERE = Path(__file__).resolve().parent

Found = TypeVar("Found")


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """What every benchmark of recipes takes; results go to results/<name>.json unless told otherwise."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{name}.json")
    return parser


def run_recipe(
    recipe: Path, seed: int, overrides: Sequence[str] = (), home: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run a recipe from nothing; summary, metrics and folder of each stage, by its name.

    Args:
        home: where runs are kept, for who wants more of them than is returned.
    """
    if home is None:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
            return run_recipe(recipe, seed, overrides, Path(folder))
    command = [str(Path(sys.executable).with_name("perilune")), "run", str(recipe), "--json"]
    for override in (f"seed={seed}", *overrides):
        command += ["--set", override]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PERILUNE_HOME": str(home), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return {stage: evidence(Path(bundle)) for stage, bundle in json.loads(done.stdout)["bundles"].items()}


def for_seeds(run: Callable[[int], Found], seeds: Sequence[int], jobs: int) -> list[Found]:
    """What `run` gives for each seed, in order; `jobs` of them at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, seeds))


def evidence(bundle: Path) -> dict[str, Any]:
    """Summary, metrics and folder of a bundle that was run."""
    artifacts = bundle / "artifacts"
    lines = (
        (artifacts / "metrics.jsonl").read_text().splitlines()
        if (artifacts / "metrics.jsonl").exists()
        else []
    )
    return {
        "summary": json.loads((artifacts / "summary.json").read_text()),
        "metrics": [json.loads(line) for line in lines],
        "folder": bundle,
    }


def passed(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Share of right samples by task id."""
    return {task: c / n for task, n, c in evaluation["summary"]["correct_per_task"]}


def difference(before: Mapping[str, Any], after: Mapping[str, Any], seed: int) -> dict[str, float]:
    """pass@1 of one evaluation less that of another, paired by task, with its 95% interval."""
    return paired_difference(passed(before), passed(after), seed=seed)._asdict()


def verdict(name: str, other: str, differences: Sequence[Mapping[str, float]]) -> str:
    """In words, what the differences of all seeds allow to be said."""
    name, other = f"`{name}`", f"`{other}`"
    if all(one["low"] > 0 for one in differences):
        return f"{name} above {other} with every seed: not noise."
    if all(one["high"] < 0 for one in differences):
        return f"{name} below {other} with every seed: not noise."
    signs = {one["mean"] > 0 for one in differences if not one["low"] <= 0 <= one["high"]}
    if len(signs) > 1:
        return f"{name} against {other} depends on the seed: clear both ways, so no finding."
    clear = sum(not one["low"] <= 0 <= one["high"] for one in differences)
    if not clear:
        return f"{name} against {other} is noise: no seed is clear of zero."
    return f"{name} against {other} is not settled: clear of zero with {clear} of {len(differences)} seeds."


def described(about: str, findings: Sequence[str]) -> str:
    """What a result's page opens with: what was done, and what came of it."""
    return "\n".join([about, "", *(f"* {one}" for one in findings)])


def at_steps(
    runs: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str], every: int
) -> list[dict[str, Any]]:
    """Rows of a table: the named figures of all seeds at the first step and at every `every`-th."""
    steps = [line["step"] for line in runs[0]]
    chosen = [step for step in steps if step == steps[0] or step % every == 0 or step == steps[-1]]
    by_step = [{line["step"]: line for line in run} for run in runs]

    def of_all(step: int, name: str) -> list[float] | None:
        values = [run[step].get(name) for run in by_step]
        return None if None in values else values

    return [{"step": step} | {name: of_all(step, name) for name in names} for step in chosen]


def document(script: str, arguments: Sequence[str], began: float) -> dict[str, Any]:
    """What every result says of how it was made."""
    words = list(arguments)
    if "--out" in words:  # where it was put is nobody's concern
        del words[words.index("--out") : words.index("--out") + 2]
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "versions": {name: version(name) for name in ("perilune", "torch", "reasoning-gym")},
        "processor": describe_machine()["processor"]["model"],
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result where the pages are made from."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
