"""Pages match the code: episode columns, packages and results. The site builds without warnings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

from perilune.data.episodes_file import episode_schema

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"


def test_every_episode_column_is_documented() -> None:
    page = (DOCS / "reference" / "episode.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]
    assert documented == episode_schema().names


def test_readme_layout_lists_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "perilune").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE)) == packages


def test_result_pages_match_the_data() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "report.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{checked.stderr}run: python benchmarks/report.py"


def test_results_show_relative_changes_in_percent_and_differences_of_accuracy_in_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from report import rows_table

    interval = {"mean": -0.5562, "low": -0.6246, "high": 0.4879}
    for name, cells in (
        ("relative change", "| -55.6% (-62.5% to +48.8%) | +20.0% (+10.0% to +30.0%) |"),
        ("difference of accuracy", "| -55.6 (-62.5 to +48.8) | +20.0 (+10.0 to +30.0) |"),
    ):
        assert rows_table([{name: interval, "by seed": [0.1, 0.2, 0.3]}])[-2] == cells


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return site


def test_site_loads_no_external_resources(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        for link in re.findall(r"<link\b[^>]*>", text):
            if re.search(r"rel=\"(?:stylesheet|preconnect|icon)\"", link):
                loaded += re.findall(r"href=\"([^\"]+)\"", link)
        assert loaded and not [url for url in loaded if "//" in url], page.name


def test_llms_txt_lists_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Perilune\n\n> ")
    entries = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.+)$", text, re.MULTILINE)
    assert len(entries) == text.count("\n- ")
    assert sorted(path for _, path, _ in entries) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )
    whole = (site / "llms-full.txt").read_text()
    for title, path, about in entries:
        page = (site / path).read_text()
        assert title and len(about.split()) > 2, path
        assert ":::" not in page, path
        assert page.strip() in whole, path
    reference = (site / "reference" / "python.md").read_text()
    assert "perilune.metrics.pass_at_k.pass_at_k(" in reference  # the text includes docstrings
