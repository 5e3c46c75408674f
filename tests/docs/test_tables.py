"""Tables in the documentation match the code and the committed measurements."""

import ast
import json
import re
from pathlib import Path
from statistics import median

from doc_blocks import ROOT

DOCS = ROOT / "docs"


def rows(page: Path) -> list[list[str]]:
    """The cells of every row of every table on a page."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def messages() -> str:
    """All string literals of the source; NUL replaces the values of f-strings."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_troubleshooting_messages_exist_in_the_source() -> None:
    text = messages()
    quoted = [
        one for row in rows(DOCS / "how-to" / "troubleshooting.md") for one in re.findall("`([^`]+)`", row[0])
    ]
    assert len(quoted) > 25
    parts = [part.strip() for one in quoted for part in one.split("…")]
    assert not [part for part in parts if part and part not in text]


def test_sampling_speed_table_matches_the_measurements() -> None:
    records = json.loads((ROOT / "benchmarks" / "results" / "rollout.json").read_text())["records"]
    columns = [("perilune", 1), ("perilune", 2), ("transformers", 2)]
    checked, model = 0, ""
    for row in rows(DOCS / "reference" / "time-and-cost.md"):
        if len(row) != 5 or row[1] not in {"float32", "bfloat16"}:
            continue
        model = row[0][:1] or model
        for cell, (engine, cores) in zip(row[2:], columns, strict=True):
            wanted = {
                "model": model,
                "weights": row[1],
                "engine": engine,
                "cores": cores,
                "workload": "group",
            }
            (record,) = [one for one in records if wanted.items() <= one.items()]
            speed = median(record["tokens"] / seconds for seconds in record["seconds"])
            assert abs(float(cell.replace(",", "")) - speed) <= 1, (row, speed)
            checked += 1
    assert checked == 18
