"""Can training-free process rewards be trusted, and what do they cost? Calibrated against play.

    python benchmarks/process_rewards.py --seeds 0

Each seed runs benchmarks/process_rewards.yaml: one cold start; its answers, and those after a short climb,
valued by one forward pass and by 16 continuations from each prefix; and short climbs with and without process
rewards, for the price of a step. Writes results/process_rewards.json.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.files import read_json_lines
from recipe_runs import HERE, described, document, options, run_recipe, write

CALIBRATED = {
    "sft_working": "cold start, cut once: behind the working",
    "sft_columns": "cold start, behind each column",
    "sft_length": "cold start, every 5 tokens",
    "sft_surprise": "cold start, before surprising tokens",
    "climbed_working": "after 24 steps, cut once",
    "climbed_columns": "after 24 steps, behind each column",
}
CLIMBS = {
    "none": "GRPO alone",
    "answer": "forward pass, cut once",
    "answer_columns": "forward pass, behind each column",
    "montecarlo": "play, 9 continuations behind each column",
}
ABOUT = """\
The quickstart's three-digit sums. `values` are of the prefixes of answers, `differences` of what segments \
before the last earned, which is what would be learned from; each is Spearman's correlation of the forward \
pass with play, its 95% interval over tasks, and the ceiling that a perfect value would reach beside 16 \
noisy continuations. Prices are medians over a climb of 24 steps; processor seconds are the figure to \
compare, for the machine had other work.\
"""


def main() -> None:
    arguments = options(__doc__, "process_rewards").parse_args()
    began = time.monotonic()
    calibrations, prices, findings = [], [], []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            found = run_recipe(HERE / "process_rewards.yaml", seed, home=Path(home))
            calibrations += [calibration(seed, stage, found[stage]["summary"]) for stage in CALIBRATED]
            prices += [price(seed, stage, found) for stage in CLIMBS]
    for name in CALIBRATED.values():
        findings.append(finding(name, [row for row in calibrations if row["answers"] == name]))
    result = {
        "title": "Process rewards: trust and price",
        "about": described(ABOUT, findings),
        "calibrations": calibrations,
        "by_segments_written": by_segments(calibrations),
        "prices": prices,
        **document("process_rewards.py", sys.argv[1:], began),
    }
    for row in calibrations:
        del row["by_place"]
    write(arguments.out, result)


def calibration(seed: int, stage: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """One row: how far the two kinds of values agree."""
    row: dict[str, Any] = {"seed": seed, "answers": CALIBRATED[stage], "pass_rate": summary["pass_rate"]}
    for what in ("values", "differences"):
        interval = summary[what]["spearman"]
        row[f"{what}_spearman"] = None if interval is None else interval["mean"]
        row[f"{what}_interval"] = (
            "" if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}"
        )
        row[f"{what}_ceiling"] = summary[what]["ceiling"]
        row[f"{what}_count"] = summary[what]["count"]
    row["trusted"] = bool(
        summary["differences"]["spearman"] and summary["differences"]["spearman"]["low"] > 0
    )
    row["by_place"] = summary["by_place"]
    return row


def by_segments(calibrations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What both say of prefixes, by how many columns are written; of the cold start."""
    return [
        {"seed": row["seed"], **place}
        for row in calibrations
        if row["answers"] == CALIBRATED["sft_columns"]
        for place in row["by_place"]
    ]


def price(seed: int, stage: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """One row: what a step of a climb costs, beside one of GRPO alone."""

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
        "process": CLIMBS[stage],
        "processor_seconds_a_step": median(stage, "processor"),
        "processor_beside_grpo": median(stage, "processor") / median("none", "processor"),
        "share_of_the_steps_time": statistics.median(share),
        "pass_rate_at_the_end": statistics.fmean(line["pass_rate"] for line in last),
    }


def finding(name: str, rows: list[dict[str, Any]]) -> str:
    """In words, what the intervals of all seeds allow to be said of what segments earn."""
    told = ", ".join(
        f"{row['differences_spearman']:.2f} ({row['differences_interval']})"
        for row in rows
        if row["differences_spearman"] is not None
    )
    if all(row["trusted"] for row in rows):
        return f"{name}: agrees with play, {told}: to be trusted."
    return f"{name}: {told or 'nothing to correlate'}: not to be trusted."


if __name__ == "__main__":
    main()
