"""Result page of results/recursion.json: accuracy by length, for each arm and seed."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from recipe_runs import SEEDS_ARE_THE_UNIT, describe_differences

GOAL = 0.9  # of the accuracy on 32 lines, to be kept on 2,000
ABOUT = f"""\
The model is trained from scratch on contexts of 8 to 32 lines of [`oolong`](../how-to/oolong.md), and then
evaluated on longer contexts. A line has five characters, and the model's context window has 4,096 tokens.

* `counting` sees the number of lines, the first two lines and the question. It writes code that asks the
  model itself about each line and counts the answers.
* `pairs` does the same for questions about pairs of users.
* `direct` has all lines in its prompt and writes notes before the answer.
* `without asks` writes code that cannot ask the model.
* `without code` writes no code. In each turn it asks the model about eight lines, and the model's answer
  enters the context.

An answer drawn at random from the right answers to questions of the same kind is right for 23% of the
questions, and the most frequent right answer of each kind for about 30%. `without code` and `without asks`
reach 22% to 23% even on 32 lines, which is no better than chance, and `direct` reaches 30%.

The comparisons are of accuracy with greedy decoding, on held-out questions. The table *Accuracy* also shows
accuracy with sampling. In both cases, the model that the code asks decodes like the policy. Rows marked
*after SFT* are before RL, and all other rows are after RL. *Asked twice or more* is the share of sampled
episodes in which the model was asked more than once.

The model learned only to write the code and to read one line; the code does the counting. The results do not
show that a language model finds such programs without demonstrations. {SEEDS_ARE_THE_UNIT}"""


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with findings and tables instead of its records."""
    records: Sequence[Mapping[str, Any]] = document["records"]
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        for lines, figures in record["at"].items():
            places.setdefault((record["arm"], lines), []).append(figures)
    seeds = Counter(record["arm"] for record in records)
    rows = [
        {
            "arm": arm,
            "lines": lines,
            "seeds": _count_seeds(figures, seeds[arm]),
            "accuracy, greedy": _by_seed(figures, "greedy"),
            "accuracy, sampled": _by_seed(figures, "sampled"),
            "share of episodes that asked twice or more": _by_seed(
                [{"many asks": 0.0} | row["strategies"] for row in figures if "strategies" in row],
                "many asks",
            ),
            "questions": figures[0]["tasks"],
        }
        for (arm, lines), figures in places.items()
    ]
    rest = {key: value for key, value in document.items() if key != "records"}
    findings, compared = describe_differences(_differences(records), figure="accuracy")
    return {
        "title": "Exploring long contexts with code that asks the model",
        "about": ABOUT + "".join(f" {sentence}" for sentence in _failures(records)),
        "findings": [*_shares_kept(records), *findings],
        "comparison": compared,
        "accuracy": rows,
        **rest,
        "command": "\n$ ".join(_commands(records)),
    }


def _shares_kept(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """For both ways of decoding: accuracy of `counting` on long contexts divided by that on short ones."""
    rates = [record["at"] for record in records if record["arm"] == "counting"]
    sentences = []
    for decoding in ("greedy", "sampled"):
        kept = [at["2000"][decoding] / at["32"][decoding] for at in rates if decoding in at.get("2000", {})]
        if kept:
            reached = sum(share >= GOAL for share in kept)
            outcome = {0: "missed in all seeds", len(kept): "reached in all seeds"}.get(
                reached, f"reached in {reached} of {len(kept)} seeds"
            )
            sentences.append(
                f"`counting`, {decoding}: accuracy on 2,000 lines is {min(kept):.2f} to {max(kept):.2f} times"
                f" that on 32, median {median(kept):.2f}. The goal of {GOAL:g} is {outcome}."
            )
    return sentences


def _failures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each evaluation that failed."""
    return [
        f"The evaluation of `{record['arm']}`, seed {record['seed']}, on {int(lines):,} lines failed, and its"
        " cause was not kept; its row lacks this seed."
        for record in records
        for lines, figures in record["at"].items()
        if "error" in figures
    ]


def _commands(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commands that measure these arms and seeds, and the curve over many lengths."""
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record["arm"], set()).add(record["seed"])
    arms: dict[tuple[int, ...], list[str]] = {}
    for arm, own in seeds.items():
        arms.setdefault(tuple(sorted(own)), []).append(arm)
    command = "python benchmarks/recursion.py --home runs --out recursion.json"
    lines = [
        f"{command} --arms {' '.join(map(shlex.quote, names))} --seeds {' '.join(map(str, own))}"
        for own, names in arms.items()
    ]
    curve = [record["seed"] for record in records if "128" in record["at"]]
    return lines + [f"{command} --arms counting --seeds {seed} --curve" for seed in curve]


def _count_seeds(figures: Sequence[Mapping[str, Any]], seeds: int) -> str:
    """The number of seeds in a row, and of how many if some are missing."""
    found = sum("error" not in row for row in figures)
    return str(seeds) if found == seeds else f"{found} of {seeds}"


def _by_seed(figures: Sequence[Mapping[str, Any]], name: str) -> list[float] | str:
    return [row[name] for row in figures if name in row] or "does not fit"


def _differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Differences of greedy accuracy by seed: lengths, stages, and `counting` against the other arms."""
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], {})[record["seed"]] = record["at"]
    counting = by_arm.get("counting", {})

    def within(arm: str, left: str, right: str) -> list[float]:
        return [rates[left]["greedy"] - rates[right]["greedy"] for rates in by_arm.get(arm, {}).values()]

    def against(arm: str, lines: str) -> list[float]:
        other = by_arm.get(arm, {})
        seeds = sorted(counting.keys() & other)
        return [counting[seed][lines]["greedy"] - other[seed][lines]["greedy"] for seed in seeds]

    differences = {
        "`counting`, 2,000 lines against 32": within("counting", "2000", "32"),
        "`counting`, after RL against after SFT, 32 lines": within("counting", "32", "32 after SFT"),
        "`pairs`, 2,000 lines against 32": within("pairs", "2000", "32"),
        "`pairs`, after RL against after SFT, 32 lines": within("pairs", "32", "32 after SFT"),
        "`counting` against `direct`, 32 lines": against("direct", "32"),
        "`counting` against `without code`, 32 lines": against("without code", "32"),
        "`counting` against `without asks`, 2,000 lines": against("without asks", "2000"),
    }
    return {name: values for name, values in differences.items() if len(values) > 1}
