"""Probes that try to write."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def folders(facts: Mapping[str, Any]) -> Attempts:
    """Write to folders outside the scratch folder."""
    import os
    import sysconfig
    from pathlib import Path

    def written(folder: object) -> str:
        path = Path(str(folder), "perilune-audit-probe")
        path.write_text("x")
        path.unlink()
        return str(path)

    places = {
        "temporary files": "/tmp",  # noqa: S108
        "shared memory": "/dev/shm",  # noqa: S108
        "home": facts["home"],
        "beside the scratch folder": Path.cwd().parent,
        "Python's library": os.path.dirname(os.__file__),  # noqa: PTH120
        "installed packages": facts["packages"],
        "programs": sysconfig.get_path("scripts"),
        "folder of the bait": os.path.dirname(facts["public_file"]),  # noqa: PTH120
        "root": "/",
    }
    return {name: lambda path=path: written(path) for name, path in places.items()}  # type: ignore[misc]


def existing_files(facts: Mapping[str, Any]) -> Attempts:
    """Change existing files."""
    import os
    from pathlib import Path

    def changed(path: str) -> str:
        with open(path, "ab"):  # noqa: PTH123
            return path

    def done(call: Callable[..., object], *arguments: Any) -> str:
        call(*arguments)
        return f"{call.__name__} was allowed"

    def linked() -> str:
        Path("hard").hardlink_to(facts["public_file"])
        return "a second name for it"

    return {
        "the bait": lambda: changed(facts["public_file"]),
        "its times": lambda: done(os.utime, facts["public_file"]),
        "its permissions": lambda: done(os.chmod, facts["public_file"], 0o644),
        "another name for it": linked,
        "code of Python's library": lambda: changed(os.__file__),
    }


def devices(facts: Mapping[str, Any]) -> Attempts:
    """Write to devices and to kernel settings."""
    import os
    import stat

    def made() -> str:
        os.mknod("device", 0o600 | stat.S_IFCHR, os.makedev(1, 11))
        os.unlink("device")  # noqa: PTH108
        return "made one"

    def opened(path: str) -> str:
        os.close(os.open(path, os.O_WRONLY))
        return path

    return {
        "make one": made,
        "the kernel's log": lambda: opened("/dev/kmsg"),
        "memory": lambda: opened("/dev/mem"),
        "settings of the kernel": lambda: opened("/proc/sys/kernel/hostname"),
        "the terminal": lambda: opened("/dev/tty"),
        "control groups, version 1": lambda: opened("/sys/fs/cgroup/memory/cgroup.procs"),
        "control groups, version 2": lambda: opened("/sys/fs/cgroup/cgroup.procs"),
    }
