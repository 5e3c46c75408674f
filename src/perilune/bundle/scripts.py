"""scripts/: the files of a bundle that a machine with only Python needs to run it."""

import shlex
from functools import cache
from importlib.resources import files
from pathlib import Path

from perilune.bundle.job import Job
from perilune.bundle.lock import requirements_lock
from perilune.bundle.storage import READ_ONLY
from perilune.bundle.wheel import build_wheel

EXECUTABLE = 0o555


@cache
def remote_source(name: str) -> bytes:
    """Return the source of `name` in perilune/bundle/remote, which runs on machines without perilune."""
    return (files("perilune.bundle") / "remote" / name).read_bytes()


def write_scripts(job: Job, directory: Path) -> None:
    """Write the runner and its helpers, requirements.lock and the perilune wheel."""
    redaction = (files("perilune") / "redaction.py").read_bytes()
    name, wheel = build_wheel()
    entrypoint = remote_source("entrypoint.sh").decode()
    scripts = {
        "runner.py": remote_source("runner.py"),
        "redaction.py": redaction,
        "entrypoint.sh": entrypoint.replace("@COMMAND@", shlex.join(job.entrypoint)).encode(),
        "bootstrap.py": remote_source("bootstrap.py"),
        "requirements.lock": requirements_lock(job.task).encode(),
        name: wheel,
    }
    for script, data in scripts.items():
        path = directory / script
        path.write_bytes(data)
        path.chmod(EXECUTABLE if script == "entrypoint.sh" else READ_ONLY)
