"""Errors for users: what happened, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

REPORT_BUG = "report this as a bug in Perilune; the recipe did not cause it"
"""Remedy of errors that only a defect of the code can cause."""


class PeriluneError(Exception):
    """An expected failure, shown to the user as one message without a traceback.

    Args:
        what: what is wrong, with the value.
        where: file, line and key, or stage and run.
        remedy: what the user can do.
        others: further failures of the same request, shown after this one.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", remedy: str = "", others: Sequence[PeriluneError] = ()
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy
        self.others = others

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        lines += [f"also: {other}" for other in self.others]
        return "\n".join(lines)


class RequestError(PeriluneError, ValueError):
    """The request is wrong: recipe, option, path, data or checkpoint. Exit code 2."""

    exit_code = 2


class UnknownNameError(RequestError):
    """No run or experiment has the name."""


class WorkFailedError(PeriluneError, RuntimeError):
    """The request is valid, but the work failed. Exit code 1."""


class UserInterruptError(PeriluneError):
    """The user pressed Ctrl-C. Exit code 130, as shells report it."""

    exit_code = 130


class ProcessLostError(WorkFailedError):
    """Another process of the same run has ended. The log of that process has the cause."""


@contextmanager
def requires_extra(extra: str, what: str, *, where: str = "") -> Iterator[None]:
    """Turn an ImportError in the block into a RequestError that says how to install the extra.

    Args:
        what, where: message and place of the error.
    """
    try:
        yield
    except ImportError:
        raise RequestError(what, where=where, remedy=f"pip install 'perilune[{extra}]'") from None


def closest_name(name: str, valid: Iterable[str]) -> str:
    """Return the name in `valid` that the user probably means by `name`; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), "")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a hint that names the closest valid name if there is one, else all of them."""
    choices = sorted(valid)
    close = closest_name(name, choices)
    return f"did you mean '{close}'?" if close else f"one of: {', '.join(choices)}"
