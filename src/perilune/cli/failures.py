"""Turns any exception into one message on stderr and an exit code."""

import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from perilune.cli.output import format_for_terminal
from perilune.errors import PeriluneError, RequestError
from perilune.redaction import redact_text

STORAGE_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)


def report_failure(error: BaseException, *, debug: bool) -> int:
    """Print `error` to stderr and return the exit code."""
    if isinstance(error, BrokenPipeError):
        _detach_stdout()
        return 1
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        _print_error("error: interrupted")
        return 2
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        error = _storage_error(error)
    if "pydantic" in sys.modules:
        error = _validation_error(error)
    if isinstance(error, PeriluneError):
        _print_error(f"error: {error}")
        return error.exit_code
    saved = "" if debug else f"\n  the traceback is in {_save_traceback(error)}; --debug prints it"
    _print_error(f"error: unexpected {type(error).__name__}: {error}{saved}")
    return 1


def flush_stdout() -> int:
    """Flush stdout; returns the exit code if that fails, else 0."""
    try:
        sys.stdout.flush()
    except OSError as error:
        code = report_failure(error, debug=False)
        _detach_stdout()  # otherwise the interpreter flushes again and prints its own error
        return code
    return 0


def _storage_error(error: OSError) -> PeriluneError:
    from perilune.bundle.storage import storage_errors

    try:
        with storage_errors("continue", Path("a file or standard output")):
            raise error
    except PeriluneError as explained:
        return explained


def _validation_error(error: BaseException) -> BaseException:
    """Return a validation error of pydantic as a `RequestError` that names the model and the key."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return error
    first, *others = error.errors(include_url=False)
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    return RequestError(f"{first['msg']}{more}", where=f"{error.title}: {key}" if key else error.title)


def _print_error(message: str) -> None:
    sys.stderr.write(format_for_terminal(message) + "\n")


def _save_traceback(error: BaseException) -> Path:
    """Write the traceback to a file that only this user can read."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    descriptor, name = tempfile.mkstemp(prefix=f"perilune-{stamp}-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        file.write(redact_text("".join(traceback.format_exception(error))))
    return Path(name)


def _detach_stdout() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
