"""Result pages: each opens with two sentences that are computed from its data."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402
import smollm2_view  # noqa: E402
from leads import LEADS, QUESTIONS  # noqa: E402
from leads.text import count, listed, span  # noqa: E402
from perilune.models.config.families import DECODER_FAMILIES  # noqa: E402
from selfplay_view import lead as lead_of_self_play  # noqa: E402
from smollm2 import figures  # noqa: E402

DATA: dict[str, Any] = {"title": "Pass rates", "about": "Two arms.", "command": "python it.py"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, with a lead for `rates.json`."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "LEADS", {"rates": lambda data: ("A was tried.", f"It got {data['rate']}.")})
    monkeypatch.setattr(report, "QUESTIONS", {"Is it good?": ("rates",)})
    return tmp_path


def test_page_opens_with_lead_and_findings_before_the_measurement(results: Path) -> None:
    (results / "rates.json").write_text(json.dumps(DATA | {"findings": ["better", "faster"], "rate": 7}))
    lines = report.pages()["rates.md"].splitlines()
    assert lines[4:12] == [
        "A was tried. It got 7.",
        "",
        "* better",
        "* faster",
        "",
        "## How it was measured",
        "",
        "Two arms.",
    ]


def test_index_lists_pages_by_question_with_their_results(results: Path) -> None:
    (results / "rates.json").write_text(json.dumps(DATA | {"rate": 7}))
    assert "## Is it good?\n\n* [Pass rates](rates.md): It got 7.\n" in report.pages()["index.md"]


def test_result_without_a_lead_is_refused(results: Path) -> None:
    (results / "other.json").write_text(json.dumps(DATA))
    with pytest.raises(SystemExit, match=r"other.json: no lead"):
        report.pages()


def test_explanation_of_brackets_is_said_once(results: Path) -> None:
    rows = [{"arm": name, "rates": [1, 2, 3]} for name in "ab"]
    (results / "rates.json").write_text(json.dumps(DATA | {"rate": 7, "first": rows, "second": rows}))
    page = report.pages()["rates.md"]
    assert page.count("the median of repeated runs") == 1 and "2 (1 to 3)" in page
    assert page.index("the median of") < page.index("## First")


def test_different_brackets_are_explained_at_each_table(results: Path) -> None:
    runs = [{"arm": name, "rates": [1, 2, 3]} for name in "ab"]
    means = [{"arm": name, "rate": {"mean": 2, "low": 1, "high": 3}} for name in "ab"]
    (results / "rates.json").write_text(json.dumps(DATA | {"rate": 7, "first": runs, "second": means}))
    page = report.pages()["rates.md"]
    assert (
        page.index("## First")
        < page.index("medians over")
        < page.index("## Second")
        < page.index("show means")
    )


def test_every_page_opens_with_two_sentences() -> None:
    for name, text in report.pages().items():
        if name.endswith(".md") and name != "index.md":
            lead = text.splitlines()[4]
            assert lead.endswith(".") and lead.count(". ") == 1, f"{name}: {lead}"


def test_leads_change_with_the_data() -> None:
    data = json.loads((report.RESULTS / "soak.json").read_text())
    assert "no lost runs" in LEADS["soak"](data)[1]
    data["outcome"][0]["lost runs"] = 12
    assert "12 lost runs" in LEADS["soak"](data)[1]


def test_lead_of_self_play_names_changes_that_are_not_shown() -> None:
    runs = json.loads((report.RESULTS / "selfplay.json").read_text())["runs"]
    assert "Kuhn poker is 0.03 (0.20 before)," in lead_of_self_play(runs)[1]
    for run in runs["kuhn_poker"]:
        for row in run["league"]["judgements"]:
            row["exploitability"] = 0.2
    assert "Kuhn poker is 0.20 (0.20 before; no difference shown)," in lead_of_self_play(runs)[1]


def test_agreement_with_transformers_is_measured_for_every_family() -> None:
    data = json.loads((report.RESULTS / "family_agreement.json").read_text())
    assert data["largest difference, nats"].keys() == DECODER_FAMILIES.keys()


@pytest.mark.slow
def test_stored_texts_are_those_of_the_scripts() -> None:
    """A changed text is changed in the JSON, too. A page may add a note to it."""
    stems = {path.stem for path in report.RESULTS.glob("*.json")} - {"grpo_cuda"}  # a run that was cut off
    checked = []
    for stem in sorted(stems):
        if (ROOT / "benchmarks" / f"{stem}.py").exists():
            text = getattr(import_module(stem), "ABOUT", None)
            if isinstance(text, str):
                stored = json.loads((report.RESULTS / f"{stem}.json").read_text())["about"]
                assert stored.startswith(text), stem
                checked.append(stem)
    assert len(checked) > 20


def test_questions_name_each_page_once() -> None:
    names = [name for named in QUESTIONS.values() for name in named]
    assert len(names) == len(set(names)) and set(LEADS) <= set(names)


def test_words_of_leads() -> None:
    assert (count(0, "run"), count(1, "run"), count(2_000, "run")) == ("no runs", "one run", "2,000 runs")
    assert (listed(["a"]), listed(["a", "b", "c"])) == ("a", "a, b and c")
    assert (span([2.0, 1.0], ".1f"), span([0.501, 0.503], ".0%")) == ("1.0 to 2.0", "50%")


def test_page_of_the_smollm2_recipes_shows_other_environments_where_they_are_stored() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "smollm2.json").read_text())
    first, *others = document["runs"]
    text = {"perplexity": {"before": 88.0, "after": 95.0}}
    rate = {side: {"mean": mean} for side, mean in (("before", 0.25), ("after", 0.125), ("change", -0.125))}
    forgetting = {
        "text": text,
        "environments": [{"environment": "instructions", "pass@1": rate}],
        "kl": {"per_answer": {"mean": 2.0}},
    }
    stages = {"rl": figures({"summary": {"seconds": 7.0, "forgetting": forgetting}})}
    assert stages["rl"]["other environments"] == {"instructions": [0.25, 0.125]}
    changed = first | {"stages": first["stages"] | stages}
    table = report.rows_table(smollm2_view.view({"runs": [changed, *others]})["other environments"])
    assert "| arithmetic | 0 | rl | instructions | 25.0% | 12.5% |" in table
