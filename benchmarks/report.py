"""Write docs/results/ from benchmarks/results/*.json, so that no number is typed by hand.

    python benchmarks/report.py            write the pages
    python benchmarks/report.py --check    exit with 1 if a page differs from its data

A result is one JSON object. A page opens with its `title` and with two sentences from `leads`, which are
computed from the JSON. Then come `findings`, and `about` with `command`: how it was measured. Plain values
and small objects become a list of facts, a list of similar objects a table, and an object of similar objects
a table with their names in the first column. In a table, up to 20 numbers are repeated measurements, shown as
median (minimum to maximum). A longer list is a curve, which the page leaves out. Shares of right answers are
shown in percent. A line says what the brackets of the tables mean. A result with raw records has its own
view, which may give the `lead`, the findings as Markdown, and `charts`: SVG by file name, written to the
folder of the pages.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison.view import SMOLLM2
from comparison.view import view as algorithms_view
from connect_four_view import view as connect_four_view
from leads import LEADS, QUESTIONS
from measured_views import generate_view, quickstart_view, trl_view
from perilune.metrics.across_seeds import MIN_SEEDS
from recursion_view import view as recursion_view
from rollout.view import view as rollout_view
from selfplay_view import view as selfplay_view
from smollm2_view import view as smollm2_view
from staleness_view import view as staleness_view

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"
HEADER = ("title", "lead", "findings", "about", "command")
VIEWS = {
    "engine_vs_generate": generate_view,
    "grpo_step_vs_trl": trl_view,
    "quickstart": quickstart_view,
    "recursion": recursion_view,
    "rollout": rollout_view,
    "algorithms": algorithms_view,
    "algorithms_smollm2": partial(algorithms_view, suite=SMOLLM2),
    "connect_four": connect_four_view,
    "selfplay": selfplay_view,
    "smollm2": smollm2_view,
    "staleness": staleness_view,
}
ACRONYMS = {"dpo": "DPO", "gkd": "GKD", "ipo": "IPO", "rl": "RL", "sft": "SFT"}
SPELLINGS = {  # of words in keys
    "cpu": "CPU",
    "gb": "GB",
    "gflops": "GFLOP/s",
    "gib": "GiB",
    "gpu": "GPU",
    "kl": "KL",
    "logprob": "log-prob",
    "mib": "MiB",
    "processor seconds": "CPU seconds",
}
MOST_ROWS = 40  # rows of a table that a page shows
MOST_REPEATS = 20  # a longer list of numbers is a curve
PERCENT = (  # words of columns that hold shares
    *("pass@", "pass rate", "greedy", "accuracy", "word error rate", "accept rate", "share of", "yield"),
    *("first replies", "live groups", "best moves", "blunders", "flipped expert", "overlap ratio"),
    *("asks about lines", "trainer idle", "points against"),
)
SHARES = frozenset({"won", "drawn", "lost", "dropped"})
POINTS = ("difference of pass@1", "gain of pass@1", "difference of accuracy")  # columns in percentage points
CHANGES = "relative change"  # a column of changes, in percent
BY_SEED = "by seed"  # the same differences, by seed
MEANS = "Cells show means, with 95% intervals in brackets."
MEDIANS = "Cells show medians over repeated runs, with ranges in brackets."
IN_ALL_TABLES = {
    MEANS: "In all tables, a cell with brackets shows a mean with its 95% interval.",
    MEDIANS: "In all tables, a cell with brackets shows the median of repeated runs, with their range.",
}
INTRODUCTION = """\
# Results

`python benchmarks/report.py` writes these pages from JSON files in the repository. Each page opens with what
was compared and what came out, and shows the command that repeats its measurement. Unless a page says
otherwise, its times come from one machine at one time. Ratios of times depend less on the machine.
"""
METHODS = """\
## Terms

* The *tiny model* is the preset `tiny`, a decoder of 0.3 million parameters that starts from random weights.
* An *arm* is one of the settings that a page compares.
* *pass@1* is the share of right answers among the sampled answers to held-out tasks. *pass@8* is the
  probability that at least one of eight answers is right. *Greedy* decoding takes the most likely token.
