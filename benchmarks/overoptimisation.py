"""Test that the watch recommends stopping before a hacked reward ruins the policy.

    python benchmarks/overoptimisation.py --seeds 0 1 2 --learned 0 1 2

Two policies climb from the same cold start, without the verifier as a reward. One reward is hackable on
purpose (benchmarks/thorough.py pays for written working, whatever the answer). The other is a reward model
learned from pairs (the bundled recipe reward_model) and refreshed on pairs of the resulting policy. The watch
follows the verifier's verdict as gold score. Writes results/overoptimisation.json and keeps the results of
other seeds there, so that `--learned 3` alone adds one seed of the reward model.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from perilune.files import read_json
from perilune.metrics.overoptimisation import OveroptimisationWatch
from perilune.recipe.load import bundled_recipe
from recipe_runs import HERE, at_steps, document, for_seeds, options, run_recipe, write

FIGURES = ("reward", "gold", "kl_start")
SMOOTH = 5  # steps in the average of the gold score; one step has 256 answers


def main() -> None:
    parser = options(__doc__, "overoptimisation")
    parser.set_defaults(seeds=[])
    parser.add_argument("--learned", type=int, nargs="*", default=[], help="seeds of the reward model")
    arguments = parser.parse_args()
    began = time.monotonic()
    previous = read_json(arguments.out) if arguments.out.exists() else {}
    hacked, learned = climbs_of(previous, "hacked_reward"), climbs_of(previous, "reward_model")
    judges = {row["seed"]: row for row in previous.get("reward_models", [])}

    def hack(seed: int) -> None:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            start = run_recipe(HERE / "cold_start.yaml", seed, home=Path(home))
            checkpoint = start["sft"]["folder"] / "artifacts" / "checkpoints" / "final"
            stages = run_recipe(HERE / "thorough.yaml", seed, [f"model.path={checkpoint}"], Path(home))
        hacked[seed] = stages["climb"]["metrics"]
        print(f"hacked reward, seed {seed}: {told(hacked[seed])}", flush=True)

    def learn(seed: int) -> None:
        stages = run_recipe(bundled_recipe("reward_model"), seed, ["climb.steps=80"])
        learned[seed] = stages["climb"]["metrics"]
        judges[seed] = {"seed": seed, **of_judges(stages)}
        print(f"reward model, seed {seed}: {told(learned[seed])}", flush=True)

    for_seeds(hack, arguments.seeds, arguments.jobs)
    for_seeds(learn, arguments.learned, arguments.jobs)
    hacked, learned, judges = (dict(sorted(rows.items())) for rows in (hacked, learned, judges))
    command = ["--seeds", *map(str, hacked), "--learned", *map(str, learned)]
    provenance = document("overoptimisation.py", command, began)
    provenance["minutes"] = round(provenance["minutes"] + previous.get("minutes", 0), 1)
    result = {
        "title": "Reward over-optimization, and when to stop",
        "about": ABOUT,
        "findings": findings("hacked reward", hacked) + findings("reward model", learned),
        "hacked_reward": [{"seed": seed, **told(lines)} for seed, lines in hacked.items()],
        "reward_model": [{"seed": seed, **told(lines)} for seed, lines in learned.items()],
        "reward_models": list(judges.values()),
        "hacked_reward_by_step": by_step(hacked),
        "reward_model_by_step": by_step(learned),
        "curves": {
            name: [
                {figure: [line[figure] for line in lines] for figure in FIGURES} for lines in climbs.values()
            ]
            for name, climbs in (("hacked reward", hacked), ("reward model", learned))
        },
        **provenance,
    }
    write(arguments.out, result)


def by_step(climbs: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The figures of all seeds at every tenth step, under the names of the table's columns."""
    names = {"gold": "gold score", "kl_start": "KL to the start, nats"}
    rows = at_steps(list(climbs.values()), FIGURES, 10)
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


