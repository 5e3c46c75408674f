"""The sandbox: files and output of a run, its limits, and the removal of its processes and folders."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.errors import RequestError
from perilune.sandbox import WALLS, Sandbox, SandboxFailedError, SandboxLimits
from perilune.sandbox.programs import ProgramLimits, Programs, Streams
from perilune.sandbox.watch import Output, descendants

pytestmark = pytest.mark.usefixtures("walls")
LIMITS = SandboxLimits(
    seconds=2.5, cpu_seconds=1, memory_bytes=96 << 20, processes=6, scratch_bytes=2 << 20, scratch_files=32,
    flood_bytes=1 << 20,
)  # fmt: skip
DEAF = "import signal\nfor n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
DAEMON = f"""
import os, time
{DEAF}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(0.01)
    os._exit(0)
time.sleep(0.1)
print("gone")
"""


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS) as shared:
        yield shared


def test_files_with_holes_do_not_break_the_next_run(sandbox):
    code = f"open('a', 'w').write('x')\nopen('b', 'wb').truncate({LIMITS.scratch_bytes - 1})"
    assert sandbox.run("print(1)", sandbox.run(code).files).output == "1\n"


def test_run_reads_given_files_and_returns_written_files(sandbox):
    code = "text = open('in/rows.csv').read()\nopen('out.txt', 'w').write(text.upper())\nprint(len(text))"
    result = sandbox.run(code, {"in/rows.csv": b"a,b\n"})
    assert (result.cause, result.output, result.exit_code) == ("", "4\n", 0)
    assert result.files == {"in/rows.csv": b"a,b\n", "out.txt": b"A,B\n"}
    assert sandbox.run("import os; print(os.listdir())").output == "[]\n"


def test_run_is_main_program_with_only_standard_library(sandbox):
    assert (
        sandbox.run("print(__name__, __file__); import json, sqlite3; exit(0)").output == "__main__ main.py\n"
    )
    for package in ("perilune", "numpy", "pytest"):
        assert "ModuleNotFoundError" in sandbox.run(f"import {package}").output
    result = sandbox.run("def f():\n    raise ValueError('no')\nf()")
    assert result.output.splitlines()[1:3] == ['  File "main.py", line 3, in <module>', "    f()"]
    assert (result.cause, result.exit_code) == ("error", 1)


def test_random_numbers_and_hashes_are_equal_in_every_run():
    code = "import random, os; print(random.random(), hash('text'), {'a', 'b', 'c'}, sorted(os.environ))"
    outputs = set()
    for _ in range(2):
        with Sandbox() as sandbox:
            outputs |= {sandbox.run(code).output, sandbox.run(code).output}
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("code", "cause", "output"),
    [
        ("import sys; sys.exit(3)", "error", ""),
        ("def", "error", "SyntaxError"),
        ("x = bytearray(10**10)", "memory", "MemoryError"),
        ("while True: pass", "timeout", ""),
        (f"{DEAF}import time; print('begun', flush=True); time.sleep(60)", "timeout", "begun"),
        ("import ctypes; ctypes.string_at(0)", "killed", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed", ""),
        (FORK_BOMB, "timeout", ""),
        ("with open('a', 'wb') as f: f.write(bytes(10 << 20))", "error", "No space left"),
        ("for i in range(10): open(str(i), 'wb').write(bytes(1 << 20))", "error", "No space left"),
        ("for i in range(99): open(str(i), 'wb')", "error", "Errno"),
        ("for i in range(10_000_000): print(i)", "output", "0\n1\n2\n"),
    ],
)  # fmt: skip
def test_run_ends_with_expected_cause(sandbox, code, cause, output):
    before = {"kept": b"x"}
    began = time.monotonic()
    result = sandbox.run(code, before)
    assert result.cause == cause and output in result.output
    assert time.monotonic() - began < LIMITS.seconds + 50
    assert len(result.output) <= LIMITS.output_bytes + 100
    if result.exit_code is None:
        assert result.files == before
    assert not list(descendants(sandbox.process_id))
    assert sandbox.run("print('well')").output == "well\n"  # the next run is not affected


def test_memory_limit_covers_all_processes():
    child = "if os.fork() == 0: x = b'x' * (50 << 20); time.sleep(9)"
    code = f"import os, time\nfor _ in range(3):\n {child}\ntime.sleep(9)"
    with Sandbox(replace(LIMITS, seconds=30)) as patient:
        assert patient.run(code).cause == "memory"


def test_daemon_process_ends_with_run(sandbox):
    assert sandbox.run(DAEMON).output == "gone\n"
    assert not list(descendants(sandbox.process_id))


@pytest.mark.parametrize("without", [[], ["namespaces"]])
def test_run_that_kills_parent_and_closes_output_is_stopped(without):
    """Without namespaces the code reaches its parent. It then keeps running without output."""
    code = "import os, time\nos.kill(os.getppid(), 9)\nos.closerange(0, 3)\ntime.sleep(60)"
    with Sandbox(LIMITS, without=without, allow_missing=["names"]) as sandbox:
        result = sandbox.run(code)
        assert result.cause in ("killed", "timeout") and result.seconds < LIMITS.seconds + 10
        assert not list(descendants(sandbox.process_id))
        assert sandbox.run("print('well')").output == "well\n"


def test_long_output_keeps_both_ends_and_number_of_bytes_cut(sandbox):
    result = sandbox.run("for i in range(20_000): print(i)")
    assert result.output.startswith("0\n1\n") and result.output.endswith("19998\n19999\n")
    assert re.search(r"\n\[\.\.\. [1-9]\d* bytes were cut \.\.\.\]\n", result.output) and not result.cause


@pytest.mark.parametrize("size", [0, 1, 49, 50, 51, 99, 100, 101, 150, 1000])
def test_output_does_not_depend_on_size_of_pieces(size):
    data = bytes(i % 251 for i in range(size))
    for piece in (1, 7, 1000):
        output = Output(100)
        for start in range(0, size, piece):
            output.add(data[start : start + piece])
        cut = max(size - 100, 0)
        assert output.cut == cut
        whole = data if not cut else data[:50] + b"\n[... %d bytes were cut ...]\n" % cut + data[-50:]
        assert output.text(is_complete=True) == whole


def test_run_returns_only_regular_files():
    code = """
