"""The page of results/recursion.json: accuracy by length, for each arm and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe_runs import SEEDS_ARE_THE_UNIT, describe_differences, described

ABOUT = """\
A tiny model was trained from nothing on contexts of 8 to 32 lines of `oolong`, in compact form, and then
evaluated on longer ones. A line has five characters, and the model's window 4,096. `counting` sees the
length, two lines and the question, and writes code that asks the model itself about each line. `direct`
reads all lines and takes notes. Accuracy is that of greedy answers to 64 held-out questions, all
sub-agents included, with sampled answers beside it. What generalises is the program: code counts 2,000
answers as it counts 32. The weights learned to write that code and to read one line. A tiny model cannot
show that a language model finds such programs without demonstrations.
"""


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with findings and tables instead of its records."""
    records: Sequence[Mapping[str, Any]] = document["records"]
    rows = [
        {
            "arm": one["arm"],
            "seed": one["seed"],
            "lines": name,
            "greedy": figures.get("greedy", "does not fit"),
            "sampled": figures.get("sampled", "does not fit"),
            "asks about lines": figures.get("strategies", {}).get("many asks", 0.0),
            "questions": figures["tasks"],
        }
        for one in records
        for name, figures in one["at"].items()
    ]
    kept = {key: value for key, value in document.items() if key != "records"}
    findings, compared = describe_differences(_differences(records))
    return {
        "title": "Long contexts explored with code and asks",
        "about": described(f"{ABOUT}{SEEDS_ARE_THE_UNIT}", findings),
        "comparison": compared,
        "accuracy": rows,
        **kept,
    }


def _differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Differences of greedy accuracy by seed: longer contexts against 32 lines, and code against reading."""
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in records:
        by_arm.setdefault(one["arm"], {})[one["seed"]] = one["at"]
    counting, direct = by_arm.get("counting", {}), by_arm.get("direct", {})
    found = {
        "`counting`, 2,000 lines against 32": [
            at["2000"]["greedy"] - at["32"]["greedy"] for at in counting.values()
        ],
        "`counting`, after RL against after SFT, 32 lines": [
            at["32"]["greedy"] - at["32 after SFT"]["greedy"] for at in counting.values()
        ],
        "`counting` against `direct`, 32 lines": [
            counting[seed]["32"]["greedy"] - direct[seed]["32"]["greedy"] for seed in counting.keys() & direct
        ],
    }
    return {name: values for name, values in found.items() if len(values) > 1}
