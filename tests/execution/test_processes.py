"""Process identity: PID, start time, boot and host."""

import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace

from drill_cases import wait_for

from perilune.execution.processes import Presence, ProcessIdentity, find_marked, kill_all
from perilune.execution.ranks import wait_for_end


def identity(pid: int) -> ProcessIdentity:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return identity


def test_running_process_is_present_and_zombie_is_absent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    seen = identity(child.pid)
    assert seen.presence() is Presence.PRESENT
    child.kill()
    wait_for(lambda: seen.presence() is Presence.ABSENT, "death")  # a zombie until the parent waits
    assert ProcessIdentity.of(child.pid) is None
    assert not seen.send(signal.SIGTERM)
    child.wait()


def test_reused_pid_and_other_boot_are_absent_and_other_host_is_unknown() -> None:
    me = identity(os.getpid())
    assert replace(me, starttime=me.starttime - 1).presence() is Presence.ABSENT
    assert replace(me, boot_id="another boot").presence() is Presence.ABSENT
    assert replace(me, host="another machine").presence() is Presence.UNKNOWN
    assert replace(me, host="another machine", boot_id="another boot").presence() is Presence.UNKNOWN


def test_process_identity_round_trips_through_dict() -> None:
    me = identity(os.getpid())
    assert ProcessIdentity(**asdict(me)) == me


def test_kill_all_ends_every_process_with_the_mark() -> None:
    code = (
        "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "DRILL_MARK": "x7"})
    wait_for(lambda: len(find_marked("DRILL_MARK", "x7")) == 2, "two processes")
    assert kill_all(lambda: find_marked("DRILL_MARK", "x7"), grace=5.0)
    assert child.wait() == -signal.SIGTERM
    assert find_marked("DRILL_MARK", "x7") == []


def test_wait_for_end_sleeps_until_the_task_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as child:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        wait_for_end(child, 0.1)
        assert child.poll() is None
        wait_for_end(child, 20.0)
        assert child.poll() == 0
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 6