import os
os.symlink('/dev/zero', 'endless'); os.mkfifo('fifo')
os.makedirs('a/b'); open('a/b/kept', 'w').write('x')
os.mkdir('closed'); os.chmod('closed', 0)
open(b'odd\\xff', 'w').close()
"""
    with Sandbox(LIMITS, without=["landlock"]) as sandbox:  # Landlock forbids making these files
        result = sandbox.run(code)
    assert dict(result.files) == {"a/b/kept": b"x"}, result.output


DEEP = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"


def test_deeply_nested_folder_is_removed_after_run(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(LIMITS, without=("namespaces",), allow_missing=tuple(WALLS)) as shared:
        shared.run(DEEP)
        assert shared.run("print('alive')").output == "alive\n"
    programs, ended = Programs(ProgramLimits(confined=False)), threading.Event()
    program = programs.start(["python", "-c", DEEP], Streams.of_text(""), {}, lambda ending: ended.set())
    assert ended.wait(20) and program.has_ended.is_set()
    programs.close()
    assert list(tmp_path.iterdir()) == []


HOPS = f"""
import os, time
{DEAF}
until = time.time() + 30
if os.fork(): time.sleep(0.1); os._exit(0)
while time.time() < until:
    if os.fork(): os._exit(0)
"""


def test_program_that_forks_and_exits_repeatedly_is_stopped():
    programs, ended = Programs(ProgramLimits(confined=False)), threading.Event()
    programs.start(["python", "-c", HOPS], Streams.of_text(""), {}, lambda ending: ended.set())
    assert ended.wait(15)
    programs.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_start_reports_modules_that_cannot_be_imported(has_ended):
    programs = Programs(ProgramLimits(confined=False), ["no_such_module"])
    if has_ended:
        programs._server.wait()
    with pytest.raises(RequestError, match="modules to preload cannot be imported: no_such_module"):
        programs.start(["python", "-c", ""], Streams.of_text(""), {}, lambda ending: None)
    programs.close()


def test_program_keeps_folder_until_exit():
    programs, endings = Programs(ProgramLimits(confined=False)), []
    (program_input, ours), ended = os.pipe(), threading.Event()
    with tempfile.TemporaryFile() as output:
        streams = Streams(program_input, os.dup(output.fileno()))
        code = "import os, sys; sys.stdin.read(); open('x', 'w').close(); print(os.listdir())"
        programs.start(["python", "-c", code], streams, {}, lambda end: (endings.append(end), ended.set()))
        os.close(ours)
        assert ended.wait(15)
    assert (endings[0].code, endings[0].output) == (0, "['x']\n"), endings
    programs.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../b", "", "nul\0"])
def test_run_rejects_file_names_outside_folder(sandbox, name):
    with pytest.raises(RequestError, match="not a valid file name"):
        sandbox.run("", {name: b""})


def test_run_fails_on_missing_wall_unless_allowed():
    with Sandbox(without=["seccomp"]) as sandbox:
        assert set(sandbox.capabilities().missing) >= {"kernel", "sockets"}
        assert sandbox.capabilities().reasons["seccomp"] == "switched off"
        with pytest.raises(RequestError, match=r"lacks walls of the .*kernel.*seccomp: switched off"):
            sandbox.run("print(1)")
    with Sandbox(without=["seccomp"], allow_missing=tuple(WALLS)) as sandbox:
        assert sandbox.run("print(1)").output == "1\n"
    with pytest.raises(RequestError, match="no wall 'moat'"):
        Sandbox(allow_missing=["moat"])


def test_killed_supervisor_fails_run_and_is_replaced():
    with Sandbox(LIMITS) as sandbox:
        sandbox.run("")
        os.kill(sandbox.process_id, signal.SIGKILL)
        with pytest.raises(SandboxFailedError, match="process"):
            sandbox.run("print(1)")
        assert sandbox.run("print(1)").output == "1\n"


def test_run_ends_when_owner_is_killed():
    script = (
        "import sys, threading, time\nfrom perilune.sandbox import Sandbox, SandboxLimits\n"
        "s = Sandbox(SandboxLimits(seconds=60)); s.run('')\n"
        "threading.Thread(target=s.run, args=('import time; time.sleep(60)',), daemon=True).start()\n"
        "print(s.process_id, s._supervisor._folder.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        process, folder = owner.stdout.readline().split()
        supervisor = int(process)
        until = time.monotonic() + 10
        while len(family := [supervisor, *descendants(supervisor)]) < 4:
            assert time.monotonic() < until, family
            time.sleep(0.05)
        owner.kill()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in family) or Path(folder).exists():
        assert time.monotonic() < until, family
        time.sleep(0.05)


def test_channel_removes_folder_of_killed_owner(tmp_path):
    script = (
        "import sys\nfrom perilune.sandbox.channel import Channel\n"
        "one = Channel('perilune.models.text.template_worker', 'it', 1000)\n"
        "print(one._folder.path, flush=True); sys.stdin.read()"
    )
    environment, pipe = {**os.environ, "TMPDIR": str(tmp_path)}, subprocess.PIPE

    def owner():
        started = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=pipe, stdout=pipe, text=True
        )
        return started, Path(started.stdout.readline().strip())

    (killed, first), (alive, second) = owner(), owner()
    killed.kill()
    killed.wait()
    assert first.is_dir()
    last, third = owner()
    assert not first.exists() and second.is_dir() and third.is_dir()
    for process in (alive, last):
        process.communicate("")
    assert not list(tmp_path.iterdir())
