"""The columns of a stage determine its training charts."""

from pathlib import Path

from perilune.ui.charts import CurveChart, _load_catalogue, select_charts

DOCS = Path(__file__).parents[2] / "docs"


def charts_by_key(task: str, **columns: list[float | None]) -> dict[str, CurveChart]:
    named = {name.replace("__", "/"): values for name, values in columns.items()}
    return {chart.key: chart for chart in select_charts(task, named)}


def test_wildcard_series_excludes_columns_of_other_charts() -> None:
    charts = charts_by_key("rl", term__form=[1.0], term__sum=[0.5], term__learned=[0.1], seat__0__won=[1.0])
    assert charts["terms"].series == [("term/form", "form", 1), ("term/sum", "sum", 2)]
    assert charts["learned"].series == [("term/learned", "learned", 1)]
    assert charts["seats"].series == [("seat/0/won", "player 0", 1)]


def test_charts_of_omits_charts_without_columns_or_values() -> None:
    assert charts_by_key("rl", entropy=[None, None]) == {}
    assert set(charts_by_key("rl", pass_rate=[0.5])) == {"reward"}
    with_sets = charts_by_key("rl", pass_rate=[0.5], **{"eval__heldout__pass@1": [None, 0.5]})
    assert with_sets["held-out"].series == [
        ("pass_rate", "training", 7),
        ("eval/heldout/pass@1", "heldout", 3),
    ]


def test_loss_chart_depends_on_task_and_duplicate_reward_is_drawn_once() -> None:
    assert "loss" not in charts_by_key("rl", loss=[1.0])
    assert (charts_by_key("sft", loss=[1.0])["loss"].y, charts_by_key("distill", loss=[1.0])["loss"].y) == (
        "log",
        "",
    )
    assert len(charts_by_key("rl", reward=[0.5], pass_rate=[0.5])["reward"].series) == 1
    assert len(charts_by_key("rl", reward=[0.5], pass_rate=[0.6])["reward"].series) == 2


def test_docs_name_every_charted_column() -> None:
    pages = ("reference/metrics", "how-to/self-play", "how-to/distillation")
    text = "".join((DOCS / f"{page}.md").read_text() for page in pages)
    names = {name.partition("*")[0] for chart in _load_catalogue() for name in chart["series"]}
    assert [name for name in sorted(names) if name.rstrip("/").partition("/")[0] not in text] == []
