"""One synthetic experiment for all tests of the report, and a browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser_cases import ARGUMENTS, CHROMIUM
from make_experiment import make_experiment

from perilune.ui.view import ExperimentView


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> ExperimentView:
    """Six finished stages, small enough to be made in two seconds. Read only."""
    return make_experiment(tmp_path_factory.mktemp("home"), steps=12, prompts=4, tasks=24)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the tests of a module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()
