"""Environment of sums that wait for a tool before scoring: hard tasks wait longer, with a heavy tail.

The wait of an episode is lognormal (sigma 1), with mean `seconds` for sums of two digits and three times that
for sums of three. It depends on the task and the episode's seed alone.
"""

import hashlib
import math
import random
import time
from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments import (
    EpisodeGenerator,
    KeyedRandom,
    MultiTurn,
    Split,
    Task,
    ask,
    end_episode,
)


class WaitingSpec(BaseModel):
    """The environment's section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["waiting"] = "waiting"
    seconds: float = Field(0.25, ge=0, description="mean wait of an easy task")


class Waiting(MultiTurn):
    """Reward 1 for the right sum, after a wait."""

    id = "waiting"
    Spec = WaitingSpec
    max_turns = 2

    def __init__(self, spec: WaitingSpec) -> None:
        self.spec = spec

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Sums of two and three digits, all different."""
        sums = [(a, b) for a in range(10) for b in range(10)]
        terms = [*sums, *((a, b, c) for a, b in sums for c in range(10))]
        weights = [5.0 if len(item) == 2 else 0.5 for item in terms]  # half of the first tasks have two terms
        drawn = random.Random(seed)
        order = sorted(terms, key=lambda numbers: -(drawn.random() ** (1 / weights[terms.index(numbers)])))
        for numbers in order:
            text = "+".join(map(str, numbers)) + "="
            digest = hashlib.sha256(text.encode()).hexdigest()
            if (int(digest[:8], 16) % 5 == 0) == (split == "heldout"):
                prompt = ({"role": "user", "content": text},)
                yield Task(digest[:32], prompt, {"answer": str(sum(numbers))}, difficulty=float(len(numbers)))

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Wait, then score the one action."""
        action = yield ask()
        mean = self.spec.seconds * (3 if task.difficulty == 3 else 1)
        wait = mean * math.exp(NormalDist().inv_cdf(min(max(rng.uniform("wait"), 1e-6), 1 - 1e-6)) - 0.5)
        time.sleep(wait)
        yield end_episode(float(action == task.data["answer"]), metrics={"wait": wait})
