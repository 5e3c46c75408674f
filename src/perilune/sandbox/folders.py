"""Removes folders that untrusted code has filled."""

from contextlib import suppress
from pathlib import Path


def remove_folder(path: str) -> None:
    """Remove a folder with all it contains, as far as possible. No process may use it any more.

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
