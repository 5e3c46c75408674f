"""The pages of the recipes for SmolLM2 state the measured figures."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from doc_blocks import ROOT

RUNS = json.loads((ROOT / "benchmarks" / "results" / "smollm2.json").read_text())["runs"]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))


def result_rows(recipe: str) -> list[str]:
    """The rows of both tables of a page: pass@1 by evaluation, then the cost by training stage."""
    runs = [run["stages"] for run in RUNS if run["recipe"] == recipe]
    rows = []
    for name, stage in runs[0].items():
        if "pass@1" in stage:
            rates = [run[name]["pass@1"]["mean"] for run in runs]
            rows.append(row(name, *(f"{rate:.1%}" for rate in (*rates, fmean(rates)))))
        for part in stage.get("parts", ()):
            rates = [run[name]["parts"][part]["mean"] for run in runs]
            rows.append(row(f"{name}/{part}", *(f"{rate:.1%}" for rate in (*rates, fmean(rates)))))
    for name, stage in runs[0].items():
        if "perplexity of English" in stage:
            stages = [run[name] for run in runs]
            rows.append(
                row(
                    name,
                    by_seed(stages, lambda stage: f"{stage['seconds'] / 60:.0f}"),
                    by_seed(stages, lambda stage: "{:.1f} → {:.1f}".format(*stage["perplexity of English"])),
                    by_seed(stages, lambda stage: f"{stage['KL to the start, nats per answer']:.1f}"),
                )
            )
    minutes = by_seed(runs, lambda run: f"{sum(stage['seconds'] for stage in run.values()) / 60:.0f}")
    return [*rows, f"| all stages | {minutes} | | |"]


def row(name: str, *cells: str) -> str:
    return f"| `{name}` | {' | '.join(cells)} |"


def by_seed(items: Sequence[Any], write: Callable[[Any], str]) -> str:
    return ", ".join(map(write, items))


def test_every_recipe_has_a_page() -> None:
    recipes = {path.stem for path in (ROOT / "recipes" / "smollm2").glob("*.yaml")}
    assert {page.stem.replace("-", "_") for page in PAGES} == recipes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_and_differences_match_the_data(page: Path) -> None:
    text = page.read_text()
    results = text.split("\n## Results\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?:`|all stages ).*$", results, re.MULTILINE)
    assert rows == result_rows(page.stem.replace("-", "_"))
    measured = (ROOT / "docs" / "results" / "smollm2.md").read_text()
    flowing = " ".join(text.split())
    differences = re.findall(r"\([+-][\d.]+ points[^)]*\)", flowing)
    assert [difference for difference in differences if difference not in measured] == []
    assert ("points" in flowing) == bool(differences)
