"""Series of a run by step, and when a condition or a change began that still holds."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from perilune.files import finite_number

CONFIRM_STEPS = 2  # consecutive steps before a condition counts, and before its end counts
BASELINE_STEPS = 12  # undisturbed steps that a step is compared with
MIN_BASELINE_STEPS = 5
CENTRE_STEPS = 4  # latest steps of the baseline, which make its mean

Values = Sequence[float | None]


class Series:
    """Columns of the steps of a run. Step 0, which has only evaluations, is left out."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        by_step = {step: row for row in rows if isinstance(step := row.get("step"), int) and step > 0}
        self.steps = sorted(by_step)
        self._rows = [by_step[step] for step in self.steps]
        self._columns: dict[str, list[float | None]] = {}

    def column(self, name: str) -> list[float | None]:
        """Return the values of a metric by step; None where it is missing or not finite."""
        if name not in self._columns:
            self._columns[name] = [finite_number(row.get(name)) for row in self._rows]
        return self._columns[name]

    def undefined(self, name: str) -> list[bool]:
        """Return by step whether a metric is NaN or infinite."""
        values = [row.get(name) for row in self._rows]
        return [isinstance(value, float) and not math.isfinite(value) for value in values]

    def alarm_since(self, name: str) -> int | None:
        """Return the step since which an alarm of the run is on; None if it is off, or the run has none."""
        since: int | None = None
        for step, value in zip(self.steps, self.column(name), strict=True):
            if value is not None:  # a step with nothing to measure changes nothing
                since = (since or step) if value else None
        return since

    def since(self, flags: Sequence[bool]) -> int | None:
        """Return the step since which a condition holds; None if it does not hold at the last step.

        A condition begins with `CONFIRM_STEPS` consecutive flags, and ends with as many steps without a flag.
        """
        onset: int | None = None
        streak = gap = 0
        for index, flag in enumerate(flags):
            streak, gap = (streak + 1, 0) if flag else (0, gap + 1)
            if onset is None and streak == CONFIRM_STEPS:
                onset = index - CONFIRM_STEPS + 1
            elif gap == CONFIRM_STEPS:
                onset = None
        return None if onset is None else self.steps[onset]


def find_shifts(values: Values, *, sigmas: float, least: float, sticky: int, share: float = 0.0) -> list[int]:
    """Compare each value with its baseline: 1 if above it, -1 if below it, 0 if within its noise.

    The baseline is the mean of the last `CENTRE_STEPS` values that belong to it. The noise comes from the
    differences of successive values (von Neumann), so a trend does not hide a jump.

    Args:
        sigmas: distance in standard deviations of a value around the baseline.
        least: smallest distance that counts, in the unit of the values.
        share: smallest distance that counts, as a share of the baseline.
        sticky: values on this side stay outside until they return; others become part of the baseline.
    """
    normal: deque[float] = deque(maxlen=BASELINE_STEPS)
    signs: list[int] = []
    for value in values:
        sign = 0
        if value is not None and len(normal) >= MIN_BASELINE_STEPS:
            centre = math.fsum(list(normal)[-CENTRE_STEPS:]) / CENTRE_STEPS
            distance = abs(value - centre)
            if sticky and signs[-CONFIRM_STEPS:] == [sticky] * CONFIRM_STEPS:
                distance *= 2  # on the way back, chance must not end it
            if distance > max(least, share * abs(centre)) and distance > sigmas * _noise(normal):
                sign = int(math.copysign(1, value - centre))
        if value is not None and (sign == 0 or sign != sticky):
            normal.append(value)
        signs.append(sign)
    return signs


def _noise(baseline: Iterable[float]) -> float:
    """Return the standard deviation of a value around the mean of the last `CENTRE_STEPS` of its baseline."""
    steps = [(after - before) ** 2 for before, after in pairwise(baseline)]
    return math.sqrt(fmean(steps) / 2 * (1 + 1 / CENTRE_STEPS))


def flag_at_least(values: Values, limit: float) -> list[bool]:
    return [value is not None and value >= limit for value in values]


def median(values: Values) -> float | None:
    """Return the median of the known values; None without any."""
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def latest(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
