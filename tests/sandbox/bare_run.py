"""Runs a probe as an ordinary script, without a sandbox."""

import subprocess
import sys
import tempfile
from pathlib import Path

from perilune.sandbox import Execution


def bare_run(code: str) -> Execution:
    """Runs the code in a plain process that inherits this process's environment and file descriptors."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            close_fds=False,
            timeout=60,
            check=False,
        )
        output = ended.stdout.decode(errors="replace")
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    return Execution("error" if ended.returncode else "", ended.returncode, None, output, 0.0, files)
