"""What the tests of the command line share: the console script, a small recipe, an environment."""

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

# The same on an environment that is there in a moment, for tests that start many processes.
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
    """The environment of a command whose state lies in `home`."""
    found = os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PERILUNE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        "PYTHONPATH": found,
        "PATH": os.pathsep.join([str(Path(SCRIPT).parent), os.environ["PATH"]]),  # an active environment
    }
