"""The holder: keeps the checkpoints of an ended attempt in the machine's store, for the next attempt.

Standard library only, Python 3.8 or newer, Linux. Perilune sends it over stdin after the runner and the
store, to execute the runner's verb `hold`. It prints {"held": [[path, size, sha256, mode], ...]}: the files
of the checkpoints that only resuming needs (see `stays` in runner.py). The next `receive` finds their
contents in the store. "held" is None if the attempt has no files on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from perilune.bundle.remote.runner import (
    STATES,
    Attempt,
    RefusedError,
    finished,
    main,
    read_json,
    runs,
    sync_directory,
    write_durably,
)
from perilune.bundle.remote.store import Store, digest_of, open_plain, plain_size


def hold(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Move the contents of the attempt's checkpoints to the store.

    An attempt that succeeded needs this only if it was lost (`--lost`), so that its result does not count.
    The list is written before the first file moves, so a second call completes a call that was killed.
    """
    with attempt.lock():
        claim = attempt.claim()
        if claim is not None and runs(attempt, claim) is not False:
            raise RefusedError("the attempt still runs")
        known = read_json(attempt.held)
        if known is None:
            if not attempt.files.is_dir():
                return {"held": None}
            if not options.lost and (attempt.result() or {"cause": "none"})["cause"] == "":
                return {"held": []}
            known = {"files": described(attempt.files)}
            if known["files"]:
                write_durably(attempt.held, json.dumps(known).encode())
                sync_directory(attempt.run)
        store = Store(attempt.run.parent / "store.sha256", options.share)
        for path, size, sha256, _ in known["files"]:
            source = attempt.files / path
            if plain_size(source) == size and plain_size(store.entry(sha256)) != size:
                os.utime(str(source))  # the store evicts the least recently used
                source.replace(store.entry(sha256))
        sync_directory(store.folder)
        return {"held": known["files"]}


def described(root: Path) -> list[list[Any]]:
    """Path, size, SHA-256 and mode of each plain file of the complete checkpoints."""
    found = []
    for folder, folders, names in os.walk(str(root / STATES.rpartition("/")[0])):
        folders[:] = [name for name in folders if finished(name)]
        for path in (Path(folder, name) for name in names):
            relative = path.relative_to(root).as_posix()
            status = path.lstat()
            if relative.startswith(STATES) and stat.S_ISREG(status.st_mode):
                with open_plain(path, os.O_RDONLY) as file:
                    mode = f"{stat.S_IMODE(status.st_mode):04o}"
                    found.append([relative, status.st_size, digest_of(file), mode])
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main(hold))
