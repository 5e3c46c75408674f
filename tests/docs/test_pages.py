"""The pages say what is: columns, packages, results; and the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

from perilune.data.episodes_file import episode_schema

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"


def test_every_column_of_an_episode_is_documented() -> None:
    page = (DOCS / "reference" / "episode.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]
    assert documented == episode_schema().names


def test_the_map_of_the_house_is_complete() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "perilune").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE)) == packages


def test_results_are_what_the_data_says() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "report.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{checked.stderr}run: python benchmarks/report.py"


def test_the_site_builds_and_loads_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        for link in re.findall(r"<link\b[^>]*>", text):
            if re.search(r"rel=\"(?:stylesheet|preconnect|icon)\"", link):
                loaded += re.findall(r"href=\"([^\"]+)\"", link)
        assert loaded and not [one for one in loaded if "//" in one], page.name
