"""Calibrate training-free process rewards against continuations of the policy, and measure their cost.

    python benchmarks/process_rewards.py --seeds 0

Each seed runs benchmarks/process_rewards.yaml. One forward pass and 16 continuations from each prefix value
the answers of a cold start, and the answers after a short climb. Short climbs with and without process
rewards show the cost per step. Writes results/process_rewards.json.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.files import read_json_lines
from recipe_runs import HERE, document, options, run_recipe, write

CALIBRATED = {
    "sft_working": "after SFT, one boundary after the working",
    "sft_columns": "after SFT, a boundary after each column",
    "sft_length": "after SFT, a boundary every 5 tokens",
    "sft_surprise": "after SFT, boundaries before unlikely tokens",
    "climbed_working": "after 24 RL steps, one boundary after the working",
    "climbed_columns": "after 24 RL steps, a boundary after each column",
}
CLIMBS = {
    "none": "none (GRPO)",
    "answer": "forward pass, one boundary",
    "answer_columns": "forward pass, a boundary after each column",
    "montecarlo": "Monte Carlo, 9 continuations after each column",
}
PLACES = {  # columns of the table by number of segments
    "count": "prefixes",
    "place": "segments before",
    "played": "Monte Carlo value",
    "spearman": "correlation",
    "value": "estimated value",
}
ABOUT = """\
The value of a prefix is the expected reward of the answers that continue the prefix. The process reward of a
segment is the change of the value from the start of the segment to its end. One forward pass estimates the
values. The reference is the mean reward of 16 sampled continuations of a prefix (Monte Carlo).

* *Correlation of values* is Spearman's rank correlation between the estimated values of prefixes and the
  Monte Carlo values, with its 95% interval over tasks.
* *Correlation of differences* is the same correlation for the process rewards of segments, which training
  uses. It leaves out the last segment of an answer. It counts as *reliable* if its 95% interval is above 0.
* The *ceiling* estimates the correlation that exact values would reach. It is below 1 because the Monte
  Carlo values are noisy, and is computed from the correlation between two halves of the continuations.
* In the table *By number of segments*, a row covers the prefixes with the number of segments in the column
  *segments before*.
* Costs are medians over 24 training steps. Compare CPU seconds, because other programs used the machine."""


def main() -> None:
    arguments = options(__doc__, "process_rewards").parse_args()
    began = time.monotonic()
    calibrations, prices, findings = [], [], []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            by_stage = run_recipe(HERE / "process_rewards.yaml", seed, home=Path(home))
            calibrations += [calibration(seed, stage, by_stage[stage]["summary"]) for stage in CALIBRATED]
            prices += [price(seed, stage, by_stage) for stage in CLIMBS]
    for name in CALIBRATED.values():
        findings.append(finding(name, [row for row in calibrations if row["answers"] == name]))
    result = {
        "title": "Process rewards: accuracy and cost",
        "about": ABOUT,
        "findings": findings,
        "agreement_with_Monte_Carlo_values": calibrations,
        "by_number_of_segments_after_SFT": by_segments(calibrations),
        "cost": prices,
        **document("process_rewards.py", sys.argv[1:], began),
    }
    for row in calibrations:
        del row["by_place"]
    write(arguments.out, result)


def calibration(seed: int, stage: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a calibration: the agreement of the two kinds of values."""
    row: dict[str, Any] = {"seed": seed, "answers": CALIBRATED[stage], "pass_rate": summary["pass_rate"]}
    for what in ("values", "differences"):
        interval = summary[what]["spearman"]
        row[f"correlation of {what}"] = None if interval is None else interval["mean"]
        row[f"95% interval for {what}"] = (
            "" if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}"
        )
        row[f"ceiling for {what}"] = summary[what]["ceiling"]
        row[f"number of {what}"] = summary[what]["count"]
    row["reliable"] = bool(
        summary["differences"]["spearman"] and summary["differences"]["spearman"]["low"] > 0
    )
    row["by_place"] = summary["by_place"]
    return row


def by_segments(calibrations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both values of the cold start's prefixes, by the number of written columns."""
    return [
        {"seed": row["seed"], **{PLACES[key]: value for key, value in position.items()}}
        for row in calibrations
        if row["answers"] == CALIBRATED["sft_columns"]
        for position in row["by_place"]
    ]


def price(seed: int, stage: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a climb: the cost of its steps, beside steps of GRPO alone."""

    def steps(name: str) -> list[dict[str, float]]:
        return list(read_json_lines(found[name]["folder"] / "artifacts" / "timings.jsonl"))

    def median(name: str, part: str) -> float:
        return statistics.median(line.get(part, 0.0) for line in steps(name))

    seconds = [
        sum(line[part] for part in ("sampling", "scoring", "learning", "other")) for line in steps(stage)
    ]
    share = [line.get("process", 0.0) / whole for line, whole in zip(steps(stage), seconds, strict=True)]
    last = found[stage]["metrics"][-5:]
    return {
        "seed": seed,
        "process_rewards": CLIMBS[stage],
        "CPU_seconds_per_step": median(stage, "processor"),
        "CPU time / CPU time of GRPO": median(stage, "processor") / median("none", "processor"),
        "share_of_the_step": statistics.median(share),
        "pass_rate_over_the_last_5_steps": statistics.fmean(line["pass_rate"] for line in last),
    }


def finding(name: str, rows: list[dict[str, Any]]) -> str:
    """A sentence on the agreement of the segments' rewards with Monte Carlo values, over all seeds."""
    correlations = ", ".join(
        f"{row['correlation of differences']:.2f} ({row['95% interval for differences']})"
        for row in rows
        if row["correlation of differences"] is not None
    )
    return (
        f"{name}: reliable in {sum(row['reliable'] for row in rows)} of {len(rows)} seeds. Correlation of "
        f"differences with 95% interval, by seed: {correlations or 'undefined'}."
    )


if __name__ == "__main__":
    main()
