"""Errors a user can act on: what was wrong, where, and what to do about it."""

from __future__ import annotations

REPORT_BUG = "report this as a bug in Perilune; the recipe did not cause it"
"""Remedy of errors that only a defect of the code can cause."""


class PeriluneError(Exception):
    """An expected failure, shown to the user as one message without a traceback.

    Args:
        what: what was wrong, with the value that was seen.
        where: file, line and key, or the stage and run it happened in.
        remedy: what the user can do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        return "\n".join(lines)


class RequestError(PeriluneError, ValueError):
    """The request itself was wrong (recipe, option, path, data, checkpoint): exit code 2."""

    exit_code = 2


class WorkFailedError(PeriluneError, RuntimeError):
    """The request was fine and the work failed: exit code 1."""

    exit_code = 1


class ProcessLostError(WorkFailedError):
    """Another process of the same run has ended; it, not this one, knows why."""
