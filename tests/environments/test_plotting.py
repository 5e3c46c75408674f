"""reasoning-gym does not import matplotlib until code plots."""

import subprocess
import sys

CHECK = """
import sys
from perilune.environments import make_environment
environment = make_environment({"id": "reasoning_gym", "task": "game_of_life"})
task = next(environment.tasks("train", seed=0))
assert environment.score(task, environment.gold(task)).reward == 1.0  # a family that uses cellpylib works
assert not [name for name in sys.modules if name.startswith(("matplotlib", "mpl_toolkits"))]

import cellpylib
import matplotlib.pyplot
assert matplotlib.pyplot.__file__
assert cellpylib.ca_functions.plt.figure is matplotlib.pyplot.figure
"""


def test_matplotlib_is_imported_only_for_plotting() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
