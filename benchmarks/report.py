"""Make docs/results/ from benchmarks/results/*.json, so that no figure is typed by hand.

    python benchmarks/report.py            write the pages
    python benchmarks/report.py --check    leave with 1 when a page is not what its data says

A result is one JSON object. `title`, `about` and `command` become heading, text and the way to make it again;
every other value is shown as it is: plain values and small objects as facts, a list of like objects as a
table, and an object of like objects as a table with their names down the side. In a table a few numbers are
one figure measured several times, and become their median (least to most); many are a curve, only counted.
A result whose records are not meant to be read as they are has a view of its own, which may add `charts`: SVG
by file name, to be written beside the pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.view import view as algorithms_view
from connect_four_view import view as connect_four_view
from rollout.view import view as rollout_view
from selfplay_view import view as selfplay_view

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"
HEADER = ("title", "about", "command")
VIEWS = {
    "rollout": rollout_view,
    "algorithms": algorithms_view,
    "connect_four": connect_four_view,
    "selfplay": selfplay_view,
}
MOST_ROWS = 40  # longer tables are for programs
MOST_REPEATS = 20  # longer lists of numbers are curves
INTRODUCTION = """\
# Results

Every page here is made from a committed JSON file by `python benchmarks/report.py`. Each says the command
that measures it again. Timings are of one machine at one time; ratios travel better.
"""


def pages() -> dict[str, str]:
    """Text of every page and chart, by its file's name."""
    found: dict[str, str] = {}
    listing = []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        document = VIEWS.get(path.stem, dict)(document)
        found |= document.pop("charts", {})
        found[f"{path.stem}.md"] = page(path, document)
        listing.append(f"* [{title(path, document)}]({path.stem}.md)")
    found["index.md"] = INTRODUCTION + "\n" + ("\n".join(listing) or "Nothing has been measured yet.") + "\n"
    return found


def title(path: Path, document: Mapping[str, Any]) -> str:
    """What the result calls itself, else its file's name in words."""
    return str(document.get("title") or capital(words(path.stem)))


def page(path: Path, document: Mapping[str, Any]) -> str:
    """One result as Markdown."""
    lines = [f"# {title(path, document)}", ""]
    lines += [f"<!-- Written by `python benchmarks/report.py` from {path.relative_to(ROOT)}. -->", ""]
    if about := document.get("about"):
        lines += [str(about), ""]
    if command := document.get("command"):
        lines += ["```text", f"$ {command}", "```", ""]
    body = {key: value for key, value in document.items() if key not in HEADER}
    lines += section(body, level=2)
    lines += [f"All of it: `{path.relative_to(ROOT)}`."]
    return "\n".join(lines) + "\n"


def section(values: Mapping[str, Any], level: int) -> list[str]:
    """What does not fit a cell, each under a heading of its own; then the facts, one a row."""
    lines = []
    facts = {key: value for key, value in values.items() if is_fact(value)}
    for key, value in values.items():
        if key not in facts:
            lines += [f"{'#' * min(level, 5)} {capital(words(key))}", "", *compound(value, level)]
    if facts and lines and level == 2:
        lines += ["## Setting", ""]
    return lines + (
        table(["", ""], [[words(key), cell(value)] for key, value in facts.items()]) if facts else []
    )


def compound(value: Any, level: int) -> list[str]:
    """A list or an object that does not fit a cell."""
    if isinstance(value, Mapping):
        rows = list(value.values())
        if len(rows) > 1 and alike(rows):
            return rows_table(rows, list(value))
        return section(value, level + 1)
    rows = [flat(row) if isinstance(row, Mapping) else row for row in value]
    shown, left_out = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    lines = rows_table(shown) if alike(rows) else [f"* {cell(row)}" for row in shown] + [""]
    return lines + ([f"And {left_out} more.", ""] if left_out > 0 else [])


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """An object with the keys of the objects inside it as its own: "outer: inner"."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and not is_plain(value):
            found |= flat(value, f"{prefix}{key}: ")
        else:
            found[prefix + key] = value
    return found


def rows_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[str]:
    """One row an object; the columns are all their keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    header = [*([""] if names else []), *map(words, columns)]
    labels: list[list[str]] = [[words(name)] for name in names] or [[] for _ in rows]
    return table(
        header,
        [
            [*label, *(repeats(row.get(key)) for key in columns)]
            for label, row in zip(labels, rows, strict=True)
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; columns of numbers stand right."""
    columns = list(zip(*rows, strict=True))
    marks = ["--:" if column and all(map(is_number, column)) else "---" for column in columns]
    lines = [header, marks, *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def is_plain(value: Any) -> bool:
    """Whether it fits one cell."""
    if isinstance(value, Mapping):
        return set(value) == {"mean", "low", "high"}
    if isinstance(value, list):
        return are_numbers(value) or (len(value) <= 8 and all(isinstance(item, str) for item in value))
    return True


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether all of these are numbers."""
    return all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in values)


def is_fact(value: Any) -> bool:
    """Whether it can be told in a line: a plain value, or a few of them."""
    few = isinstance(value, Mapping) and len(value) <= 6
    return is_plain(value) or (
        few and all(is_plain(item) and not isinstance(item, Mapping) for item in value.values())
    )


def alike(rows: Sequence[Any]) -> bool:
    """Whether these are objects of plain values that share most of their keys."""
    if not rows or not all(
        isinstance(row, Mapping) and row and all(map(is_plain, row.values())) for row in rows
    ):
        return False
    keys = {key for row in rows for key in row}
    return all(len(row) * 2 > len(keys) for row in rows)


def is_number(text: str) -> bool:
    """Whether a cell reads as a figure."""
    return not text or text.lstrip("+-")[:1].isdigit()


def cell(value: Any) -> str:
    """One value as a few characters."""
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


def repeats(value: Any) -> str:
    """A cell of a table of measurements."""
    if isinstance(value, list) and 2 < len(value) <= MOST_REPEATS and are_numbers(value):
        return f"{cell(statistics.median(value))} ({cell(min(value))} to {cell(max(value))})"
    return cell(value)


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[0].upper() + text[1:]


def words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    wanted = pages()
    kept = [*PAGES.glob("*.md"), *PAGES.glob("*.svg")]
    held = {path.name: path.read_text(encoding="utf-8") for path in kept}
    odd = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    if check:
        print("\n".join(f"not what its data says: docs/results/{name}" for name in odd), file=sys.stderr)
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
