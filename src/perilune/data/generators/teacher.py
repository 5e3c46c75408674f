"""What a teacher is, and how what it writes is verified before it is kept.

A teacher proposes; the environment's own scorer decides. A rejected candidate is kept with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from perilune.data.records import Provenance, TraceRecord, make_record
from perilune.environments.core.protocol import Environment, Failure, Message, Outcome, Task, Transcript
from perilune.environments.core.rewards import GOLD

BATCH = 512  # candidates verified together

ScoreBatch = Callable[[Sequence[tuple[Task, Transcript]]], Sequence[Outcome]]
Converse = Callable[[Task, Transcript], Sequence[Message]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trace that nobody has verified yet.

    Attributes:
        text: the answer, or the last action of an episode of several turns.
        source: names teacher and strategy ("arithmetic/direct").
        earlier: the actions before it, of all players in order.
        seed: of the session.
        player: who is imitated.
        keep_from: the least score with which it is kept; None: what holds for all.
        details: what the record shall say of how it came about.
    """

    task: Task
    text: str
    source: str
    earlier: tuple[str, ...] = ()
    seed: int = 0
    player: int = 0
    keep_from: float | None = None
    details: Mapping[str, Any] | None = None

    @property
    def transcript(self) -> Transcript:
        """What was done."""
        return Transcript(self.text, earlier=self.earlier, seed=self.seed, player=self.player)


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


def meet(teacher: Teacher, environment: Environment) -> None:
    """Show the environment itself to a teacher that has to know it, as to play in it: one with a `meet`."""
    introduce = getattr(teacher, "meet", None)
    if introduce is not None:
        introduce(environment)


def written(teacher: Teacher, environment: Environment, seed: int) -> Iterator[Candidate]:
    """What a teacher writes for the training tasks of an environment, once they have met."""
    meet(teacher, environment)
    return teacher.candidates(environment.tasks("train", seed), seed)


def verified(
    candidates: Iterable[Candidate],
    score: ScoreBatch,
    *,
    environment: str,
    seed: int,
    keep_from: float = 1.0,
    converse: Converse | None = None,
    provenance: Provenance | None = None,
) -> Iterator[TraceRecord | Rejected]:
    """Each candidate in order, as a record when its score is at least `keep_from`, else rejected.

    Duplicates by content (unless they are mixed), or by task, are rejected as such; the first one wins.

    Args:
        score: scores a batch, normally `Scorer.score`.
        converse: makes the conversation of a transcript, for environments of several turns, normally
            `perilune.environments.core.replay.conversation`; by default it is prompt and answer.
        provenance: what writes the candidates, normally `perilune.data.generators.provenance_of`.
    """
    pending = iter(candidates)
    digests: set[str] = set()
    tasks: set[str] = set()
    while batch := list(islice(pending, BATCH)):
        outcomes = score([(candidate.task, candidate.transcript) for candidate in batch])
        for candidate, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Failure):
                yield Rejected(candidate, f"{outcome.boundary}: {outcome.reason}")
                continue
            verdict = outcome.metrics.get(GOLD, outcome.reward)
            least = keep_from if candidate.keep_from is None else candidate.keep_from
            if verdict < least:
                yield Rejected(candidate, f"score {verdict:g} is below {least:g}")
                continue
            messages = (converse or _answered)(candidate.task, candidate.transcript)
            record = make_record(
                [dict(message) for message in messages],
                environment=environment,
                task_id=candidate.task.task_id,
                score=verdict,
                source=candidate.source,
                seed=seed,
                provenance=provenance,
                details=candidate.details,
            )
            if (record.digest in digests and not record.is_mixed) or record.task_id in tasks:
                yield Rejected(candidate, "duplicate")
                continue
            digests.add(record.digest)
            tasks.add(record.task_id)
            yield record


def _answered(task: Task, transcript: Transcript) -> Sequence[Message]:
    return [*task.prompt, {"role": "assistant", "content": transcript.text}]
