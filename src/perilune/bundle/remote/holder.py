"""The holder: keeps files of an ended attempt in the machine's store, for the attempts after it.

Standard library only, Python 3.8 or newer, Linux. Perilune sends it over stdin after the runner and the
store, to execute the verbs `hold` and `keep_outputs`. `hold` prints {"held": [[path, size, sha256, mode],
...]}: the files of the checkpoints that only resuming needs (`STATE_PREFIX` in runner.py). "held" is None if
the attempt has no files on this machine. `keep_outputs` prints {"kept": bytes}. The next `receive` finds the
contents in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perilune.bundle.remote.runner import (
    STATE_PREFIX,
    Attempt,
    RefusedError,
    is_finished,
    is_running,
    main,
    read_json,
    sync_directory,
    write_durably,
)
from perilune.bundle.remote.store import SMALL_BYTES, Store, compute_digest, open_plain, plain_size


def hold(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Move the contents of the attempt's checkpoints to the store.

    Does nothing for a succeeded attempt, unless it was lost (`--lost`), so that its result does not count.
    The list is written before the first file moves, so a second call completes a call that was killed.
    """
    if not attempt.run.exists():
        return {"held": None}
    with attempt.lock():
        claim = attempt.claim()
        if claim is not None and is_running(attempt, claim) is not False:
            raise RefusedError("the attempt still runs")
        known = read_json(attempt.held)
        if known is None:
            if not attempt.files.is_dir():
                return {"held": None}
            if not options.lost and (attempt.result() or {"cause": "none"})["cause"] == "":
                return {"held": []}
            known = {"files": list_checkpoint_files(attempt.files)}
            if known["files"]:
                write_durably(attempt.held, json.dumps(known).encode())
                sync_directory(attempt.run)
        store = Store(attempt.run.parent / "store.sha256", options.share)
        for path, size, sha256, _ in known["files"]:
            move_to_store(attempt.files / path, size, sha256, store)
        sync_directory(store.folder)
        return {"held": known["files"]}


def move_to_store(source: Path, size: int, sha256: str, store: Store) -> bool:
    """Move a file of this size to the store; False if there is no such file, or the store has its content."""
    missing = plain_size(source) == size and plain_size(store.entry(sha256)) != size
    if missing:
        os.utime(str(source))  # the store evicts the least recently used
        source.replace(store.entry(sha256))
    return missing


def keep_outputs(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Move the outputs of a succeeded attempt to the store, because later stages may take them as inputs.

    Digests are those of the manifest: the store verifies every content when it is read.
    """
    with attempt.lock():
        if (attempt.result() or {"cause": "none"})["cause"] != "":
            return {"kept": 0}
        store = Store(attempt.run.parent / "store.sha256", options.share)
        kept = 0
        for source, size, sha256 in list_outputs(attempt.files / "artifacts"):
            if kept + size <= store.max_bytes:
                kept += size * move_to_store(source, size, sha256, store)
        sync_directory(store.folder)
        return {"kept": kept}


def list_outputs(artifacts: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield path, size and SHA-256 of the large files in the manifest, without checkpoints for resuming.

    The manifest is untrusted, because a task could have written it.
    """
    root = Path(os.path.realpath(str(artifacts)))
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # malformed
        for path, entry in sorted((read_json(root / "manifest.json") or {})["files"].items()):
            source, size, sha256 = root / path, int(entry["size"]), str(entry["sha256"])
            inside = os.path.realpath(str(source)) == str(source) and root in source.parents
            resuming = f"artifacts/{path}".startswith(STATE_PREFIX)
            if inside and not resuming and size > SMALL_BYTES and re.fullmatch("[0-9a-f]{64}", sha256):
                yield source, size, sha256


def list_checkpoint_files(root: Path) -> list[list[Any]]:
    """Return path, size, SHA-256 and mode of each plain file of the complete checkpoints."""
    files = []
    for folder, folders, names in os.walk(str(root / STATE_PREFIX.rpartition("/")[0])):
        folders[:] = [name for name in folders if is_finished(name)]
        for path in (Path(folder, name) for name in names):
            relative = path.relative_to(root).as_posix()
            status = path.lstat()
            if relative.startswith(STATE_PREFIX) and stat.S_ISREG(status.st_mode):
                with open_plain(path, os.O_RDONLY) as file:
                    mode = f"{stat.S_IMODE(status.st_mode):04o}"
                    files.append([relative, status.st_size, compute_digest(file), mode])
    return sorted(files)


if __name__ == "__main__":
    sys.exit(main(hold, keep_outputs))
