"""The page on recursion names the seeds that a row lacks, and an unexpected error fails the benchmark."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import contexts  # noqa: E402
import recursion  # noqa: E402
from recursion_view import view  # noqa: E402


def figures(greedy: float, sampled: float) -> dict[str, Any]:
    return {"tasks": 4, "greedy": greedy, "sampled": sampled, "strategies": {"many asks": 0.5}}


def record(arm: str, seed: int, long: dict[str, Any], **more: Any) -> dict[str, Any]:
    at = {"32 after SFT": figures(0.2, 0.2), "32": figures(0.8, 0.8), "2000": long, **more}
    return {"arm": arm, "seed": seed, "at": at}


def test_failed_evaluation_and_missing_seeds_show() -> None:
    failed, unfit = {"tasks": 4, "error": "why"}, {"tasks": 4, "fits": False}
    records = [
        record("counting", 0, figures(0.8, 0.6), **{"128": figures(0.7, 0.7)}),
        record("counting", 1, figures(0.8, 0.64)),
        *(record("direct", seed, unfit) for seed in range(2)),
        record("without code", 0, failed),
        record("without code", 1, figures(0.2, 0.2)),
        record("pairs", 0, figures(0.1, 0.1)),
    ]
    shown = view({"records": records, "command": "old"})
    rows = {(row["arm"], row["lines"]): row for row in shown["accuracy"]}
    assert rows["without code", "2000"]["seeds"] == "1 of 2" == rows["counting", "128"]["seeds"]
    assert rows["without code", "2000"]["share of episodes that asked twice or more"] == [0.5]
    assert (
        rows["direct", "2000"]["seeds"] == "2"
        and rows["direct", "2000"]["accuracy, greedy"] == "does not fit"
    )
    assert "`without code`, seed 0, on 2,000 lines failed" in shown["about"]
    greedy, sampled = shown["findings"][:2]
    assert "1.00 to 1.00 times" in greedy and "reached in all seeds" in greedy
    assert "0.75 to 0.80 times" in sampled and "missed in all seeds" in sampled
    trained, fewer, curve = shown["command"].split("\n$ ")
    assert trained.endswith("--arms counting direct 'without code' --seeds 0 1")
    assert fewer.endswith("--arms pairs --seeds 0") and curve.endswith("--arms counting --seeds 0 --curve")


def test_only_a_prompt_that_does_not_fit_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(stderr: str) -> None:
        done = subprocess.CompletedProcess([], 2, "", stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    failing("12 tokens exceed 8 positions\n  try: shorten the prompt, or request fewer tokens\n")
    assert recursion.evaluate("run", {"id": "oolong"}, 9, 4, ROOT) == {"tasks": 4, "fits": False}
    failing("the disk is full\n  try: fix that, then run the same command again\n")
    with pytest.raises(SystemExit, match="the disk is full"):
        recursion.evaluate("run", {"id": "oolong"}, 9, 4, ROOT)


def test_prose_of_contexts_states_the_limit_that_the_recipe_sets() -> None:
    assert f"max_tokens: {contexts.LIMIT}}}" in contexts.RECIPE.read_text()
    assert f"could exceed {contexts.LIMIT} tokens" in contexts.ABOUT and "budget" not in contexts.TITLE
