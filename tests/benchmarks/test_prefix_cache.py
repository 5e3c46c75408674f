"""The simulation of the prefix cache: larger stores find more of the prompts, up to unlimited pools."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from prefix_cache import ANSWER, MODELS, STORES, complete_blocks, rule_runs, trace


@pytest.mark.parametrize("model", MODELS)
def test_hits_rise_with_the_size_of_the_store(model: str) -> None:
    turns = trace(sessions=12, turns=8, seed=0)
    lengths = {turn.session: turn.length + ANSWER for turn in turns}.values()
    runs = rule_runs(complete_blocks(lengths, MODELS[model]), MODELS[model])
    hits = {rule: run(turns)[0] for rule, run in runs.items()}
    sizes = ["tail rule", *STORES, "unlimited store"]
    rising = [hits[rule] for rule in sizes]
    assert rising == sorted(rising)
    assert rising[0] < rising[1] < rising[-1] == hits["unlimited"]
    assert hits["plain LRU"] <= hits["tail rule"] < hits["announced"] < hits["unlimited"]