* *Points* are percentage points, and *nats* are units of natural logarithms.
* *CPU time* counts only the time in which a program computes. Other programs on the machine change it little.

[The glossary](../reference/glossary.md) explains other terms.

## Differences over seeds

Runs with the same seed start from the same weights and see the same tasks. We compare them in pairs: we apply
Student's t test to the differences by seed, and Holm's method corrects p for the number of comparisons on the
page, unless the page says otherwise. A page says *higher* or *lower* if the corrected p is below 0.05, and
*no difference shown* otherwise. With fewer than three seeds, it says *too few seeds*. Intervals are 95%
intervals of the mean difference and are not corrected. So an interval may exclude 0 although no difference is
shown.
"""


def pages() -> dict[str, str]:
    """Text of every page and chart, by file name."""
    files: dict[str, str] = {}
    entries = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if "learning_rates" in data and len({record["seed"] for record in data["records"]}) < MIN_SEEDS:
            continue  # learning rates are tuned, and too few seeds are measured to compare the arms
        document = VIEWS.get(path.stem, dict)(data)
        document.setdefault("lead", path.stem in LEADS and LEADS[path.stem](data))
        if not document["lead"]:
            raise SystemExit(f"{path.name}: no lead. Add one to benchmarks/leads.")
        files |= document.pop("charts", {})
        files[f"{path.stem}.md"] = page(path, document)
        entries[path.stem] = f"* [{document['title']}]({path.stem}.md): {document['lead'][1]}"
    files["index.md"] = index(entries)
    return files


def index(entries: Mapping[str, str]) -> str:
    """The list of the pages, by question."""
    if missing := entries.keys() - {name for names in QUESTIONS.values() for name in names}:
        raise SystemExit(f"no question in benchmarks/leads/__init__.py for: {', '.join(sorted(missing))}")
    sections = [
        "\n".join([f"## {question}", "", *(entries[name] for name in names if name in entries)]) + "\n"
        for question, names in QUESTIONS.items()
    ]
    return "\n".join([INTRODUCTION, *sections, METHODS])


def page(path: Path, document: Mapping[str, Any]) -> str:
    """One result as Markdown: the lead, the findings, how it was measured, and the tables."""
    lines = [f"# {document['title']}", ""]
    lines += [f"<!-- Written by `python benchmarks/report.py` from {path.relative_to(ROOT)}. -->", ""]
    lines += [re.sub("tiny models?", r"[\g<0>](index.md#terms)", " ".join(document["lead"]), count=1), ""]
    if findings := document.get("findings"):
        lines += [findings if isinstance(findings, str) else "\n".join(f"* {line}" for line in findings), ""]
    body = {key: value for key, value in document.items() if key not in HEADER}
    if isinstance(body.get("machine"), Mapping) and "memory" in body["machine"]:
        body["machine"] = describe_machine(body["machine"])
    tables, note = say_brackets_once(section(body, level=2))
    lines += ["## How it was measured", ""]
    lines += [str(document["about"]), ""]
    lines += [note, ""] if note else []
    lines += ["```text", f"$ {document['command']}", "```", ""]
    lines += [*tables, f"All data: `{path.relative_to(ROOT)}`. [Terms](index.md#terms)."]
    return "\n".join(lines) + "\n"


def say_brackets_once(lines: Sequence[str]) -> tuple[list[str], str]:
    """The tables, and the explanation of their brackets if it is the same for all of them."""
    said = [line for line in lines if line in IN_ALL_TABLES]
    if len(said) < 2 or len({line for line in lines if line.startswith("Cells show ")}) > 1:
        return list(lines), ""
    kept = [line for i, line in enumerate(lines) if line != said[0] and lines[max(i - 1, 0)] != said[0]]
    return kept, IN_ALL_TABLES[said[0]]


def describe_machine(machine: Mapping[str, Any]) -> str:
    """The machine of a measurement in one line."""
    processor, memory = machine["processor"], machine["memory"]["total"] / 2**30
    return (
        f"{processor['model']}, {processor['usable_cores']:g} cores, {memory:.0f} GiB memory, "
        f"{machine['system']} {machine['kernel']}"
    )


def section(values: Mapping[str, Any], level: int) -> list[str]:
    """A heading for each value that does not fit a cell, then a table of the facts."""
    lines = []
    facts = {key: value for key, value in values.items() if is_fact(value) and value != []}
    for key, value in values.items():
        if key not in facts and value != [] and (inner := compound(value, level)):
            lines += [f"{'#' * min(level, 5)} {capital(words(key))}", "", *inner]
    if facts and lines and level == 2:
        lines += ["## Setting", ""]
    return lines + (
        table(["", ""], [[words(key), cell(value)] for key, value in facts.items()]) if facts else []
    )


def compound(value: Any, level: int) -> list[str]:
    """A list or an object that does not fit a cell."""
    if isinstance(value, Mapping):
        rows = list(value.values())
        if len(rows) > 1 and alike(rows) and not all(map(is_plain, rows)):
            return rows_table(rows, list(value))
        return section(value, level + 1)
    rows = [flat(row) if isinstance(row, Mapping) else row for row in value]
    visible, left_out = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    lines = rows_table(visible) if alike(rows) else [f"* {cell(row)}" for row in visible] + [""]
    return lines + ([f"The JSON has {left_out} more rows.", ""] if left_out > 0 else [])


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """An object whose nested objects are replaced by keys such as "outer: inner"."""
    flattened: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and not is_plain(value):
            flattened |= flat(value, f"{prefix}{key}: ")
        else:
            flattened[prefix + key] = value
    return flattened


def rows_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[str]:
    """One row per object, one column per key, after a line that says what the brackets mean; no curves."""
    columns = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if not all(is_curve(row.get(key)) for row in rows)
    ]
    if not columns:
        return []
    by_seed = points if any(key.startswith(POINTS) for key in columns) else cell
    by_seed = change if CHANGES in columns else by_seed
    scales = {key: scale(key, [row.get(key) for row in rows], by_seed) for key in columns}
    header = [
        *([""] if names else []),
        *(words(key) + (", points" if scales[key] is points else "") for key in columns),
    ]
    labels: list[list[str]] = [[words(name)] for name in names] or [[] for _ in rows]
    cells = [
        [*label, *(repeats(row.get(key), scales[key]) for key in columns)]
        for label, row in zip(labels, rows, strict=True)
    ]
    return brackets(rows, columns) + table(header, cells)


def brackets(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """The explanation of the brackets in the cells of a table."""
    ranges = [key for key in columns if any(is_repeated(row.get(key)) for row in rows)]
    intervals = [key for key in columns if any(isinstance(row.get(key), Mapping) for row in rows)]
    if ranges and intervals:
        named = ", ".join(f"*{words(key)}*" for key in ranges)
        return [f"Cells show means with 95% intervals. Cells of {named} show medians with ranges.", ""]
    if ranges:
        return [MEDIANS, ""]
    return [MEANS, ""] if intervals else []


def scale(key: str, values: Sequence[Any], by_seed: Callable[[float], str]) -> Callable[[float], str]:
    """The format of a column's numbers: percent, percentage points, or unchanged."""
    numbers = [number for value in values for number in numbers_of(value)]
    if key == BY_SEED:
        return by_seed
    if key.startswith(POINTS):
        return points
    if key == CHANGES:
        return change
    named = words(key) in SHARES or any(word in words(key) for word in PERCENT)
    are_shares = any(isinstance(item, float) for item in numbers) and all(0 <= item <= 1 for item in numbers)
    if named and are_shares:
        return percent
    return cell


