"""Scores transcripts in separate processes, so that a failure of the scorer affects one item."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from perilune.environments.core.episode_settings import episode_settings
from perilune.environments.core.protocol import Failure, Outcome, Score, Task, Transcript
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.process import EnvironmentProcess
from perilune.verifiers.worker import to_floats

Item = tuple[Task, Transcript]


class Scorer:
    """Runs an environment's scorer in separate, confined processes, with a time limit per item.

    A server process builds the environment and forks a worker for each batch. A worker that hangs, dies, or
    sends too much or malformed data is killed and replaced. Its current item becomes a Failure of the
    verifier; other items are not affected.

    Args:
        spec: the environment section of a recipe. The environment is built in the server process, not here.
        limits: time and resource limits. By default the time limit of an item is `episodes.seconds`.
        workers: number of processes that share a batch.
        rescores: whether to score some answers again, and to isolate answers from each other once two scores
            differ. An audit sets False, because it looks for scorers whose scores differ.

    Attributes:
        settings: the episode settings of the section.
        processes: one per worker. They also run sessions (`perilune.verifiers.sessions`).
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        limits: ScorerLimits | None = None,
        workers: int = 1,
        *,
        rescores: bool = True,
    ) -> None:
        self.settings = episode_settings(spec)
        self._limits = limits or ScorerLimits(item_seconds=self.settings.seconds)
        self.processes = [EnvironmentProcess(spec, self._limits, rescores=rescores) for _ in range(workers)]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def item_seconds(self) -> float:
        return self._limits.item_seconds

    @property
    def restarts(self) -> int:
        """The number of workers that broke so far."""
        return sum(process.restarts for process in self.processes)

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the outcomes of the items, in order.

        Raises:
            RequestError: if the environment's section is wrong.
            WorkFailedError: if the process cannot start.
        """
        seconds = self._limits.batch_seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        calls = [ScoreCall(*item) for item in items]
        if len(self.processes) == 1:
            return self.processes[0].ask(calls, deadline)
        share = -(-len(calls) // len(self.processes))
        shards = [calls[i * share : (i + 1) * share] for i in range(len(self.processes))]
        with ThreadPoolExecutor(len(self.processes)) as threads:
            scored = threads.map(lambda process, shard: process.ask(shard, deadline), self.processes, shards)
            return [outcome for outcomes in scored for outcome in outcomes]

    def close(self) -> None:
        for process in self.processes:
            process.close()


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """The call that scores one transcript."""

    task: Task
    transcript: Transcript
    boundary: str = "verifier"
    is_verdict: bool = True

    @property
    def steps(self) -> int:
        """The number of actions in the transcript, all of which scoring replays."""
        return 1 + len(self.transcript.earlier)

    def document(self, generation: int) -> Mapping[str, Any]:
        return {"task": slot_values(self.task), "transcript": slot_values(self.transcript)}

    def read(self, answer: Mapping[str, Any]) -> Outcome:
        """Return the outcome; a Failure if a number is not finite."""
        score = Score(float(answer["reward"]), to_floats(answer["terms"]), to_floats(answer["metrics"]))
        if not all(map(math.isfinite, (score.reward, *score.terms.values(), *score.metrics.values()))):
            return Failure("verifier", "the scorer returned a number that is not finite")
        return score


def slot_values(value: Task | Transcript) -> dict[str, Any]:
    """Return the fields of a value, for JSON."""
    return {name: getattr(value, name) for name in value.__slots__}
