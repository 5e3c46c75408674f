"""Fixtures that run the command line in a fresh folder and home: as a subprocess or in this process."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import LIGHT, RECIPE, SCRIPT, environment

from perilune.cli.main import main

Perilune = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def perilune(tmp_path: Path) -> Perilune:
    """Runs the console script in `tmp_path`, with the home `tmp_path/home`."""

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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Perilune:
    """Like `perilune`, but in this process with its libraries loaded, for commands that end early."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("COLUMNS", "80")
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main(arguments)
        return subprocess.CompletedProcess(arguments, int(left.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def light_recipe(tmp_path: Path) -> Path:
    """A recipe of two small stages whose environment loads quickly."""
    path = tmp_path / "small.yaml"
    path.write_text(LIGHT)
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of two small stages."""
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path
