"""Measure the accuracy and the cost of each `context` rule in long episodes, for several seeds.

    python benchmarks/contexts.py [--seeds 0 1 2]

Runs contexts.yaml once for each arm. Writes results/contexts.json.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes
from recipe_runs import (
    HERE,
    SEEDS_ARE_THE_UNIT,
    compare_arms,
    document,
    for_seeds,
    mean_pass_rate,
    options,
    run_recipe,
    write,
)

RECIPE = HERE / "contexts.yaml"
LIMIT = next(  # tokens of an episode after its prompt, in the arm that cuts episodes off
    stage["environment"]["episodes"]["max_tokens"]
    for stage in yaml.safe_load(RECIPE.read_text())["stages"]
    if stage["name"] == "cut_off"
)
ABOVE = 90  # characters after the prompt before a rule applies
FIGURES = ("contexts", "largest context", "total tokens")
WHOLE, CUT = "whole conversation", "cut off at the limit"


def rule(name: str) -> str:
    """The override that sets a rule."""
    return f"environment.context={{rule: {name}, above: {ABOVE}, last: 1}}"


ARMS: Mapping[str, Sequence[str]] = {
    WHOLE: (),
    "drop_output": (rule("drop_output"),),
    "fold": (rule("fold"),),
    "policy": (rule("policy"), "traces.strategies={folded: 1.0}"),
}
TITLE = "Rules for the context of long episodes"
ABOUT = f"""\
The model is trained from scratch in the environment `wide_lookup` with `notes: last`: it reads six shards,
one per turn, and must write all six values in its last turn. The demonstrations write down each value in the
turn after its shard. The whole conversation has about 220 tokens. The arms differ in what a context keeps:

* `whole conversation`: everything.
* `cut off at the limit`: everything, but the episode ends before a turn that could exceed {LIMIT} tokens
  after the prompt. The model is that of `whole conversation`.
* `drop_output`, `fold`: the [rule](../how-to/long-episodes.md) of this name applies as soon as the
  conversation has more than {ABOVE} characters after the prompt. It leaves the last turn unchanged.
* `policy`: in its demonstrations, the model replaces its old turns by its notes after every third shard, with
  the rule of this name. Nothing forces it to.

So the contexts have similar lengths, not equal ones: see *largest context*.

The columns:

* *Contexts* is the mean number of contexts per episode.
* *Largest context* is the length of the longest context of an episode, in tokens, as a mean over episodes.
* *Total tokens* counts the tokens of all contexts. It counts a token that contexts share once per context,
  although the prefix cache computes it once.

Each arm has its own 3,000 traces and 700 steps of SFT. A trace gives one training sequence per context.
pass@1 is measured on 96 held-out tasks with 2 episodes each. There is no RL, because SFT alone makes nearly
all answers of `whole conversation` right. The rule `summarise` is left out, because there are no
demonstrations of summaries. {SEEDS_ARE_THE_UNIT}

`fold` loses the values that it folds away, so its pass@1 is near 0 by construction. This rule suits tasks in
which the environment keeps the state. `policy` and `drop_output` keep the values, and the demonstrations use
them. The benchmark does not show whether a language model folds well without demonstrations."""


def main() -> None:
    arguments = options(__doc__, "contexts").parse_args()
    began = time.monotonic()
    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    write(arguments.out, report(arguments.seeds, runs) | document("contexts.py", sys.argv[1:], began))


def run(seed: int) -> dict[str, dict[str, Any]]:
    """Evaluate each arm."""
    results = {}
    for arm, overrides in ARMS.items():
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            stages = run_recipe(RECIPE, seed, overrides, Path(home))
            results[arm] = result(stages["after"])
            if arm == WHOLE:
                results[CUT] = result(stages["cut_off"])
        print(time.strftime("%H:%M:%S"), seed, json.dumps(results[arm]), flush=True)
    return results


def result(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an evaluation that the report needs."""
    episodes = read_episodes(stage["folder"] / "artifacts" / "episodes" / "step-000000.parquet")
    return {"summary": {"pass@1": stage["summary"]["pass@1"]}, **figures(episodes)}


def figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes."""
    sizes = [
        [span.prompt_tokens + span.tokens for span in item.spans]
        or [len(item.prompt_ids) + len(item.token_ids)]
        for item in episodes
    ]
    return {
        "contexts": fmean(map(len, sizes)),
        "largest context": fmean(map(max, sizes)),
        "total tokens": fmean(map(sum, sizes)),
    }


def report(seeds: Sequence[int], runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    pairs = [(arm, CUT) for arm in ARMS if arm != WHOLE]
    pairs += [(arm, WHOLE) for arm in ("drop_output", "policy")]
    sentences, rows = compare_arms(runs, {arm: arm for arm in runs[0]}, pairs)
    return {
        "title": TITLE,
        "about": ABOUT,
        "findings": sentences,
        "accuracy and tokens": [
            {
                "context": arm,
                "pass@1 by seed": [round(mean_pass_rate(run[arm]), 3) for run in runs],
                **{name: fmean(run[arm][name] for run in runs) for name in FIGURES},
            }
            for arm in runs[0]
        ],
        "comparisons": rows,
    }


if __name__ == "__main__":
    main()
