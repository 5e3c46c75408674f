"""The pages of `perilune simulate` and `simulate-serving` are self-contained and render in a browser."""

import json
from pathlib import Path
from typing import Any

import pytest
from browser_cases import CHROMIUM, urls_in
from typer.testing import CliRunner

from perilune.cli.main import app
from perilune.models.config.decoder_config import PRESETS


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("simulated")
    model = folder / "<b>model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRESETS["large"].to_hf()))
    commands = {
        "run": ["simulate", "quickstart", "--set", "rl.steps=10", "--staleness", "sync,1", "--wait", "0.1"],
        "serving": ["simulate-serving", str(model), "--requests", "poisson:30:1:50:10"],
    }
    for name, words in commands.items():
        page = str(folder / f"{name}.html")
        ran = CliRunner().invoke(app, [*words, "--machines", "2xL4@0.8", "--page", page])
        assert ran.exit_code == 0, ran.output
    return {name: folder / f"{name}.html" for name in commands}


def test_simulation_pages_are_self_contained_and_escape_names(pages: dict[str, Path]) -> None:
    for page in pages.values():
        text = page.read_text()
        assert "<b>model" not in text
        assert "default-src 'none'; script-src 'sha256-" in text
        assert urls_in(text) == set()


@pytest.mark.parametrize(
    ("name", "titles", "cell"),
    [
        (
            "run",
            [
                "Seconds of each training step",
                "rl, synchronous: the first 8 of 10 steps",
                "rl, staleness 1: the first 8 of 10 steps",
            ],
            "staleness 1",
        ),
        ("serving", ["Seconds by time of arrival", "Seconds of which share of the requests"], "30 in"),
    ],
)
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_simulation_page_renders_in_browser(
    browser: Any, pages: dict[str, Path], name: str, titles: list[str], cell: str
) -> None:
    wrong: list[str] = []
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(pages[name].as_uri())
    assert tab.locator(".chart h4").all_inner_texts() == titles
    assert cell in tab.locator("#predictions table").inner_text()
    assert tab.locator(".chart canvas, .chart .rows").count() == len(titles)
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    if name == "run":  # steps take less than a second, after a start of 60 s
        ticks = tab.locator(".chart").nth(1).locator(".tick").all_text_contents()
        assert len(ticks) == len(set(ticks)) > 1 and "0" in ticks
        row = tab.locator("#predictions tbody tr").first.bounding_box()
        assert row is not None and row["height"] < 110
    tab.close()
    assert wrong == []
