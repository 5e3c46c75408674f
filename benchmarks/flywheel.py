"""Measure four rounds of a flywheel that starts from few right answers, for several seeds.

    python benchmarks/flywheel.py [--seeds 0 1 2]

Runs recipes/flywheel.yaml. Writes results/flywheel.json.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recipe_runs import HERE, document, for_seeds, options, run_recipe, write

RECIPE = HERE.parent / "recipes" / "flywheel.yaml"
ABOUT = """\
After SFT (the cold start), few answers of the model are right, because only one in twenty SFT traces showed
working. Each round samples four answers to each of 1,024 new tasks, keeps the most likely right answer of
each task, and makes 60 optimizer steps on the kept answers of all rounds.

* *Yield* is the share of right answers on 256 held-out tasks, with four answers each. Its intervals are over
  tasks.
* The *odds ratio* of a round is the factor by which the round multiplies the odds of a right answer, with its
  95% interval.
* *Answers kept* are those of this round. *Tokens per kept answer* is their mean length.
* *Verifier: accepts right / accepts wrong* is the probability that the verifier accepts a right answer,
  divided by the probability that it accepts a wrong one. The column gives a lower bound."""


def main() -> None:
    arguments = options(__doc__, "flywheel").parse_args()
    began = time.monotonic()
    runs = for_seeds(lambda seed: run_recipe(RECIPE, seed)["flywheel"], arguments.seeds, arguments.jobs)
    write(arguments.out, report(arguments.seeds, runs) | document("flywheel.py", sys.argv[1:], began))


def report(seeds: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gains = [run["summary"]["gain"] for run in runs]
    return {
        "title": "Flywheel on three-digit sums",
        "about": ABOUT,
        "findings": [finding(seed, run) for seed, run in zip(seeds, runs, strict=True)],
        "odds ratio per round, fitted to all rounds": {
            f"seed {s}": g for s, g in zip(seeds, gains, strict=True)
        },
        "rounds": [row(seed, line) for seed, run in zip(seeds, runs, strict=True) for line in run["metrics"]],
    }


def finding(seed: int, run: Mapping[str, Any]) -> str:
    lines, summary = run["metrics"], run["summary"]
    last = lines[-1]
    still = "raised it" if last["gain_low"] > 1 else "may not have raised it"
    return (
        f"Seed {seed}: yield {lines[0]['pass_rate']:.1%} to {last['pass_rate']:.1%} in {summary['rounds']} "
        f"rounds; the last round {still} (odds ratio {last['gain']:.2f}, {last['gain_low']:.2f} to "
        f"{last['gain_high']:.2f})."
    )


def row(seed: int, line: Mapping[str, Any]) -> dict[str, Any]:
    def interval(name: str) -> dict[str, float] | None:
        if name not in line:
            return None
        return {"mean": line[name], "low": line[f"{name}_low"], "high": line[f"{name}_high"]}

    return {
        "seed": seed,
        "round": line["step"],
        "yield": interval("pass_rate"),
        "odds ratio": interval("gain"),
        "share of answers accepted": line.get("accept_rate"),
        "answers kept": line.get("rows"),
        "tokens per kept answer": line.get("tokens_per_row"),
        "verifier: accepts right / accepts wrong, at least": line.get("verifier_ratio_low"),
    }


if __name__ == "__main__":
    main()
