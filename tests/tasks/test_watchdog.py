"""The watchdog ends a process that makes no progress, and prints the wait's name and all stacks."""

import subprocess
import sys

import pytest

from perilune.tasks.rl.update import MAX_SLOWDOWN, stall_timeout
from perilune.watchdog import STALL_SECONDS

HANGS = """
import time
from perilune.watchdog import Watchdog

def stuck():
    time.sleep(60)

with Watchdog("a wait that ends", 0.3) as wait:
    for _ in range(8):
        time.sleep(0.06)
        wait.progress()
print("alive", flush=True)
with Watchdog("sampling", 0.3):
    stuck()
"""

HOLDS_THE_LOCK = """
import re
from perilune import watchdog

watchdog.GRACE_SECONDS = 0.2
with watchdog.Watchdog("sampling", 0.2):
    re.match("(a*)*b", "a" * 40)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_stall_ends_the_process_and_prints_stacks() -> None:
    ended = run(HANGS)
    assert ended.returncode == 1
    assert ended.stdout == "alive\n"  # progress had extended the deadline
    assert "failed: sampling: nothing has happened for 0.3 s" in ended.stderr
    assert "in stuck" in ended.stderr
    assert "a wait that ends" not in ended.stderr


def test_stall_ends_code_that_holds_the_interpreter_lock() -> None:
    ended = run(HOLDS_THE_LOCK)
    assert ended.returncode == 1
    assert 'File "<string>", line 7' in ended.stderr


def test_learning_deadline_follows_the_slowest_step_up_to_a_limit() -> None:
    assert stall_timeout(100, 1.0, None) == STALL_SECONDS + 100
    assert stall_timeout(100, 1.0, 0.01) == pytest.approx(STALL_SECONDS + 100 * MAX_SLOWDOWN * 0.01)
    assert stall_timeout(100, 1.0, 0.04) > stall_timeout(100, 1.0, 0.01)
    assert stall_timeout(100, 1.0, 3.0) == STALL_SECONDS + 100
