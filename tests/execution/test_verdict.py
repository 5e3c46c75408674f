"""Which failures count as out of memory: kills by the kernel, and failed allocations."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.execution.verdict import Cause, count_memory_kills, find_cause, find_ending

SMALL_GROUP = """
import os, sys
from perilune.execution.verdict import count_memory_kills
from perilune.sandbox.control_group import ControlGroup, be_killed_first
try:
    group = ControlGroup(64 << 20, 0)
except OSError as error:
    sys.exit(f"no control group: {error}")
before = count_memory_kills()
if (child := os.fork()) == 0:
    be_killed_first()
    bytearray(256 << 20)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), count_memory_kills() - before)
group.leave()
"""


def test_real_time_signal_is_the_cause_of_an_ending(tmp_path: Path) -> None:
    ending = find_ending(-40, tmp_path / "failure.json", stopped=False, memory_kill=False)
    assert (ending.signal, ending.cause, ending.message) == (40, Cause.SIGNALLED, "killed by signal 40")


@pytest.mark.parametrize(
    "report", [b'{"cause": "work_fai', b"[]", b"{}", b'{"cause": "x", "message": ""}', b"\xff"]
)
def test_damaged_failure_report_leaves_the_exit_code(report: bytes, tmp_path: Path) -> None:
    path = tmp_path / "failure.json"
    path.write_bytes(report)
    ending = find_ending(1, path, stopped=False, memory_kill=False)
    assert (ending.exit_code, ending.cause) == (1, Cause.EXITED)
    assert ending.message == "the task exited with code 1"


def test_count_memory_kills_counts_only_its_own_control_group() -> None:
    """An out-of-memory kill of another job does not explain a killed task."""
    before = count_memory_kills()
    done = subprocess.run([sys.executable, "-c", SMALL_GROUP], capture_output=True, text=True, check=False)
    if "no control group" in done.stderr:
        pytest.xfail(done.stderr)
    assert done.stdout.split() == [str(-signal.SIGKILL), "1"], done.stderr
    assert count_memory_kills() == before


def test_failed_allocations_of_torch_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as on_cpu:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert find_cause(on_cpu.value) is Cause.OUT_OF_MEMORY
    assert find_cause(torch.OutOfMemoryError("CUDA out of memory")) is Cause.OUT_OF_MEMORY
    assert find_cause(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is Cause.CRASHED
