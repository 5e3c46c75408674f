"""Scorer: judges transcripts in a process of its own, so that a bad scorer costs one item and no more."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from perilune.environments.core.episode_settings import episode_settings
from perilune.environments.core.protocol import Failure, Outcome, Score, Task, Transcript
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.process import EnvironmentProcess

Item = tuple[Task, Transcript]


class Scorer:
    """Runs an environment's scorer in separate, confined processes, with a deadline for each item.

    A process that builds the environment starts at once, and forks a worker for each batch. A worker that
    hangs, dies, floods or speaks nonsense is killed and replaced; the item it was at is a Failure of the
    verifier, and no other.

    Args:
        spec: the environment section of a recipe; the environment is built in the process, not here.
        limits: deadlines and resources; by default an item has the seconds that the section says.
        workers: processes that share a batch.

    Attributes:
        settings: what the section says of episodes.
        processes: one a worker; sessions run in them too (`perilune.verifiers.sessions`).
    """

    def __init__(self, spec: Mapping[str, Any], limits: ScorerLimits | None = None, workers: int = 1) -> None:
        self.settings = episode_settings(spec)
        self._limits = limits or ScorerLimits(item_seconds=self.settings.seconds)
        self.processes = [EnvironmentProcess(spec, self._limits) for _ in range(workers)]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def item_seconds(self) -> float:
        """The longest that one item may take."""
        return self._limits.item_seconds

    @property
    def restarts(self) -> int:
        """How many workers broke so far."""
        return sum(process.restarts for process in self.processes)

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome an item, in order.

        Raises:
            RequestError: when the environment's section is wrong.
            WorkFailedError: when the process cannot start.
        """
        seconds = self._limits.batch_seconds
        until = math.inf if seconds is None else time.monotonic() + seconds
        calls = [Judging(*item) for item in items]
        if len(self.processes) == 1:
            return self.processes[0].ask(calls, until)
        share = -(-len(calls) // len(self.processes))
        shards = [calls[i * share : (i + 1) * share] for i in range(len(self.processes))]
        with ThreadPoolExecutor(len(self.processes)) as threads:
            scored = threads.map(lambda process, shard: process.ask(shard, until), self.processes, shards)
            return [outcome for outcomes in scored for outcome in outcomes]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.close()


@dataclass(frozen=True, slots=True)
class Judging:
    """The call that judges one transcript."""

    task: Task
    transcript: Transcript
    boundary: str = "verifier"
    is_verdict: bool = True

    @property
    def steps(self) -> int:
        """All actions are played again."""
        return 1 + len(self.transcript.earlier)

    def document(self, generation: int) -> Mapping[str, Any]:
        """Task and transcript."""
        return {"task": fields(self.task), "transcript": fields(self.transcript)}

    def read(self, answer: Mapping[str, Any]) -> Outcome:
        """The outcome; a figure that is not finite is a Failure."""
        score = Score(float(answer["reward"]), figures(answer["terms"]), figures(answer["metrics"]))
        if not all(map(math.isfinite, (score.reward, *score.terms.values(), *score.metrics.values()))):
            return Failure("verifier", "the scorer returned a figure that is not finite")
        return score


def fields(value: Task | Transcript) -> dict[str, Any]:
    """A value as JSON can carry it."""
    return {name: getattr(value, name) for name in value.__slots__}


def figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Names with numbers, whatever they were."""
    return {str(name): float(value) for name, value in values.items()}
