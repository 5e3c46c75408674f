"""Teachers, and the verification of the traces that they write.

The environment's scorer decides which candidates become records. Rejected candidates get a reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from perilune.data.records import Provenance, TraceRecord
from perilune.environments.core.protocol import Environment, Failure, Message, Outcome, Task, Transcript
from perilune.environments.core.rewards import GOLD_METRIC

FIRST_BATCH, BATCH = 16, 512  # candidates verified together, at first and at most

ScoreBatch = Callable[[Sequence[tuple[Task, Transcript]]], Sequence[Outcome]]
Converse = Callable[[Task, Transcript], Mapping[str, Sequence[Mapping[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trace that has not been verified.

    Attributes:
        text: the answer, or the last action of an episode with several turns.
        source: teacher and strategy, e.g. "arithmetic/direct".
        earlier: the earlier actions of all players, in order.
        player: the player to imitate.
        keep_from: lowest score at which the trace is kept.
        details: further JSON values about its origin, for the record.
    """

    task: Task
    text: str
    source: str
    earlier: tuple[str, ...] = ()
    seed: int = 0
    player: int = 0
    keep_from: float = 1.0
    details: Mapping[str, Any] | None = None

    @property
    def transcript(self) -> Transcript:
        """All actions, for the scorer."""
        return Transcript(self.text, earlier=self.earlier, seed=self.seed, player=self.player)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected candidate with the reason."""

    candidate: Candidate
    reason: str

    def as_row(self) -> dict[str, str]:
        item = self.candidate
        return {"task_id": item.task.task_id, "source": item.source, "text": item.text, "reason": self.reason}


class Teacher(Protocol):
    """Writes traces for tasks.

    Attributes:
        name: its name in recipes.
        strategies: its strategies with their default shares.
        shares: share of the tasks that each strategy answers; they sum to 1.
    """

    name: str
    strategies: Mapping[str, float]
    shares: Mapping[str, float]

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """Yield at most one candidate per task, in the order of `tasks`; deterministic for a seed."""


def prepare_teacher(teacher: Teacher, environment: Environment) -> None:
    """Call the teacher's `prepare` hook, if it has one, with the environment."""
    hook = getattr(teacher, "prepare", None)
    if hook is not None:
        hook(environment)


def teacher_candidates(teacher: Teacher, environment: Environment, seed: int) -> Iterator[Candidate]:
    """Return the candidates of a teacher for the training tasks of an environment."""
    prepare_teacher(teacher, environment)
    return teacher.candidates(environment.tasks("train", seed), seed)


def verify_candidates(
    candidates: Iterable[Candidate],
    score: ScoreBatch,
    *,
    environment: str,
    seed: int,
    most: int | None = None,
    converse: Converse | None = None,
    provenance: Provenance | None = None,
) -> Iterator[TraceRecord | Rejected]:
    """Score candidates in order; those with a score of at least their `keep_from` become records.

    Each candidate has a record for the conversation of each of its sub-agents, and then one for its own.
    Only the first record of a conversation is kept, unless the records are mixed. A candidate without a new
    conversation, or of a task that has records, is rejected.

    Args:
        score: scores a batch, normally `Scorer.score`.
        most: number of tasks with records after which the iteration ends; None for no limit.
        converse: turns a transcript into conversations by agent, normally
            `perilune.environments.core.replay.replay_agent_conversations`. The default is prompt and answer.
        provenance: of the records, normally from `perilune.data.generators.provenance_of`.
    """
    pending = iter(candidates)
    digests: set[str] = set()
    tasks: set[str] = set()
    size = FIRST_BATCH  # grows, so that few records cost little
    while chunk := list(islice(pending, size)):
        size = min(2 * size, BATCH)
        outcomes = score([(candidate.task, candidate.transcript) for candidate in chunk])
        for candidate, outcome in zip(chunk, outcomes, strict=True):
            if isinstance(outcome, Failure):
                yield Rejected(candidate, f"{outcome.boundary}: {outcome.reason}")
                continue
            verdict = outcome.metrics.get(GOLD_METRIC, outcome.reward)
            if verdict < candidate.keep_from:
                yield Rejected(candidate, f"score {verdict:g} is below {candidate.keep_from:g}")
                continue
            conversations = dict((converse or _answer_conversation)(candidate.task, candidate.transcript))
            record = TraceRecord(
                conversations.pop(""),
                environment=environment,
                task_id=candidate.task.task_id,
                score=verdict,
                source=candidate.source,
                seed=seed,
                provenance=provenance,
                details=candidate.details,
            )
            records = [*(record.of_sub_agent(*pair) for pair in conversations.items()), record]
            new = [trace for trace in records if record.is_mixed or trace.digest not in digests]
            if not new or record.task_id in tasks:
                yield Rejected(candidate, "duplicate")
                continue
            tasks.add(record.task_id)
            digests.update(trace.digest for trace in new)
            yield from new
            if len(tasks) == most:
                return


def _answer_conversation(task: Task, transcript: Transcript) -> Mapping[str, Sequence[Message]]:
    return {"": [*task.prompt, {"role": "assistant", "content": transcript.text}]}
