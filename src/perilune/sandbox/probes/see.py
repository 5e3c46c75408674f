"""Probes that try to see the host."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def processes(facts: Mapping[str, Any]) -> Attempts:
    """See processes of the host."""
    import os

    bait = str(facts["victim"])
    return {
        "list /proc": lambda: bait in os.listdir("/proc") and f"process {bait} is listed",  # noqa: PTH208
        "look a process up": lambda: os.stat(f"/proc/{bait}") and f"/proc/{bait} is there",  # noqa: PTH116
        "session of a process": lambda: os.getsid(int(bait)),
    }


def environment(facts: Mapping[str, Any]) -> Attempts:
    """See environment variables of the sandbox's owner."""
    import os
    from pathlib import Path

    def variables(process: object) -> bool:
        return facts["secret"] in Path(f"/proc/{process}/environ").read_text(errors="replace")

    return {
        "own variables": lambda: [name for name, value in os.environ.items() if facts["secret"] in value],
        "as it was started": lambda: variables("self"),
        "of the owner": lambda: variables(facts["owner"]),
        "of the parent": lambda: variables(os.getppid()),
    }


def files(facts: Mapping[str, Any]) -> Attempts:
    """See which files the host has, readable or not."""
    import os

    def listed(folder: str) -> str:
        """Return the entries of a folder, except the path to Python's library."""
        names = os.listdir(folder)  # noqa: PTH208
        return ", ".join([name for name in names if not os.__file__.startswith(f"{folder}/{name}/")][:5])

    return {
        "that a file is there": lambda: os.stat(facts["public_file"]) and facts["public_file"],  # noqa: PTH116
        "list the folder of a secret": lambda: listed(os.path.dirname(facts["public_file"])),  # noqa: PTH120
        "list the home folder": lambda: listed(facts["home"]),
        "that the project is there": lambda: os.stat(facts["project"]) and facts["project"],  # noqa: PTH116
    }


def host(facts: Mapping[str, Any]) -> Attempts:
    """See mounts, users and the name of the host."""
    import os
    from pathlib import Path

    return {
        "mounts": lambda: len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "users": lambda: len(Path("/etc/passwd").read_text().splitlines()),
        "name": lambda: os.uname().nodename == facts["host"] and facts["host"],
        "command line of process 1": lambda: Path("/proc/1/cmdline").read_bytes(),
    }
