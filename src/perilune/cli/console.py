"""How long work is shown: a live bar for each stage on a terminal, a line now and then elsewhere.

Both write to stderr, so that stdout carries results alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from perilune.terminal import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_INTERVAL = 5.0  # seconds between two lines about one stage when there is no terminal
LEADING = ("reward", "pass_rate", "pass@1", "loss", "tokens_per_second")  # figures that come first


class StageProgress(Protocol):
    """Something that shows how a recipe's stages come along."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def started(self, stage: str, note: str) -> None:
        """A stage's run begins; `note` says which and where."""

    def progressed(self, stage: str, done: int, total: int, unit: str, figures: Mapping[str, float]) -> None:
        """A stage has done `done` of `total` units of its work."""

    def ended(self, stage: str, mark: str, note: str) -> None:
        """A stage is over: `mark` is one of "done", "reused", "failed"."""

    def say(self, message: str) -> None:
        """Say something that is no figure."""


def stage_progress(out: TextIO | None = None) -> StageProgress:
    """The view that suits `out` (default stderr)."""
    chosen = out or sys.stderr
    return LiveBars(chosen) if chosen.isatty() else PlainLines(chosen)


def figure(name: str, value: float) -> str:
    """One figure in words: ("tokens_per_second", 1234.5) is "1,234 tokens/s"."""
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
    label = name.replace("_", " ")
    if name == "pass_rate" or name.startswith("pass@"):
        return f"{label} {value:.1%}"
    return f"{label} {value:,.3g}" if abs(value) < 1000 else f"{label} {value:,.0f}"


def figures_text(figures: Mapping[str, float], separator: str = ", ") -> str:
    """All figures in words, those that matter most first."""
    order = {name: place for place, name in enumerate(LEADING)}
    names = sorted(figures, key=lambda name: order.get(name, len(order)))
    return printable(separator.join(figure(name, figures[name]) for name in names))


def duration(seconds: float) -> str:
    """Seconds as "m:ss" or "h:mm:ss"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class PlainLines:
    """Lines for a log file: the start, every few seconds the figures, the end."""

    def __init__(self, out: TextIO, interval: float = LINE_INTERVAL) -> None:
        self._out = out
        self._interval = interval
        self._first: dict[tuple[str, str], tuple[float, int]] = {}  # of a stage, in a unit: when, how far
        self._last: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def started(self, stage: str, note: str) -> None:
        """Write that the stage starts."""
        self._last[stage] = time.monotonic()
        self.say(f"[{stage}] started{f', {note}' if note else ''}")

    def progressed(self, stage: str, done: int, total: int, unit: str, figures: Mapping[str, float]) -> None:
        """Write the figures, at most every few seconds."""
        now = time.monotonic()
        began, already = self._first.setdefault((stage, unit), (now, done))
        if now - self._last.get(stage, now) < self._interval:
            return
        self._last[stage] = now
        parts = [f"{done:,}/{total:,} {unit}", *([figures_text(figures)] if figures else [])]
        if done > already:
            parts.append(f"{duration((now - began) / (done - already) * (total - done))} left")
        self.say(f"[{stage}] {', '.join(parts)}")

    def ended(self, stage: str, mark: str, note: str) -> None:
        """Write how the stage ended."""
        self.say(f"[{stage}] {mark}{f', {note}' if note else ''}")

    def say(self, message: str) -> None:
        """Write one line."""
        self._out.write(printable(message) + "\n")
        self._out.flush()


class LiveBars:
    """A bar a stage, redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.fields[mark]}"),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[count]}", justify="right", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=out, stderr=out is sys.stderr),
            refresh_per_second=5,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, stage: str, note: str) -> None:
        """Add the stage's bar."""
        self._bar(stage)

    def progressed(self, stage: str, done: int, total: int, unit: str, figures: Mapping[str, float]) -> None:
        """Move the stage's bar."""
        self._progress.update(
            self._bar(stage),
            completed=done,
            total=total,
            count=f"{done:,}/{total:,} {unit}",
            figures=figures_text(figures, "  "),
        )

    def ended(self, stage: str, mark: str, note: str) -> None:
        """Stop the stage's bar and mark it."""
        bar = self._bar(stage)
        signs = {"done": "[green]✓", "reused": "[cyan]=", "failed": "[red]✗"}
        self._progress.update(bar, mark=signs[mark])
        if mark != "failed":
            total = next(task.total for task in self._progress.tasks if task.id == bar) or 1
            self._progress.update(bar, total=total, completed=total)
        if note:
            self._progress.update(bar, figures=note)
        self._progress.stop_task(bar)

    def say(self, message: str) -> None:
        """Write a line above the bars."""
        self._progress.console.print(printable(message), markup=False, highlight=False)

    def _bar(self, stage: str) -> TaskID:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=None, mark=" ", count="", figures="")
        return self._bars[stage]
