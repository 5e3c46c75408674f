"""Does the watch recommend to stop before a hacked reward ruins the policy?

    python benchmarks/overoptimisation.py --seeds 0 1 2

Two climbs from the same cold start, neither trained on the verifier. One reward can be hacked on purpose
(benchmarks/thorough.py: it pays for working, whatever the answer). The other is a reward model learned from
pairs (the bundled recipe reward_model), which is refreshed on pairs of the policy it made. The verifier's
verdict is the gold score that the watch follows. Writes results/overoptimisation.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perilune.recipe.load import bundled_recipe
from recipe_runs import HERE, at_steps, document, for_seeds, run_recipe, write

FIGURES = ("reward", "gold", "kl_start", "gold_slope", "gold_slope_low")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learned", type=int, nargs="+", default=[0, 1, 2], help="seeds of the reward model")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "overoptimisation.json")
    arguments = parser.parse_args()
    began = time.monotonic()

    def hack(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            start = run_recipe(HERE / "cold_start.yaml", seed, home=Path(home))
            checkpoint = start["sft"]["folder"] / "artifacts" / "checkpoints" / "final"
            stages = run_recipe(HERE / "thorough.yaml", seed, [f"model.path={checkpoint}"], Path(home))
        print(f"hacked reward, seed {seed}: {told(stages['climb'])}", flush=True)
        return stages["climb"]

    def learn(seed: int) -> dict[str, dict[str, Any]]:
        stages = run_recipe(bundled_recipe("reward_model"), seed)
        print(f"reward model, seed {seed}: {told(stages['climb'])}", flush=True)
        return stages

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(for_seeds, hack, arguments.seeds, arguments.jobs)
        staged = for_seeds(learn, arguments.learned, arguments.jobs)
        hacked = waiting.result()
    learned = [stages["climb"] for stages in staged]
    judges = [
        {"seed": seed, **of_judges(stages)} for seed, stages in zip(arguments.learned, staged, strict=True)
    ]
    result = {
        "title": "Over-optimisation, and when to stop",
        "about": ABOUT,
        "findings": findings("hacked reward", hacked) + findings("reward model", learned),
        "hacked_reward": [{"seed": s, **told(one)} for s, one in zip(arguments.seeds, hacked, strict=True)],
        "reward_model": [{"seed": s, **told(one)} for s, one in zip(arguments.learned, learned, strict=True)],
        "judges": judges,
        "hacked_reward_by_step": at_steps([one["metrics"] for one in hacked], FIGURES, 10),
        "reward_model_by_step": at_steps([one["metrics"] for one in learned], FIGURES, 10),
        "curves": {
            name: [
                {
                    figure: [line.get(figure) for line in one["metrics"]]
                    for figure in ("reward", "gold", "kl_start")
                }
                for one in climbs
            ]
            for name, climbs in (("hacked reward", hacked), ("reward model", learned))
        },
        **document("overoptimisation.py", sys.argv[1:], began),
    }
    write(arguments.out, result)


ABOUT = (
    "Two rewards that are only proxies are climbed by GRPO on the tiny model, three-digit sums. The "
    "verifier is not trained on; its verdict is the gold score. `recommended stop` is where the watch "
    "said so while the run went on, without knowing what comes; `gold best` is the best step, known "
    "only afterwards."
)


def told(climb: Mapping[str, Any]) -> dict[str, Any]:
    """What the watch said, and what the gold score did."""
    gold = climb["summary"]["gold"]
    return {
        "gold_first": gold["first"],
        "gold_best": gold["best"],
        "best_step": gold["best_step"],
        "recommended_stop": gold["recommended_stop"],
        "gold_there": gold["at_recommended_stop"],
        "alarm": gold["alarm"],
        "gold_last": gold["last"],
        "reward_first": climb["summary"]["first"]["reward"],
        "reward_last": climb["summary"]["last"]["reward"],
        "kl_last": climb["metrics"][-1]["kl_start"],
    }


def of_judges(stages: Mapping[str, Any]) -> dict[str, Any]:
    """How well the reward model tells pairs apart: at first, on the new policy's pairs, and refreshed."""
    judge, refreshed = stages["judge"]["summary"], stages["refreshed"]["summary"]
    return {
        "pairs": judge["pairs"],
        "accuracy": judge["validation"]["accuracy"],
        "length_correlation": judge["validation"].get("length_correlation"),
        "new_pairs": stages["new_pairs"]["summary"]["rows"],
        "on_old_and_new": refreshed["accuracy_before"],
        "refreshed": refreshed["validation"]["accuracy"],
        "pass@1_of_policy": stages["after_climb"]["summary"]["pass@1"],
    }


def findings(name: str, climbs: list[Mapping[str, Any]]) -> list[str]:
    """Sentences that say what the tables show."""
    said = []
    all_told = [told(one) for one in climbs]
    fell = [one for one in all_told if one["gold_last"] < 0.8 * one["gold_best"]]
    said.append(f"{name}: gold ended below 80% of its best with {len(fell)} of {len(all_told)} seeds.")
    stopped = [one for one in all_told if one["recommended_stop"] is not None]
    kept = [one for one in stopped if one["gold_there"] >= 0.8 * one["gold_best"]]
    said.append(
        f"{name}: the watch recommended to stop with {len(stopped)} of {len(all_told)} seeds, with"
        f" {len(kept)} of them while gold was at 80% of its best or more."
    )
    return said


if __name__ == "__main__":
    main()
