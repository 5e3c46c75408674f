"""Fixtures for the tests of both planes; their conftest files import them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_cases import INSTALLED, Command, drill_control

from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.cli.main import main
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.execution.claim import read_claim
from perilune.execution.processes import Presence


def forget_plugins() -> None:
    load_plugin.cache_clear()
    plugin_names.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def drill_installed() -> Iterator[None]:
    """Make the task "drill" importable, here and in every child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(INSTALLED))
        patch.setenv("PYTHONPATH", str(INSTALLED), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        forget_plugins()
        yield
    forget_plugins()


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    opened = drill_control(tmp_path / "home")
    yield opened
    opened.store.close()


@pytest.fixture
def perilune(capsys: pytest.CaptureFixture[str], control: Control) -> Command:
    """Run a command; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path) -> Iterator[None]:
    """Kill the processes that a failed test left."""
    yield
    for path in tmp_path.rglob("runtime/claim.json"):
        try:
            claim = read_claim(path.parent)
        except RequestError:
            continue
        if claim is not None and claim.pid != os.getpid():
            if claim.process.presence() is Presence.PRESENT:
                claim.process.send(signal.SIGKILL)
            claim.end_remaining_processes(grace=0.0)
