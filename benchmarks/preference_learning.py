"""Compare DPO and IPO on pairs made by the verifier: accuracy, and probabilities of the chosen answers.

    python benchmarks/preference_learning.py --seeds 0 1 2

Each seed runs benchmarks/preference_arms.yaml: one cold start, one set of pairs, five arms that learn from
them, and one that only imitates right answers sampled with the same budget. Writes
results/preference_learning.json.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recipe_runs import (
    HERE,
    SEEDS_ARE_THE_UNIT,
    at_steps,
    compare_arms,
    document,
    for_seeds,
    options,
    run_recipe,
    write,
)

ARMS = ("dpo", "dpo_nll", "dpo_dpop", "ipo", "ipo_nll")
FIGURES = ("accuracy", "margin", "chosen_shift", "chosen_nll", "length_correlation")
COMPARED = (
    ("dpo", "sft"), ("ipo", "sft"), ("dpo_nll", "dpo"), ("dpo_dpop", "dpo"), ("ipo_nll", "ipo"),
    ("dpo", "ipo"), ("dpo_nll", "ipo_nll"), ("dpo_nll", "imitation"), ("ipo_nll", "imitation"),
)  # fmt: skip
ABOUT = f"""\
Each pair has one right and one wrong answer to the same task, according to the verifier. The answers are
sampled from the model after SFT (`sft`), and most of its answers are wrong. The arms `dpo_nll` and `ipo_nll`
add the negative log-likelihood of the chosen answer to the loss, and `dpo_dpop` adds the term of DPO-Positive
([preference losses](../how-to/preference.md)). `imitation` is SFT on right answers alone, without pairs.

* *Accuracy* is the share of pairs whose [margin](../how-to/preference.md#choose-a-loss) is positive. In the
  first table, accuracy and chosen shift are measured on pairs that were held out from training.
* *Chosen shift* is the change of the chosen answers' log-prob since the start of training, in nats per token.
* *Chosen nll* is the negative log-prob of the chosen answers, in nats per token.
* *Length correlation* is the correlation, over the pairs, of the margin with the length of the chosen answer
  minus that of the rejected answer.
* *Collapse step* lists, for each seed, the first step at which the [collapse
  alarm](../how-to/preference.md#when-chosen-answers-collapse) was raised.
* {SEEDS_ARE_THE_UNIT}"""


def main() -> None:
    arguments = options(__doc__, "preference_learning").parse_args()
    began = time.monotonic()

    def run(seed: int) -> dict[str, Any]:
        stages = run_recipe(HERE / "preference_arms.yaml", seed)
        rates = {
            arm: round(stages[f"after_{arm}"]["summary"]["pass@1"]["mean"], 3)
            for arm in ("sft", *ARMS, "imitation")
        }
        print(f"seed {seed}: {rates}", flush=True)
        return stages

    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    stages = {arm: f"after_{arm}" for arm in ("sft", *ARMS, "imitation")}
    findings, differences = compare_arms(runs, stages, COMPARED)
    result = {
        "title": "DPO and IPO on verifier pairs",
        "about": ABOUT,
        "findings": findings,
        "evaluation_by_method": {arm: of_arm(arm, runs) for arm in ("sft", *ARMS, "imitation")},
        "pairs": [
            {"seed": seed}
            | {
                key: run["pairs"]["summary"][key]
                for key in ("rows", "pass_rate", "length_chosen", "length_rejected")
            }
            for seed, run in zip(arguments.seeds, runs, strict=True)
        ],
        "differences": differences,
        **{f"{arm}_by_step": at_steps([run[arm]["metrics"] for run in runs], FIGURES, 20) for arm in ARMS},
        **document("preference_learning.py", sys.argv[1:], began),
    }
    write(arguments.out, result)


def of_arm(arm: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table row of an arm, with one figure per seed."""
    evaluations = [run[f"after_{arm}"]["summary"] for run in runs]
    row: dict[str, Any] = {
        "pass@1": [evaluation["pass@1"]["mean"] for evaluation in evaluations],
        "pass@8": [evaluation["pass@8"]["mean"] for evaluation in evaluations],
        "greedy": [evaluation["greedy"]["mean"] for evaluation in evaluations],
        "tokens per answer": [evaluation["length"]["mean"] for evaluation in evaluations],
    }
    summaries = [run[arm]["summary"] for run in runs]
    if "collapse_step" in summaries[0]:
        row["held-out accuracy"] = [summary["validation"]["validation_accuracy"] for summary in summaries]
        row["chosen shift"] = [summary["validation"]["validation_chosen_shift"] for summary in summaries]
        row["collapse step"] = ", ".join(str(summary["collapse_step"] or "none") for summary in summaries)
    return row


if __name__ == "__main__":
    main()
