"""The checkpoints of an attempt that its machine keeps, so that the next attempt there resumes from them.

The list of these checkpoints is in a file beside the attempt's directory. Their contents are in the machine's
store. If the store evicts them, the next attempt starts from the beginning.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.bundle.digest import Entry
from perilune.bundle.remote.runner import STATE_PREFIX
from perilune.execution.placements.upload import Upload
from perilune.files import canonical_json, is_inside_root, read_json, read_json_lines, write_atomic

CHECKPOINT = "checkpoint"  # kind of the event that a task records after it has written a checkpoint


def parse_held(listed: Any) -> list[Entry]:
    """Return the entries of a machine's list, which is not trusted.

    Raises:
        ValueError, TypeError: the list is malformed, or names a file outside the checkpoints for resuming.
    """
    entries = [Entry(str(path), int(size), str(sha), str(mode)) for path, size, sha, mode in listed]
    for entry in entries:
        if not is_inside_root(entry.path) or not entry.path.startswith(STATE_PREFIX) or entry.size < 0:
            raise ValueError(f"the machine lists {entry.path[:200]!r}, which is not in a checkpoint")
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256) or not re.fullmatch("[0-7]{4}", entry.mode):
            raise ValueError(f"the machine lists {entry.path[:200]!r} with a malformed digest or mode")
    return entries


def write_held(attempt: Path, entries: Sequence[Entry]) -> None:
    """Record which checkpoints of the attempt in `attempt` its machine keeps."""
    if entries:
        write_atomic(_held_path(attempt), canonical_json(entries))
    else:
        _held_path(attempt).unlink(missing_ok=True)


def read_held(attempt: Path) -> list[Entry]:
    """Return the recorded entries; empty if there are none."""
    return parse_held(read_json(_held_path(attempt))) if _held_path(attempt).exists() else []


def find_restart_reason(previous: Path | None, upload: Upload) -> str:
    """Return why an attempt cannot resume from the previous one's checkpoint; "" if it can or has none."""
    events = None if previous is None else previous / "runtime" / "events.jsonl"
    if events is None or not events.exists():
        return ""
    steps = [line.get("step") for line in read_json_lines(events) if line.get("kind") == CHECKPOINT]
    if not steps or any(entry.path.startswith(STATE_PREFIX) for entry in upload.entries):
        return ""
    return (
        f"the attempt starts from the beginning, because the checkpoint of step {steps[-1]} was only on the"
        " machine of the previous attempt (`bring: all` in the template copies such checkpoints home)"
    )


def _held_path(attempt: Path) -> Path:
    return attempt.with_name(f"{attempt.name}.held.json")
