"""The control group: its memory limit, the cause that its kills report, and its removal."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.sandbox import Sandbox, SandboxLimits
from perilune.sandbox.control_group import own_group

pytestmark = pytest.mark.usefixtures("walls")
LIMITS = SandboxLimits(seconds=20, memory_bytes=128 << 20, processes=12, scratch_bytes=4 << 20)
STORM = """
import os, threading, time
def fork():
    if os.fork() == 0:
        taken = b'x' * (40 << 20)  # 280 MiB in all; one process may take 128
        os.write(1, b'40 MiB ')
        time.sleep(19)
        os._exit(0)
for one in [threading.Thread(target=fork) for _ in range(3)]: one.start()
for _ in range(4): fork()
time.sleep(19)
"""
IN_SOCKETS = """
import os, socket
for _ in range(2): os.fork()
pairs = []
for _ in range(55):
    pairs += socket.socketpair()
    for one in pairs[-2:]:
        one.setblocking(False)
        try:
            while True: one.send(bytes(4096))
        except BlockingIOError: pass
try: os.wait(); os.wait()
except ChildProcessError: pass
"""


@pytest.fixture(scope="module")
def places():
    """The folders in which a control group can be. Without control groups the tests xfail with the reason."""
    with Sandbox(LIMITS) as sandbox:
        capabilities = sandbox.capabilities()
    if not capabilities.mechanisms.control_group:
        pytest.xfail(f"no control group: {capabilities.reasons['control_group']}")
    _, mounted, folder = own_group()
    return [path for path in (folder, *folder.parents) if path.is_relative_to(mounted)]


def groups_of(process, places):
    return [folder for place in places for folder in place.glob(f"perilune-sandbox-{process}-*")]


def read_number(folder, *names):
    """The number in the first file that exists. Control groups v1 and v2 name it differently."""
    return next(int((folder / name).read_text()) for name in names if (folder / name).exists())


def test_control_group_limits_memory_between_two_checks_of_watch(places):
    with Sandbox(LIMITS) as sandbox:
        result = sandbox.run(STORM)
        (group,) = groups_of(sandbox.process_id, places)
        limit = read_number(group, "memory.max", "memory.limit_in_bytes")
        assert limit == LIMITS.memory_bytes + LIMITS.scratch_bytes + (16 << 20)
        assert read_number(group, "memory.peak", "memory.max_usage_in_bytes") <= limit
        assert (result.cause, result.signal) == ("memory", signal.SIGKILL), result
        assert sandbox.run("print('well')").output == "well\n"


def test_control_group_limits_kernel_memory_of_sockets(places):
    limits = replace(LIMITS, memory_bytes=24 << 20, scratch_bytes=1 << 20, open_files=120)
    with Sandbox(limits) as sandbox:
        result = sandbox.run(IN_SOCKETS)
        assert (result.cause, result.signal) == ("memory", signal.SIGKILL), result
        assert sandbox.run("print('well')").output == "well\n"
    with Sandbox(limits, without=["control_group"]) as sandbox:
        assert sandbox.capabilities().walls["memory"] == ("limits", "watch")
        assert not sandbox.run(IN_SOCKETS).cause


def test_control_group_is_removed_on_close_or_by_next_sandbox_after_kill(places):
    with Sandbox(LIMITS) as sandbox:
        first = sandbox.process_id
        (group,) = groups_of(first, places)
        foreign = [group.with_name("perilune-sandbox-1-alive"), group.with_name("somebody-else")]
        try:
            for folder in foreign:
                folder.mkdir()
            os.kill(first, signal.SIGKILL)
            sandbox.close()
            assert group.exists()
            with Sandbox(LIMITS) as later:
                assert later.run("print('well')").output == "well\n"
                second = later.process_id
                assert not group.exists() and groups_of(second, places)
            assert not groups_of(second, places) and all(folder.exists() for folder in foreign)
        finally:
            for folder in foreign:
                folder.rmdir()


def test_killing_owner_and_supervisor_leaves_no_process(places):
    script = (
        "import threading, time\nfrom perilune.sandbox import Sandbox, SandboxLimits\n"
        "s = Sandbox(SandboxLimits(seconds=60)); s.run('')\n"
        "threading.Thread(target=s.run, args=('import time; time.sleep(60)',), daemon=True).start()\n"
        "print(s.process_id, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        supervisor = int(owner.stdout.readline())
        (group,) = groups_of(supervisor, places)
        until = time.monotonic() + 60
        while len(family := [int(pid) for pid in (group / "cgroup.procs").read_text().split()]) < 4:
            assert time.monotonic() < until, family  # the supervisor, the launcher, init and the code
            time.sleep(0.05)
        os.kill(supervisor, signal.SIGKILL)
        owner.kill()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < until, family
        time.sleep(0.05)
    with Sandbox(LIMITS) as sandbox:
        sandbox.run("")
        assert not group.exists()