def numbers_of(value: Any) -> list[float]:
    """The numbers of a cell."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]


def percent(number: float) -> str:
    """A share in percent."""
    return f"{number:.1%}"


def change(number: float) -> str:
    """A relative change in percent."""
    return f"{number:+.1%}"


def points(number: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * number:+.1f}"


def is_repeated(value: Any) -> bool:
    """True if a cell shows the median of repeated measurements."""
    return isinstance(value, list) and 2 < len(value) <= MOST_REPEATS and are_numbers(value)


def is_curve(value: Any) -> bool:
    """True if a cell is too long a list to show."""
    return isinstance(value, list) and len(value) > MOST_REPEATS and are_numbers(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; columns of numbers are right-aligned."""
    columns = list(zip(*rows, strict=True))
    marks = ["--:" if column and all(map(is_number, column)) else "---" for column in columns]
    lines = [header, marks, *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def is_plain(value: Any) -> bool:
    """True if the value fits one cell."""
    if isinstance(value, Mapping):
        return set(value) == {"mean", "low", "high"}
    if isinstance(value, list):
        return are_numbers(value) or (len(value) <= 8 and all(isinstance(item, str) for item in value))
    return True


def are_numbers(values: Sequence[Any]) -> bool:
    """True if all values are numbers."""
    return all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in values)


