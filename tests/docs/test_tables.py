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
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_troubleshooting_messages_exist_in_the_source() -> None:
    text = messages()
    quoted = [
        t for row in rows(DOCS / "how-to" / "troubleshooting.md") for t in re.findall("`([^`]+)`", row[0])
    ]
    assert len(quoted) > 25
    parts = [part.strip() for message in quoted for part in message.split("…")]
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
            (record,) = [record for record in records if wanted.items() <= record.items()]
            speed = median(record["tokens"] / seconds for seconds in record["seconds"])
            assert abs(float(cell.replace(",", "")) - speed) <= 1, (row, speed)
            checked += 1
    assert checked == 18
