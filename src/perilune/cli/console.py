"""The progress of stages: a live bar for each stage on a terminal, a line every few seconds elsewhere.

Both write to stderr, so that stdout has results only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TextIO

from perilune.cli.output import format_for_terminal
from perilune.terminal import escape_control
from perilune.units import format_duration

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_INTERVAL_S = 5.0  # seconds between two lines about one stage without a terminal
LEADING_METRICS = ("reward", "pass_rate", "pass@1", "loss", "tokens_per_second")  # metrics that come first


def make_stage_progress(out: TextIO | None = None) -> PlainLines | LiveBars:
    """Return live bars if `out` (default stderr) is a terminal, else plain lines."""
    chosen = out or sys.stderr
    return LiveBars(chosen) if chosen.isatty() else PlainLines(chosen)


def format_metric(name: str, value: float) -> str:
    """Format a metric with its unit: ("tokens_per_second", 1234.5) is "1,234 tokens/s"."""
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
    label = name.replace("_", " ")
    if name == "pass_rate" or name.startswith("pass@"):
        return f"{label} {value:.1%}"
    return f"{label} {value:,.3g}" if abs(value) < 1000 else f"{label} {value:,.0f}"


def format_metrics(figures: Mapping[str, float], separator: str = ", ") -> str:
    """Format all metrics, the most important first."""
    order = {name: rank for rank, name in enumerate(LEADING_METRICS)}
    names = sorted(figures, key=lambda name: order.get(name, len(order)))
    return escape_control(separator.join(format_metric(name, figures[name]) for name in names))


class PlainLines:
    """Lines for a log file: the start, the metrics every few seconds, the end."""

    def __init__(self, out: TextIO, interval: float = LINE_INTERVAL_S) -> None:
        self._out = out
        self._interval = interval
        self._first: dict[tuple[str, str], tuple[float, int]] = {}  # first time and count, by stage and unit
        self._last: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def start(self, stage: str, note: str) -> None:
        """Show that a stage starts; `note` names its run."""
        self._last[stage] = time.monotonic()
        self.print(f"[{stage}] started{f', {note}' if note else ''}")

    def update(self, stage: str, done: int, total: int, unit: str, figures: Mapping[str, float]) -> None:
        """Show that a stage has done `done` of `total` units of its work, at most every few seconds."""
        now = time.monotonic()
        began, first = self._first.setdefault((stage, unit), (now, done))
        if now - self._last.get(stage, now) < self._interval:
            return
        self._last[stage] = now
        parts = [f"{done:,}/{total:,} {unit}", *([format_metrics(figures)] if figures else [])]
        if done > first:
            parts.append(f"{format_duration((now - began) / (done - first) * (total - done))} left")
        self.print(f"[{stage}] {', '.join(parts)}")

    def end(self, stage: str, mark: str, note: str) -> None:
        """Show that a stage has ended: `mark` is one of "done", "reused", "failed", "cancelled"."""
        self.print(f"[{stage}] {mark}{f', {note}' if note else ''}")

    def print(self, message: str) -> None:
        self._out.write(format_for_terminal(message) + "\n")
        self._out.flush()


class LiveBars:
    """One bar for each stage, redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.fields[mark]}"),
            TextColumn("{task.description}", style="bold", markup=False),
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

    def start(self, stage: str, note: str) -> None:
        self._bar(stage)

    def update(self, stage: str, done: int, total: int, unit: str, figures: Mapping[str, float]) -> None:
        self._progress.update(
            self._bar(stage),
            completed=done,
            total=total,
            count=escape_control(f"{done:,}/{total:,} {unit}"),
            figures=format_metrics(figures, "  "),
        )

    def end(self, stage: str, mark: str, note: str) -> None:
        bar = self._bar(stage)
        signs = {"done": "[green]✓", "reused": "[cyan]=", "failed": "[red]✗", "cancelled": "[yellow]✗"}
        self._progress.update(bar, mark=signs[mark])
        if mark in {"done", "reused"}:
            total = next(task.total for task in self._progress.tasks if task.id == bar) or 1
            self._progress.update(bar, total=total, completed=total)
        if note:
            self._progress.update(bar, figures=format_for_terminal(note))
        self._progress.stop_task(bar)

    def print(self, message: str) -> None:
        """Write a line above the bars."""
        self._progress.console.print(format_for_terminal(message), markup=False, highlight=False)

    def _bar(self, stage: str) -> TaskID:
        if stage not in self._bars:
            shown = escape_control(stage)
            self._bars[stage] = self._progress.add_task(shown, total=None, mark=" ", count="", figures="")
        return self._bars[stage]
