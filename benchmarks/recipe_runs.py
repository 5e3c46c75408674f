"""Shared parts of benchmarks of learning: run a recipe for several seeds, compare arms task by task."""

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
from perilune.metrics.across_seeds import compare_over_seeds

HERE = Path(__file__).resolve().parent

Found = TypeVar("Found")


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The shared command-line options. Results go to results/<name>.json by default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{name}.json")
    return parser


def run_recipe(
    recipe: Path, seed: int, overrides: Sequence[str] = (), home: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run a recipe, and return summary, metrics and folder of each stage by its name.

    Args:
        home: home of the runs, for callers that need more of their files.
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
    """The results of `run` for each seed, in order, with `jobs` runs at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, seeds))


def evidence(bundle: Path) -> dict[str, Any]:
    """Summary, metrics and folder of a finished bundle."""
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


def mean_pass_rate(evaluation: Mapping[str, Any]) -> float:
    """pass@1 over all held-out tasks."""
    return float(evaluation["summary"]["pass@1"]["mean"])


SEEDS_ARE_THE_UNIT = "Differences are tested [over paired seeds](index.md#differences-over-seeds)."


def compare_arms(
    runs: Sequence[Mapping[str, Any]], stages: Mapping[str, str], compared: Sequence[tuple[str, str]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Compare pass@1 of arms over seeds: a sentence and a table row for each comparison.

    Args:
        runs: the stages of each seed.
        stages: the evaluation stage of each arm.
        compared: pairs (arm, reference). All of them are corrected together.
    """
    differences = {
        f"`{arm}` against `{other}`": [
            mean_pass_rate(run[stages[arm]]) - mean_pass_rate(run[stages[other]]) for run in runs
        ]
        for arm, other in compared
    }
    return describe_differences(differences)


def describe_differences(
    differences: Mapping[str, Sequence[float]], figure: str = "pass@1"
) -> tuple[list[str], list[dict[str, Any]]]:
    """A sentence and a table row for each comparison, from its differences of `figure` by seed."""
    comparisons = compare_over_seeds(differences)
    rows = [
        {
            "comparison": name,
            f"difference of {figure}, 95% interval": {"mean": test.mean, "low": test.low, "high": test.high},
            "by seed": list(test.differences),
            "p": test.p,
            "corrected p": test.p_corrected,
            "conclusion": test.conclusion,
        }
        for name, test in comparisons.items()
    ]
    return [f"{name}: {test.describe()}." for name, test in comparisons.items()], rows


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
    """The part of a result that describes its measurement."""
    words = list(arguments)
    if "--out" in words:  # the place of the result does not matter to readers
        del words[words.index("--out") : words.index("--out") + 2]
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "versions": {name: version(name) for name in ("perilune", "torch", "reasoning-gym")},
        "processor": describe_machine()["processor"]["model"],
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result into the folder from which the pages are made."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
