"""Compare two ways to distill a system prompt into the weights: on-policy, and off-policy with rejection.

    python benchmarks/system_prompt.py --seeds 0 1 2

Each seed runs the bundled recipe system_prompt: a model that writes its working only when told to, and
otherwise answers at once. Writes results/system_prompt.json.
"""

import sys
import time
from typing import Any

from perilune.recipe.load import bundled_recipe
from recipe_runs import (
    SEEDS_ARE_THE_UNIT,
    at_steps,
    compare_arms,
    document,
    for_seeds,
    options,
    run_recipe,
    write,
)

STAGES = {
    "told, before": "told",
    "untold, before": "untold",
    "untold, on-policy": "after_on_policy",
    "untold, off-policy": "after_off_policy",
}
COMPARED = (
    ("untold, on-policy", "untold, before"),
    ("untold, off-policy", "untold, before"),
    ("untold, on-policy", "told, before"),
    ("untold, off-policy", "told, before"),
    ("untold, off-policy", "untold, on-policy"),
)
ABOUT = f"""\
The model writes out its working if the system prompt is `Work it out: ` (`told`), and mostly answers directly
without it (`untold`). Distillation moves the effect of the prompt into the weights.

* *On-policy*: the model answers without the prompt, and a frozen copy of the model, which sees the prompt,
  scores each token (60 steps of 128 answers, no verifier).
* *Off-policy*: the model imitates the right answers among 8,192 that were written with the prompt (120 steps
  of 64 answers). Answers that mention the prompt were removed. The table *Rejection* shows this selection:
  *accept rate* is the share of answers that were kept, *leak rate* the share of right answers that mention
  the prompt, and *unhinted pass rate* the pass rate without the prompt.

The table by step shows [diagnostics](../how-to/distillation.md#diagnostics) of distillation. The stages of
these runs started from the second moments of the previous stage's optimizer (`restore_optimizer: true`).
{SEEDS_ARE_THE_UNIT}"""


def main() -> None:
    arguments = options(__doc__, "system_prompt").parse_args()
    began = time.monotonic()

    def run(seed: int) -> dict[str, Any]:
        stages = run_recipe(bundled_recipe("system_prompt"), seed)
        rates = {name: round(stages[stage]["summary"]["pass@1"]["mean"], 3) for name, stage in STAGES.items()}
        print(f"seed {seed}: {rates}", flush=True)
        return stages

    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    findings, differences = compare_arms(runs, STAGES, COMPARED)
    result = {
        "title": "Distilling a system prompt into the weights",
        "about": ABOUT,
        "findings": findings,
        "accuracy": {
            name: {
                "tokens per answer" if key == "length" else key: [
                    run[stage]["summary"][key]["mean"] for run in runs
                ]
                for key in ("pass@1", "pass@8", "greedy", "length")
            }
            for name, stage in STAGES.items()
        },
        "rejection": [
            {"seed": seed}
            | {
                key: run["told_traces"]["summary"][key]
                for key in ("rows", "accept_rate", "leak_rate", "pass_rate", "unhinted_pass_rate")
            }
            for seed, run in zip(arguments.seeds, runs, strict=True)
        ],
        "differences": differences,
        "seconds": {
            stage: [run[stage]["summary"]["seconds"] for run in runs]
            for stage in ("on_policy", "told_traces", "off_policy")
        },
        "on_policy_by_step": at_steps(
            [run["on_policy"]["metrics"] for run in runs],
            ("pass_rate", "reverse_kl", "overlap_ratio", "overlap_mass_student", "entropy_gap"),
            10,
        ),
        **document("system_prompt.py", sys.argv[1:], began),
    }
    write(arguments.out, result)


if __name__ == "__main__":
    main()
