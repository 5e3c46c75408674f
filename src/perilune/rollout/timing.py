"""Time spent in the parts of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each part of a step, and the number of sampled tokens."""

    sampling: float = 0.0
    scoring: float = 0.0
    learning: float = 0.0
    process_rewards: float = 0.0
    tokens: int = 0
    overlapped: bool = False  # whether other processes sample during the whole step
    started: float = field(default_factory=time.perf_counter)
    _processor_began: float = field(default_factory=time.process_time)

    @contextmanager
    def measure(self, part: Literal["sampling", "scoring", "learning", "process_rewards"]) -> Iterator[None]:
        """Add the seconds of the block to a part."""
        start = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    @property
    def elapsed(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self.started

    def figures(self) -> dict[str, float]:
        """Return the line for `Workspace.timing`: seconds of each part, and sampled tokens per second.

        If rollouts overlap with training, `sampling` is only the time that the learner waited, so
        `tokens_per_second` counts the seconds of the whole step.
        `processor` is the CPU time of this process, without scoring, which runs in another one. Compare the
        arms of an experiment by `processor`, because other load on the machine does not change it.
        `process_rewards`, when present, is the part of `other` spent on process rewards.
        """
        busy = self.sampling + self.scoring + self.learning
        sampled = self.elapsed if self.overlapped else self.sampling
        return {
            "sampling": self.sampling,
            "scoring": self.scoring,
            "learning": self.learning,
            "other": max(self.elapsed - busy, 0.0),
            **({"process_rewards": self.process_rewards} if self.process_rewards else {}),
            "processor": time.process_time() - self._processor_began,
            "tokens_per_second": self.tokens / sampled if sampled else 0.0,
        }
