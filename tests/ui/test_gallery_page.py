"""The page of `perilune model gallery` is self-contained, escapes hostile text and renders in a browser."""

from pathlib import Path
from typing import Any

import pytest
from browser_cases import CHROMIUM, urls_in

HOSTILE = "</script><img src=x onerror=alert(1)>"
CONFIG = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from perilune.models.gallery.facts import Entry, describe, shipped
    from perilune.ui.gallery import render_gallery

    entries = [entry for entry in shipped() if entry.name in ("Llama 3.1 8B", "gpt-oss 20B")]
    file = tmp_path_factory.mktemp("gallery") / "gallery.html"
    file.write_text(
        render_gallery([*map(describe, entries), describe(Entry(HOSTILE, HOSTILE, HOSTILE, CONFIG))])
    )
    return file


def test_gallery_page_is_self_contained_and_escapes_names(page: Path) -> None:
    text = page.read_text()
    assert "<img" not in text
    assert "default-src 'none'; script-src 'sha256-" in text
    assert urls_in(text) == set()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_gallery_page_renders_in_browser_without_network(browser: Any, page: Path) -> None:
    wrong, requests = [], []
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri())
    assert tab.locator("#models svg").count() == 3
    assert tab.locator("#models h3").nth(2).inner_text() == HOSTILE
    tab.fill("input[type=search]", "moe")
    assert tab.locator("#models h3").all_inner_texts() == ["gpt-oss 20B"]
    tab.select_option("[aria-label='Second model']", label="gpt-oss 20B")
    assert "771 MiB" in tab.locator("#compare table").inner_text()
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    tab.close()
    assert (wrong, requests) == ([], [page.as_uri()])
