"""These tests use the helpers of tests/learn, tests/tasks and tests/drill."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CASES = [str(Path(__file__).parents[1] / name) for name in ("processes", "learn", "tasks", "drill")]
sys.path[:0] = CASES


@pytest.fixture(scope="session", autouse=True)
def found_everywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(CASES), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
