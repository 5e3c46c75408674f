"""Fixtures: a synthetic experiment shared by all report tests, and a browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser_cases import ARGUMENTS, CHROMIUM
from make_experiment import make_experiment

from perilune.ui.view import ExperimentView


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> ExperimentView:
    """Six finished stages, created in two seconds. Tests must not change them."""
    return make_experiment(tmp_path_factory.mktemp("home"), steps=12, prompts=4, tasks=24)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser shared by the tests of one module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()
