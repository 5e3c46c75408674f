"""The console script as users start it, in a home and a folder of its own."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import RECIPE, SCRIPT, environment

Perilune = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def perilune(tmp_path: Path) -> Perilune:
    """Runs the console script in `tmp_path`, its home beside it."""

    def run(*arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*wrapper, SCRIPT, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of two small stages."""
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path
