"""Measure the accuracy and the diagnostics of on-policy distillation from a larger tiny teacher.

    python benchmarks/distillation.py --seeds 0 1 2

Each seed runs benchmarks/distillation_arms.yaml: one larger teacher, one half-trained student, the losses on
the student's own answers, and an arm that instead continues to imitate the traces of SFT for as many steps.
Writes results/distillation.json.
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

ARMS = ("reverse_kl", "forward_topk", "gkd")
OTHERS = ("teacher", "start", "imitation")
FIGURES = (
    "pass_rate", "reverse_kl", "overlap_ratio", "overlap_advantage", "overlap_mass_student",
    "overlap_mass_teacher", "entropy_gap",
)  # fmt: skip
COMPARED = (
    ("reverse_kl", "start"), ("forward_topk", "start"), ("gkd", "start"), ("imitation", "start"),
    ("reverse_kl", "gkd"), ("reverse_kl", "forward_topk"), ("gkd", "imitation"), ("gkd", "teacher"),
)  # fmt: skip
ABOUT = f"""\
Teacher and student are trained by SFT on the same traces, which a program wrote: the teacher for 300 steps,
and the student for 160 (`start`). In distillation, the student samples answers with written working and
learns from the teacher's distribution at each sampled token, without a reward. The arms differ in the loss:
`reverse_kl`, `forward_topk` or `gkd` ([distillation](../how-to/distillation.md)). The arm `imitation` instead
continues SFT on the traces for as many steps.

The tables by step show [diagnostics](../how-to/distillation.md#diagnostics) of the student's answers. The
overlap metrics compare the 16 most likely tokens of student and teacher; the vocabulary has 98 tokens. The
stages of these runs started from the second moments of the previous stage's optimizer (`restore_optimizer:
true`). {SEEDS_ARE_THE_UNIT}"""


def main() -> None:
    arguments = options(__doc__, "distillation").parse_args()
    began = time.monotonic()

    def run(seed: int) -> dict[str, Any]:
        stages = run_recipe(HERE / "distillation_arms.yaml", seed)
        rates = {
            arm: round(stages[f"after_{arm}"]["summary"]["pass@1"]["mean"], 3) for arm in (*OTHERS, *ARMS)
        }
        print(f"seed {seed}: {rates}", flush=True)
        return stages

    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    stages = {arm: f"after_{arm}" for arm in (*OTHERS, *ARMS)}
    findings, differences = compare_arms(runs, stages, COMPARED)
    result = {
        "title": "Distillation from a larger teacher",
        "about": ABOUT,
        "findings": findings,
        "evaluation_by_method": {arm: of_arm(arm, runs) for arm in (*OTHERS, *ARMS)},
        "differences": differences,
        **{f"{arm}_by_step": at_steps([run[arm]["metrics"] for run in runs], FIGURES, 10) for arm in ARMS},
        **document("distillation.py", sys.argv[1:], began),
    }
    write(arguments.out, result)


def of_arm(arm: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table row of an arm, with one figure per seed."""
    evaluations = [run[f"after_{arm}"]["summary"] for run in runs]
    return {
        "pass@1": [evaluation["pass@1"]["mean"] for evaluation in evaluations],
        "pass@8": [evaluation["pass@8"]["mean"] for evaluation in evaluations],
        "greedy": [evaluation["greedy"]["mean"] for evaluation in evaluations],
        "seconds of the stage": [run[arm]["summary"]["seconds"] for run in runs],
    }


if __name__ == "__main__":
    main()
