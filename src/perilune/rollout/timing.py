"""Where the seconds of a loop go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each part of a loop, and the tokens sampled in it."""

    sampling: float = 0.0
    scoring: float = 0.0
    learning: float = 0.0
    process_rewards: float = 0.0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    _processor_began: float = field(default_factory=time.process_time)

    @contextmanager
    def learns(self) -> Iterator[None]:
        """Count the seconds of the block as learning."""
        begun = time.perf_counter()
        yield
        self.learning += time.perf_counter() - begun

    @property
    def elapsed(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self.started

    def figures(self) -> dict[str, float]:
        """The line for `Workspace.timing`: where the seconds went, and sampled tokens a second.

        `processor` is what this process had of its processors, which other load on the machine does not
        change: the figure to compare arms of an experiment by. Judging is in a process of its own.
        `process_rewards`, where there is any, is the part of `other` that process rewards took.
        """
        busy = self.sampling + self.scoring + self.learning
        return {
            "sampling": self.sampling,
            "scoring": self.scoring,
            "learning": self.learning,
            "other": max(self.elapsed - busy, 0.0),
            **({"process_rewards": self.process_rewards} if self.process_rewards else {}),
            "processor": time.process_time() - self._processor_began,
            "tokens_per_second": self.tokens / self.sampling if self.sampling else 0.0,
        }
