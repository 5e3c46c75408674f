"""What a teacher is, and how what it writes is verified before it is kept.

A teacher proposes; the environment's own scorer decides. A rejected candidate is kept with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from perilune.data.records import TraceRecord, make_record
from perilune.environments.protocol import Failure, Outcome, Task, Transcript
from perilune.environments.rewards import GOLD

BATCH = 512  # candidates verified together

ScoreBatch = Callable[[Sequence[tuple[Task, Transcript]]], Sequence[Outcome]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trace that nobody has verified yet; `source` names teacher and strategy ("arithmetic/direct")."""

    task: Task
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was not kept, and why."""

    candidate: Candidate
    reason: str


class Teacher(Protocol):
    """Writes traces for tasks.

    Attributes:
        name: what a recipe calls it.
        strategies: the ways it can answer, each with its share when nobody says otherwise.
        shares: share of the tasks that each strategy answers; sums to 1.
    """

    name: str
    strategies: Mapping[str, float]
    shares: Mapping[str, float]

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """At most one candidate a task, in the order of `tasks`; the same seed writes the same."""
        ...


def verified(
    candidates: Iterable[Candidate], score: ScoreBatch, *, environment: str, seed: int, keep_from: float = 1.0
) -> Iterator[TraceRecord | Rejected]:
    """Each candidate in order, as a record when its score is at least `keep_from`, else rejected.

    Duplicates by content, or by task, are rejected as such; the first one wins.

    Args:
        score: scores a batch, normally `Scorer.score`.
    """
    pending = iter(candidates)
    digests: set[str] = set()
    tasks: set[str] = set()
    while batch := list(islice(pending, BATCH)):
        outcomes = score([(candidate.task, Transcript(candidate.text)) for candidate in batch])
        for candidate, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Failure):
                yield Rejected(candidate, f"{outcome.boundary}: {outcome.reason}")
                continue
            verdict = outcome.metrics.get(GOLD, outcome.reward)
            if verdict < keep_from:
                yield Rejected(candidate, f"score {verdict:g} is below {keep_from:g}")
                continue
            record = _record(candidate, verdict, environment, seed)
            if record.digest in digests or record.task_id in tasks:
                yield Rejected(candidate, "duplicate")
                continue
            digests.add(record.digest)
            tasks.add(record.task_id)
            yield record


def _record(candidate: Candidate, score: float, environment: str, seed: int) -> TraceRecord:
    answer = {"role": "assistant", "content": candidate.text}
    return make_record(
        [*(dict(message) for message in candidate.task.prompt), answer],
        environment=environment,
        task_id=candidate.task.task_id,
        score=score,
        source=candidate.source,
        seed=seed,
    )