def climbs_of(held: Mapping[str, Any], name: str) -> dict[int, list[dict[str, Any]]]:
    """The curves of a result, by seed."""
    curves = held.get("curves", {}).get(name.replace("_", " "), [])
    return {
        row["seed"]: [
            {"step": step, **dict(zip(curve, figures, strict=True))}
            for step, figures in enumerate(zip(*curve.values(), strict=True), 1)
        ]
        for row, curve in zip(held.get(name, []), curves, strict=True)
    }


ABOUT = """\
GRPO trains the tiny model on three-digit sums. The *hacked reward* pays a tenth for each column of written
working, whatever the answer is. The *reward model* is trained on pairs of a right and a wrong answer. The
*gold score* is the verifier's score, which training logs but does not use.

* *Recommended stop* is the step at which the over-optimization watch recommended stopping, during the run.
* *Best gold score* is the best of the run, which is known only afterwards.
* Gold scores are means over five steps. A step has 256 answers.
* *Step of the alarm* is the first step at which the gold score no longer rose significantly, after it had
  risen. A watch without an alarm recommended stopping because of the peak of a curve that it fits to the gold
  score.
* *KL to the start* is the divergence from the policy before RL, in nats per answer.
* In the table *Reward models*, *new pairs* are pairs of answers by the policy after RL, and *refreshing*
  trains the reward model on old and new pairs.

We chose the window of the watch after seeing the curve of seed 0, so only the other seeds are an independent
test. To refresh the reward model, use the policy at the recommended stop. A later policy has almost no right
answers, and so gives almost no pairs."""


def told(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The course of the gold score, and the recommendation of the watch."""
    watch = OveroptimisationWatch()
    for line in lines:
        watch.observe(line["step"], line["kl_start"], line["gold"])
    gold = [line["gold"] for line in lines]
    smooth = [fmean(gold[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(gold))]
    best = max(range(SMOOTH - 1, len(gold)), key=lambda i: smooth[i])
    stop = watch.recommended_stop
    return {
        "first gold score": smooth[SMOOTH - 1],
        "best gold score": smooth[best],
        "best_step": lines[best]["step"],
        "recommended_stop": stop,
        "gold score at that step": None if stop is None else smooth[stop - 1],
        "step_of_the_alarm": watch.alarm,
        "last gold score": smooth[-1],
        "first_reward": fmean(line["reward"] for line in lines[:SMOOTH]),
        "last_reward": fmean(line["reward"] for line in lines[-SMOOTH:]),
        "last KL to the start, nats": lines[-1]["kl_start"],
    }


def of_judges(stages: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy of the reward model: at first, on pairs of the new policy, and after its refresh."""
    judge, refreshed = stages["judge"]["summary"], stages["refreshed"]["summary"]
    return {
        "pairs": judge["pairs"],
        "accuracy": judge["validation"]["accuracy"],
        "length_correlation": judge["validation"].get("length_correlation"),
        "new_pairs": stages["new_pairs"]["summary"]["rows"],
        "accuracy_on_old_and_new_pairs": refreshed["accuracy_before"],
        "accuracy_after_refreshing": refreshed["validation"]["accuracy"],
        "pass@1_of_policy": stages["after_climb"]["summary"]["pass@1"],
    }


def findings(name: str, climbs: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Sentences that summarize the tables."""
    sentences = []
    outcomes = [told(lines) for lines in climbs.values()]
    fell = [outcome for outcome in outcomes if outcome["last gold score"] < 0.8 * outcome["best gold score"]]
    sentences.append(
        f"{name}: the final gold score was below 80% of the best in {len(fell)} of {len(outcomes)} seeds."
    )
    stopped = [outcome for outcome in outcomes if outcome["recommended_stop"] is not None]
    early = [
        outcome
        for outcome in stopped
        if outcome["gold score at that step"] >= 0.8 * outcome["best gold score"]
    ]
    sentences.append(
        f"{name}: the watch recommended stopping in {len(stopped)} of {len(outcomes)} seeds,"
        f" in {len(early)} of them while the gold score was at least 80% of the best."
    )
    return sentences


if __name__ == "__main__":
    main()
