"""Temporary folders that are removed even if their owner is killed, with whatever untrusted code wrote."""

import fcntl
import os
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

_OWNED = ".owned"  # suffix of a folder that its owner locks


class OwnedFolder:
    """A new temporary folder. If this process is killed, the next one that creates such a folder removes it.

    The owner holds a lock on the folder, which the kernel releases when the owner dies.

    Args:
        parent: folder in which to create it; by default the folder for temporary files.

    Attributes:
        path: the folder.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent, prefix)
        unlocked = tempfile.mkdtemp(prefix=prefix, dir=parent)
        lock = os.open(unlocked, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = str(Path(unlocked).rename(unlocked + _OWNED))
        self._end = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Remove the folder. May be called repeatedly, and is called at the end of the process."""
        self._end()


def _remove(path: str, lock: int) -> None:
    remove_folder(path)
    os.close(lock)


@cache
def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of this user whose owner has died. Other users may create entries beside them."""
    for path in parent.glob(f"{prefix}*{_OWNED}"):
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder).st_uid == os.geteuid():
                    remove_folder(str(path))
            finally:
                os.close(folder)


def remove_folder(path: str) -> None:
    """Remove a folder and its content as far as possible. No process may still use it.

    Every folder inside is moved up first, so neither recursion nor the length of a path limits the depth.
    """
    pending, moved = [Path(path)], 0
    while pending:
        folder = pending.pop()
        entries: list[Path] = []
        with suppress(OSError):
            folder.chmod(0o700)
            entries = [*folder.iterdir()]
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    moved += 1
                    entry.chmod(0o700)  # else its owner may not move it
                    pending.append(entry.rename(f"{path}.{moved}"))
                else:
                    entry.unlink()
        with suppress(OSError):
            folder.rmdir()
