"""One synthetic experiment for all tests of the report."""

from __future__ import annotations

import pytest
from make_experiment import make_experiment

from perilune.ui.view import ExperimentView


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> ExperimentView:
    """Six finished stages, small enough to be made in two seconds. Read only."""
    return make_experiment(tmp_path_factory.mktemp("home"), steps=12, prompts=4, tasks=24)
