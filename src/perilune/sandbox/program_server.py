"""The process that starts programs: it imports their shared modules once, and forks a keeper per program.

Standard input is a socket. Each line is a request to start a program (`perilune.sandbox.programs`), with
descriptors for its input, output, errors and the keeper's report, and is answered by {"keeper": process}
before the next one is sent. A keeper runs the program as its child, ends all processes that the
program leaves behind, and reports how it ended. Signal TERM to a keeper ends its program.
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perilune.sandbox import kernel
from perilune.sandbox.control_socket import read_requests
from perilune.sandbox.landlock import restrict_files
from perilune.sandbox.limits import lower_limit
from perilune.sandbox.watch import descendants

DESCRIPTORS = 4  # input, output, errors, report
_OPEN_FILES = 256


def main(preload: Sequence[str]) -> None:
    """Import the modules of `preload`, and serve requests until the socket closes."""
    kernel.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for name in preload:
        importlib.import_module(name)
    for request, descriptors in read_requests(control, DESCRIPTORS):
        keeper = os.fork()
        if keeper == 0:
            control.close()
            _run_and_report(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(json.dumps({"keeper": keeper}).encode() + b"\n")


def _run_and_report(
    request: Mapping[str, Any], given: int, output: int, errors: int, report: int
) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.die_with_parent(signal.SIGTERM)  # not KILL, so that it still ends the program's processes
    kernel.adopt_orphans()
    program = os.fork()
    if program == 0:
        os.close(report)
        _run_program(request, given, output, errors)
    signal.signal(signal.SIGTERM, lambda *_: _end(program))
    for descriptor in (given, output, errors):
        os.close(descriptor)
    _, status = os.waitpid(program, 0)
    while left := list(descendants(os.getpid())):
        for process in left:
            _end_group(process)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # more may be forked, so do not wait for the last
                pass
    os.write(report, json.dumps({"status": status}).encode())
    os._exit(0)


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _end_group(process: int) -> None:
    """Kill a process and its group at once, so that it cannot fork in between."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(process)
        os.kill(process if group == os.getpgrp() else -group, signal.SIGKILL)


def _run_program(request: Mapping[str, Any], given: int, output: int, errors: int) -> NoReturn:
    """Give up all rights that the program must not have, and run it in this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.setsid()
        for number, descriptor in enumerate((given, output, errors)):
            os.dup2(descriptor, number)
        os.closerange(3, _OPEN_FILES)
        os.chdir(request["folder"])
        _apply_limits(request)
        os.environ.clear()
        os.environ.update(request["variables"])
        command = request["command"]
        if request["is_preloaded"]:
            _run_python(command[1:])
        os.execve(command[0], command, dict(os.environ))  # noqa: S606  # there is no shell
    except Exception as error:
        os.write(2, f"the program cannot start: {type(error).__name__}: {error}\n".encode())
    os._exit(127)


def _apply_limits(request: Mapping[str, Any]) -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_AS, request["memory_bytes"]),
    ):
        lower_limit(kind, value)
    kernel.drop_privileges()
    kernel.die_with_parent()
    if request["readable"] is not None:
        writable = [request["folder"], os.devnull]
        restrict_files(request["readable"], writable, programs=True, port=request["port"])


def _run_python(arguments: Sequence[str]) -> NoReturn:
    """Run a script or `-m module` as `python` would, with the modules that are imported already."""
    is_module = arguments[0] == "-m"
    name, rest = (arguments[1], arguments[2:]) if is_module else (arguments[0], arguments[1:])
    sys.argv = [name, *rest]
    # New streams, because the old ones remember what the server's descriptors were.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(name).parent))
    code = 0
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
