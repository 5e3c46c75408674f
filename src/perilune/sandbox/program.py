"""Runs a text as Python's main program in a confined process."""

import atexit
import builtins
import linecache
import os
import random
import sys
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from perilune.sandbox.own_root import library_folders

NAME = "main.py"  # in tracebacks


def run_program(code: str) -> NoReturn:
    """Run `code` as `python main.py` would, and exit with its exit code.

    For reproducible runs, `random` starts at seed 0.
    """
    _hide_package()
    os.environ.clear()
    here = str(Path.cwd())
    os.environ |= {"HOME": here, "LANG": "C.UTF-8", "TMPDIR": here, "TZ": "UTC"}
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = [NAME]
    sys.path.insert(0, here)
    random.seed(0)
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    os._exit(_exit_code(code))


def _exit_code(code: str) -> int:
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = NAME
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(code, NAME, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  # what it is for
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
        atexit._run_exitfuncs()
    except SystemExit as leaving:
        status = _as_exit_code(leaving.code)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _as_exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _hide_package() -> None:
    """Hide this package: from here on only Python's own library can be imported."""
    library = library_folders()
    sys.path[:] = [path for path in sys.path if any(path.startswith(folder) for folder in library)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "perilune"]:
        del sys.modules[name]
