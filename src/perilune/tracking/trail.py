"""Reads the figures of a run from its files while it runs.

Training loops do not write to trackers, so a failing tracker does not stop a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.files import finite_number, read_json_lines
from perilune.metrics.training import STEP_PARTS


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one step.

    Attributes:
        step: from 1; 0 has the evaluation before training.
        seconds: total duration of all steps up to this one.
        values: the finite numbers of metrics.jsonl by name, and of timings.jsonl under "timing/".
    """

    step: int
    seconds: float
    values: Mapping[str, float]


class FigureReader:
    """Reads the figures of a run incrementally: every step once, in order, over all attempts.

    An attempt that resumes repeats the steps after its checkpoint. The reader skips steps that it has read.

    Args:
        after: last step to skip.
    """

    def __init__(self, after: int = -1) -> None:
        self._last = after

    def read(self, artifacts: Path, *, ended: bool) -> Iterator[Figures]:
        """Yield the steps since the last call.

        Args:
            artifacts: artifacts folder of the current attempt.
            ended: whether the run is over. If not, the newest step is held back, as it may lack its timings.
        """
        timings = {row["step"]: row for row in _read_steps(artifacts / "timings.jsonl")}
        rows = list(_read_steps(artifacts / "metrics.jsonl"))
        seconds = 0.0
        for row in rows if ended else rows[:-1]:
            step = row["step"]
            timing = timings.get(step, {})
            seconds += sum(finite_number(timing.get(name)) or 0.0 for name in STEP_PARTS)
            if step > self._last:
                self._last = step
                timed = {f"timing/{name}": value for name, value in _finite_numbers(timing).items()}
                yield Figures(step, seconds, _finite_numbers(row) | timed)


def _read_steps(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a JSON Lines file that have a step."""
    for row in read_json_lines(path):
        if isinstance(row, dict) and isinstance(step := row.get("step"), int) and 0 <= step < 1 << 63:
            yield row


def _finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    pairs = ((name, finite_number(value)) for name, value in row.items() if name != "step")
    return {name: value for name, value in pairs if value is not None}
