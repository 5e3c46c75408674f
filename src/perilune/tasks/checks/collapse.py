"""The collapse watch: a warning when the reward has fallen far below its best and stays there.

It compares the mean over the last 10 steps with the best earlier mean over 10 steps. The alarm starts when,
at 5 consecutive steps, the drop is at least 40% of the best and 5 times its standard error. If the share of
dead groups has risen by 0.3 to at least 0.8, 2 standard errors are enough. The alarm ends when the drop is
below 20% of the best. The standard error comes from differences between neighboring steps, so a slow trend
does not inflate it.
"""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from perilune.environments.core.rewards import GOLD_METRIC

WINDOW_STEPS = 10  # steps in a mean
MIN_DROP_SHARE = 0.4  # smallest drop, relative to the best mean
MIN_DROP_ERRORS = 5.0  # smallest drop, in standard errors of the difference of two means
ALARM_STEPS = 5  # consecutive steps with such a drop
MIN_DEAD_SHARE = 0.8  # share of dead groups from which a smaller drop counts
MIN_DEAD_RISE = 0.3  # rise of this share, which is required too
MIN_DROP_ERRORS_IF_DEAD = 2.0  # smallest drop at such a share, in standard errors


def lasting_reward(line: Mapping[str, Any]) -> float:
    """Return a step's mean reward, without auxiliary rewards, whose weights fall to 0."""
    return float(line[GOLD_METRIC if "auxiliary_scale" in line else "reward"])


class CollapseWatch:
    """Observes every step of a run, in order.

    Attributes:
        alarm: whether the alarm is on.
        since: step at which the alarm first started; None before.
        best: best mean reward over a window before the last window.
    """

    def __init__(self) -> None:
        self.alarm = False
        self.since: int | None = None
        self.best = -math.inf
        self._fewest_dead = math.inf
        self._rewards: list[float] = []
        self._dead: list[float] = []
        self._squares = 0.0
        self._drop_steps = 0

    def observe(self, step: int, reward: float, dead: float) -> str:
        """Add a step's mean reward and share of dead groups; return a message if the alarm changes, or ""."""
        if self._rewards:
            self._squares += (reward - self._rewards[-1]) ** 2
        self._rewards.append(reward)
        self._dead.append(dead)
        if len(self._rewards) < 2 * WINDOW_STEPS:
            return ""
        before = slice(-2 * WINDOW_STEPS, -WINDOW_STEPS)
        self.best = max(self.best, fmean(self._rewards[before]))
        self._fewest_dead = min(self._fewest_dead, fmean(self._dead[before]))
        mean = self.mean
        drop, min_drop = self.best - mean, MIN_DROP_SHARE * abs(self.best)
        self._drop_steps = self._drop_steps + 1 if drop > self._max_noise() and drop >= min_drop else 0
        if not self.alarm and self._drop_steps >= ALARM_STEPS:
            self.alarm, self.since = True, self.since or step
            return (
                f"the reward collapsed: {mean:.3g} over the last {WINDOW_STEPS} steps, {self.best:.3g} at its"
                f" best, and {fmean(self._dead[-WINDOW_STEPS:]):.0%} of groups have equal rewards. Lower lr,"
                " set kl, or continue from an earlier checkpoint"
            )
        if self.alarm and drop < min_drop / 2:
            self.alarm = False
            return f"the reward has recovered: {mean:.3g} over the last {WINDOW_STEPS} steps"
        return ""

    @property
    def mean(self) -> float:
        """Mean reward over the last window."""
        return fmean(self._rewards[-WINDOW_STEPS:])

    def _max_noise(self) -> float:
        """Return the largest drop of the mean that counts as noise."""
        dead = fmean(self._dead[-WINDOW_STEPS:])
        errors = (
            MIN_DROP_ERRORS_IF_DEAD
            if dead >= max(MIN_DEAD_SHARE, self._fewest_dead + MIN_DEAD_RISE)
            else MIN_DROP_ERRORS
        )
        variance = self._squares / (2 * (len(self._rewards) - 1))
        return errors * math.sqrt(2 * variance / WINDOW_STEPS)
