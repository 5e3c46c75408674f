"""Shared by the command-line tests: the console script, small recipes, environment variables."""

import os
import sys
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("perilune"))

RECIPE = """\
name: small
model: {preset: tiny}
environment:
  id: reasoning_gym
  task: basic_arithmetic
  config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, operators: ["+"],
           allow_parentheses: false, allow_negation: false}
  prompt: compact
resources: {device: cpu, threads: 1}
stages:
  - {name: traces, task: collect, teacher: arithmetic, traces: 40}
  - {name: base, task: evaluate, checkpoint: model, tasks: 3, samples: 2, max_tokens: 8}
"""

# The same with an environment that loads quickly, for tests that start many processes.
LIGHT = """\
name: small
model: {preset: tiny}
environment: {id: factory, factory: "task_environments:Digits"}
resources: {device: cpu, threads: 1}
stages:
  - {name: traces, task: collect, teacher: gold, traces: 40}
  - {name: base, task: evaluate, checkpoint: model, tasks: 3, samples: 2, max_tokens: 8}
"""
ENVIRONMENTS = Path(__file__).parents[1] / "tasks"


def environment(home: Path) -> dict[str, str]:
    """Environment variables for a command with this home."""
    paths = os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PERILUNE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        "PYTHONPATH": paths,
        "PATH": os.pathsep.join(
            [str(Path(SCRIPT).parent), os.environ["PATH"]]
        ),  # like an active virtual environment
    }
