"""The trail of figures that a run leaves, read from the outside while it grows.

Nothing in a training loop knows of this: what cannot be told to a tracker is a warning there and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.files import read_json_lines

SPENT = ("sampling", "scoring", "learning", "other")  # seconds of a step, in timings.jsonl


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step left.

    Attributes:
        step: from 1.
        seconds: that all steps up to and with this one took.
        values: of metrics.jsonl by name, and of timings.jsonl under "timing/"; finite numbers alone.
    """

    step: int
    seconds: float
    values: Mapping[str, float]


class Trail:
    """Reads on in a run's figures: every step once, in order, whatever attempts begin again.

    An attempt that resumes makes the steps after its checkpoint a second time. Those that were read are
    not given again; on a CPU they are the same to the last bit.
    """

    def __init__(self, after: int = 0) -> None:
        self._last = after

    def read(self, artifacts: Path, *, ended: bool) -> Iterator[Figures]:
        """The steps since the last call.

        Args:
            artifacts: of the run's present attempt.
            ended: whether nothing comes after; until then the newest step may lack its timings and waits.
        """
        timings = {row["step"]: row for row in read_json_lines(artifacts / "timings.jsonl")}
        rows = list(read_json_lines(artifacts / "metrics.jsonl"))
        seconds = 0.0
        for row in rows if ended else rows[:-1]:
            step = int(row["step"])
            timing = timings.get(step, {})
            seconds += sum(float(timing.get(name, 0.0)) for name in SPENT)
            if step > self._last:
                self._last = step
                values = _numbers(row) | {f"timing/{name}": one for name, one in _numbers(timing).items()}
                yield Figures(step, seconds, values)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
