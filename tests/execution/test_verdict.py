"""Which kills for lack of memory count as the task's."""

import signal
import subprocess
import sys

import pytest

from perilune.execution.verdict import memory_kills

SMALL_GROUP = """
import os, sys
from perilune.execution.verdict import memory_kills
from perilune.sandbox.control_group import ControlGroup, be_killed_first
try:
    group = ControlGroup(64 << 20, 0)
except OSError as error:
    sys.exit(f"no control group: {error}")
before = memory_kills()
if (child := os.fork()) == 0:
    be_killed_first()
    bytearray(256 << 20)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), memory_kills() - before)
group.leave()
"""


def test_a_kill_counts_in_its_own_control_group_only() -> None:
    """Another job's lack of memory does not explain why a task here was killed."""
    before = memory_kills()
    done = subprocess.run([sys.executable, "-c", SMALL_GROUP], capture_output=True, text=True, check=False)
    if "no control group" in done.stderr:
        pytest.xfail(done.stderr)
    assert done.stdout.split() == [str(-signal.SIGKILL), "1"], done.stderr
    assert memory_kills() == before