def is_fact(value: Any) -> bool:
    """True if the value fits one line: a plain value, or a few of them."""
    few = isinstance(value, Mapping) and len(value) <= 6
    return is_plain(value) or (
        few and all(is_plain(item) and not isinstance(item, Mapping) for item in value.values())
    )


def alike(rows: Sequence[Any]) -> bool:
    """True if all rows are objects of plain values that share most of their keys."""
    if not rows or not all(
        isinstance(row, Mapping) and row and all(map(is_plain, row.values())) for row in rows
    ):
        return False
    keys = {key for row in rows for key in row}
    return all(len(row) * 2 > len(keys) for row in rows)


def is_number(text: str) -> bool:
    """True if a cell starts with a number."""
    return not text or text.lstrip("+-")[:1].isdigit()


def cell(value: Any) -> str:
    """A value as the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping) and is_plain(value):
        return f"{cell(value['mean'])} ({cell(value['low'])} to {cell(value['high'])})"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(key)} {cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(cell, value)) if len(value) <= MOST_REPEATS else f"{len(value)} values"
    return str(value).replace("|", "\\|").replace("\n", " ")


def repeats(value: Any, write: Callable[[float], str]) -> str:
    """A cell of a table of measurements, whose numbers are written by `write`."""
    if is_repeated(value):
        return f"{write(statistics.median(value))} ({write(min(value))} to {write(max(value))})"
    if isinstance(value, Mapping) and is_plain(value):
        return f"{write(value['mean'])} ({write(value['low'])} to {write(value['high'])})"
    if isinstance(value, list) and are_numbers(value) and not is_curve(value):
        return ", ".join(map(write, value))
    return write(value) if numbers_of(value) and not isinstance(value, Mapping) else cell(value)


def capital(text: str) -> str:
    """The text with a capital first letter, and with acronyms in capitals."""
    text = " ".join(ACRONYMS.get(word, word) for word in text.split(" "))
    return text[0].upper() + text[1:]


def words(key: str) -> str:
    """A key as words."""
    pattern = rf"\b({'|'.join(SPELLINGS)})\b"
    return re.sub(pattern, lambda found: SPELLINGS[found[0]], key.replace("_", " "))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    wanted = pages()
    files = [*PAGES.glob("*.md"), *PAGES.glob("*.svg")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    odd = sorted(name for name in wanted.keys() | texts.keys() if wanted.get(name) != texts.get(name))
    if check:
        print("\n".join(f"differs from its data: docs/results/{name}" for name in odd), file=sys.stderr)
        return 1 if odd else 0
    PAGES.mkdir(exist_ok=True)
    for name in odd:
        if name in wanted:
            (PAGES / name).write_text(wanted[name], encoding="utf-8")
        else:
            (PAGES / name).unlink()
    print(f"{len(wanted)} files in docs/results, {len(odd)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
