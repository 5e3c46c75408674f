"""Turns any exception into one message on stderr and an exit code."""

import errno
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from perilune.cli.commands import use_program_command
from perilune.cli.output import format_for_terminal
from perilune.errors import PeriluneError, RequestError, UserInterruptError, WorkFailedError
from perilune.redaction import redact_text

STORAGE_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)


def report_failure(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Print `error` to stderr, as a message or as one line of JSON, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        _detach_stdout()
        return 1
    if debug:
        traceback.print_exception(error)
    explained = _explain(error, debug=debug)
    if as_json:
        others = {"others": [_texts(other) for other in explained.others]} if explained.others else {}
        document = {**_texts(explained), **others, "exit_code": explained.exit_code}
        sys.stderr.write(json.dumps(document) + "\n")
    else:
        sys.stderr.write(format_for_terminal(f"error: {explained}") + "\n")
    return explained.exit_code


def _texts(error: PeriluneError) -> dict[str, str]:
    fields = {"error": error.what, "where": error.where, "remedy": error.remedy}
    return {key: use_program_command(redact_text(text)) for key, text in fields.items()}


def _explain(error: BaseException, *, debug: bool) -> PeriluneError:
    """Return an exception as the user's error."""
    if isinstance(error, KeyboardInterrupt):
        return UserInterruptError("interrupted")
    if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        error = _storage_error(error)
    if "pydantic" in sys.modules:
        error = _validation_error(error)
    if isinstance(error, PeriluneError):
        return error
    if hasattr(error, "format_message"):  # of the parser: a wrong option or argument
        context = getattr(error, "ctx", None)
        remedy = f"{context.command_path} -h" if context else ""
        return RequestError(error.format_message(), remedy=remedy)
    saved = "" if debug else f"\n  the traceback is in {_save_traceback(error)}; --debug prints it"
    return WorkFailedError(f"unexpected {type(error).__name__}: {error}{saved}")


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

    from perilune.frozen import invalid_value

    if not isinstance(error, ValidationError):
        return error
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return RequestError(f"{invalid_value(error).what}{more}", where=error.title)


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
