"""Result page of results/recursion.json: accuracy by length, for each arm and seed."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipe_runs import SEEDS_ARE_THE_UNIT, describe_differences

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

The comparisons are of accuracy with greedy decoding, on held-out questions. The table *Accuracy* also shows
accuracy with sampling. In both cases, the model that the code asks decodes like the policy. Rows marked
*after SFT* are before RL, and all other rows are after RL. Rows without a range come from one seed. *Asked
twice or more* is the share of sampled episodes in which the model was asked more than once.

The model learned only to write the code and to read one line; the code does the counting. The results do not
show that a language model finds such programs without demonstrations. {SEEDS_ARE_THE_UNIT}"""


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with findings and tables instead of its records."""
    records: Sequence[Mapping[str, Any]] = document["records"]
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        for lines, figures in record["at"].items():
            places.setdefault((record["arm"], lines), []).append(figures)
    rows = [
        {
            "arm": arm,
            "lines": lines,
            "accuracy, greedy": _by_seed(figures, "greedy"),
            "accuracy, sampled": _by_seed(figures, "sampled"),
            "share of episodes that asked twice or more": [
                row.get("strategies", {}).get("many asks", 0.0) for row in figures
            ],
            "questions": figures[0]["tasks"],
        }
        for (arm, lines), figures in places.items()
    ]
    rest = {key: value for key, value in document.items() if key != "records"}
    findings, compared = describe_differences(_differences(records), figure="accuracy")
    return {
        "title": "Exploring long contexts with code that asks the model",
        "about": ABOUT,
        "findings": findings,
        "comparison": compared,
        "accuracy": rows,
        **rest,
    }


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
