"""Runs code in a confined process, with the rights of code that took over a scorer. Used by the audit."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import perilune
from perilune.sandbox.confinement import confine, forbid_processes
from perilune.sandbox.folders import OwnedFolder
from perilune.sandbox.limits import SandboxLimits
from perilune.sandbox.sandbox import Execution

_START = """
import json, sys
sys.path.append(sys.argv[1])
from perilune.sandbox.confined_run import main
main()
"""


def run_confined(code: str, limits: SandboxLimits) -> Execution:
    """Run `code` in a confined process, which is killed `limits.seconds` + 20 s after its start."""
    package = str(Path(perilune.__file__).parents[1])
    began = time.monotonic()
    with ExitStack() as stack:
        folder = OwnedFolder("perilune-confined-")
        stack.callback(folder.remove)
        command = [sys.executable, "-P", "-s", "-B", "-c", _START, package]
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=same, cwd=folder.path, env={})
        opening = json.dumps([code, limits.memory_bytes, limits.open_files])
        try:
            output, cause = process.communicate(opening.encode(), limits.seconds + 20)[0], ""
        except subprocess.TimeoutExpired:
            process.kill()
            output, cause = process.communicate()[0], "timeout"
    ended, seconds = process.returncode, time.monotonic() - began
    text = output[-limits.flood_bytes :].decode(errors="replace")
    if ended < 0:
        return Execution(cause or "killed", None, -ended, text, seconds)
    return Execution("error" if ended else "", ended, None, text, seconds)


def main() -> None:
    """Read the code, confine this process, and run the code."""
    code, memory_bytes, open_files = json.load(sys.stdin)
    confine(memory_bytes=memory_bytes, open_files=open_files)
    forbid_processes()
    exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})  # noqa: S102  # what it is for
