"""Reads the figures of a run from its files while it runs.

Training loops do not know about trackers, so a failing tracker is only a warning.
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

    An attempt that resumes repeats the steps after its checkpoint. Steps that were already read are skipped;
    on a CPU they are equal bit for bit.
    """

    def __init__(self, after: int = -1) -> None:
        self._last = after

    def read(self, artifacts: Path, *, ended: bool) -> Iterator[Figures]:
        """Yield the steps since the last call.

        Args:
            artifacts: folder of the current attempt.
            ended: whether the run is over. Before, the newest step is held back, as it may lack its timings.
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
                values = _finite_numbers(row) | {
                    f"timing/{name}": value for name, value in _finite_numbers(timing).items()
                }
                yield Figures(step, seconds, values)


def _read_steps(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file of metrics that have a step; a damaged line is left out."""
    for row in read_json_lines(path):
        if isinstance(row, dict) and isinstance(step := row.get("step"), int) and 0 <= step < 1 << 63:
            yield row


def _finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: finite_number(value) for name, value in row.items() if name != "step"}
    return {name: value for name, value in numbers.items() if value is not None}
