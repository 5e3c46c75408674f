"""Whatever went wrong, as one message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from perilune.errors import PeriluneError

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended

_ROOM = "free some space, or set PERILUNE_HOME to a disk that has more"
_WRITABLE = "check the owner, or set PERILUNE_HOME to a folder you may write to"
_MACHINE = {
    errno.ENOSPC: ("no space is left on the disk", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EACCES: ("permission denied", _WRITABLE),
    errno.EPERM: ("operation not permitted", _WRITABLE),
    errno.EROFS: ("the file system is read-only", _WRITABLE),
    errno.ENOTDIR: ("a part of the path is not a folder", _WRITABLE),
}


def explain(error: BaseException, *, debug: bool) -> int:
    """Tell the user about `error` on stderr; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        _detach_stdout()
        return 1
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, PeriluneError):
        _say(f"error: {error}")
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _MACHINE:
        what, remedy = _MACHINE[error.errno]
        _say(f"error: {PeriluneError(what, where=str(error.filename or 'disk'), remedy=remedy)}")
        return 2
    saved = "" if debug else f"\n  the traceback is in {_save_traceback(error)}; --debug shows it here"
    _say(f"error: unexpected {type(error).__name__}: {error}{saved}")
    return 1


def _say(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(message + "\n")


def _save_traceback(error: BaseException) -> Path:
    """Write the traceback where it survives the terminal, in a file only this user reads."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    descriptor, name = tempfile.mkstemp(prefix=f"perilune-{stamp}-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        traceback.print_exception(error, file=file)
    return Path(name)


def _detach_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
