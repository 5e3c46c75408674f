"""Probes that try to read."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def secrets(facts: Mapping[str, Any]) -> Attempts:
    """Read files of the sandbox's owner and of other users."""
    import os
    from pathlib import Path

    def through_a_link() -> str:
        os.symlink(facts["public_file"], "link")  # noqa: PTH211
        return Path("link").read_text()

    return {
        "a file that everybody may read": lambda: Path(facts["public_file"]).read_text(),
        "a file of the owner's own": lambda: Path(facts["private_file"]).read_text(),
        "through a link in the scratch folder": through_a_link,
        "password hashes": lambda: Path("/etc/shadow").read_text()[:20],
        "keys": lambda: os.listdir(facts["home"] + "/.ssh"),  # noqa: PTH208
    }


def project(facts: Mapping[str, Any]) -> Attempts:
    """Read files that may contain answers: this package and the packages installed beside it."""
    import importlib
    import os
    import sys
    from pathlib import Path

    def imported() -> str:
        for path in (facts["package_root"], facts["packages"]):
            sys.path.append(path)
        return str(importlib.import_module("perilune").__file__)

    return {
        "source of the project": lambda: Path(facts["project"]).read_text()[:20],
        "import it": imported,
        "installed packages": lambda: os.listdir(facts["packages"])[:3],  # noqa: PTH208
    }


def memory(facts: Mapping[str, Any]) -> Attempts:
    """Read memory of other processes."""
    import ctypes
    import os

    def mapped(process: int) -> bytes:
        with open(f"/proc/{process}/maps", "rb") as maps:  # noqa: PTH123
            start = int(maps.readline().split(b"-")[0], 16)
        with open(f"/proc/{process}/mem", "rb") as memory:  # noqa: PTH123
            memory.seek(start)
            return memory.read(4)

    def by_call(process: int) -> int:
        room = ctypes.create_string_buffer(8)
        area = (ctypes.c_size_t * 2)(ctypes.addressof(room), 8)
        libc = ctypes.CDLL(None, use_errno=True)
        read = libc.process_vm_readv(process, area, 1, (ctypes.c_size_t * 2)(facts["address"], 8), 1, 0)
        if read < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(read)

    return {
        "of the owner": lambda: mapped(facts["owner"]),
        "of the parent": lambda: mapped(os.getppid()),
        "of the owner, by a call": lambda: by_call(facts["owner"]),
    }


def descriptors(facts: Mapping[str, Any]) -> Attempts:
    """Use descriptors that were open at the start."""
    import os
    import stat

    def beyond_standard() -> list[int]:
        numbers = []
        for number in range(3, 1024):
            try:
                os.fstat(number)
            except OSError:
                continue
            numbers.append(number)
        return numbers

    return {
        "beyond the standard three": beyond_standard,
        "the bait": lambda: os.pread(facts["descriptor"], 100, 0),
        "a terminal": lambda: os.open("/dev/tty", os.O_RDWR),
        "standard input": lambda: not stat.S_ISCHR(os.fstat(0).st_mode) and "it is no device",
    }


def run_before(facts: Mapping[str, Any]) -> Attempts:
    """Read what the previous run left behind."""
    import gc
    import os

    wanted = facts["left_behind"][::-1]  # so that it does not find itself

    def remembered() -> int:
        dictionaries = [item for item in gc.get_objects() if type(item) is dict]
        texts = [text for item in dictionaries for text in list(item.values()) if isinstance(text, str)]
        return sum(wanted in text for text in texts)

    return {
        "files": lambda: [name for name in os.listdir() if name == "left_behind"],  # noqa: PTH208
        "memory": remembered,
    }
