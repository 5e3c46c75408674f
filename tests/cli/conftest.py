"""The console script as users start it, in a home and a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = str(Path(sys.executable).with_name("perilune"))

RECIPE = """\
name: small
model: {preset: tiny}
environment:
  id: reasoning_gym
  task: basic_arithmetic
  config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, operators: ["+"]}
  prompt: compact
resources: {device: cpu, threads: 1}
stages:
  - {name: traces, task: collect, teacher: arithmetic, traces: 40}
  - {name: base, task: evaluate, checkpoint: model, tasks: 3, samples: 2, max_tokens: 8}
"""

Perilune = Callable[..., subprocess.CompletedProcess[str]]


def environment(home: Path) -> dict[str, str]:
    """The environment of a command whose state lies in `home`."""
    return os.environ | {"PERILUNE_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


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
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of two small stages."""
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path
