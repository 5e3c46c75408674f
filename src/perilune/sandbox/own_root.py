"""A separate file system with Python's library, a few devices, an empty scratch folder and nothing else."""

import os
import sys
from pathlib import Path

from perilune.sandbox.kernel import (
    BIND,
    NO_DEVICES,
    NO_SETUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    enter_root,
    mount,
)

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # /dev/zero provides uncounted memory
_FOREIGN = ("site-packages", "dist-packages")  # installed packages, which could reveal answers
_ROOT_SIZE = "size=1m,nr_inodes=4k,mode=755"


def library_folders() -> list[str]:
    """Return the folders of Python's own library, without installed packages."""
    folders = {str(Path(os.__file__).resolve().parent)}
    folders |= {str(Path(path).resolve()) for path in sys.path if (Path(path) / "lib-dynload").is_dir()}
    return sorted(folders)


def shared_libraries() -> list[str]:
    """Return paths of shared libraries that Python's extension modules load, and of time zone data."""
    architecture = getattr(sys.implementation, "_multiarch", "")
    paths = [f"/usr/lib/{architecture}" if architecture else "/usr/lib", "/lib", "/lib64", "/usr/lib64"]
    if sys.base_prefix not in ("/usr", "/usr/local"):
        paths += map(str, Path(sys.base_prefix, "lib").glob("*.so*"))
    paths += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [path for path in paths if Path(path).exists()]


def readable_paths() -> list[str]:
    """Return the files that may be read if the host's file system stays visible."""
    own = [
        str(item) for path in library_folders() for item in Path(path).iterdir() if item.name not in _FOREIGN
    ]
    return [*own, *shared_libraries(), *DEVICES]


def enter_own_root(folder: str, scratch_bytes: int, scratch_files: int) -> None:
    """Make `folder` the root of a new file system and enter it. Needs its own mount namespace.

    Raises:
        OSError: if the kernel refuses a step.
    """
    mount("", "/", flags=RECURSIVE | PRIVATE)
    mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_DEVICES, _ROOT_SIZE)
    for path in [*library_folders(), *shared_libraries(), *DEVICES]:
        _bind(path, folder)
    for path in library_folders():
        for hidden in _FOREIGN:
            if Path(folder + path, hidden).is_dir():
                mount("tmpfs", f"{folder}{path}/{hidden}", "tmpfs", READ_ONLY | NO_SETUID, "size=4k,mode=755")
    Path(folder + SCRATCH).mkdir()
    size = f"size={scratch_bytes},nr_inodes={scratch_files + 1},mode=777"
    mount("tmpfs", folder + SCRATCH, "tmpfs", NO_SETUID | NO_DEVICES, size)
    enter_root(folder)
    mount("", "/", flags=REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)
    os.chdir(SCRATCH)


def _bind(place: str, folder: str) -> None:
    source, target = Path(place), Path(folder + place)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and source.is_dir():  # /lib is a link to usr/lib
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    mount(place, str(target), flags=BIND | RECURSIVE)
    # A mount from outside the user namespace must keep its restrictions.
    kept = os.statvfs(target).f_flag
    allowed = 0 if place in DEVICES else NO_DEVICES
    mount("", str(target), flags=REMOUNT | BIND | READ_ONLY | NO_SETUID | allowed | _as_mount_flags(kept))


def _as_mount_flags(flags: int) -> int:
    """Convert flags of statvfs(3), such as nosuid and noexec, to those of mount(2)."""
    return flags & (2 | 4 | 8 | 1024 | 2048) | (1 << 21 if flags & 4096 else 0)
