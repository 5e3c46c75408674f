"""Collect verified records from a teacher."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perilune.data.generators.registry import provenance_of
from perilune.data.generators.teacher import (
    Candidate,
    Rejected,
    ScoreBatch,
    Teacher,
    prepare_teacher,
    teacher_candidates,
    verify_candidates,
)
from perilune.data.records import TraceRecord, write_records
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.registry import make_environment
from perilune.environments.core.replay import replay_agent_conversations
from perilune.files import write_json_lines
from perilune.verifiers import Scorer

MAX_REJECTED_PER_RECORD = 4  # give up after this many rejected candidates per requested record


@dataclass(slots=True)
class CollectedTraces:
    """The kept and the rejected candidates of a teacher."""

    environment: str
    kept: list[TraceRecord] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    exhausted: bool = False  # the environment had no more training tasks

    @property
    def reasons(self) -> Counter[str]:
        return Counter(rejection.reason for rejection in self.rejected)

    @property
    def sources(self) -> Counter[str]:
        return Counter(record.source for record in self.kept)

    def write(self, folder: Path) -> None:
        """Write records.jsonl, and the rejected candidates with their reasons to rejected.jsonl."""
        write_json_lines(folder / "rejected.jsonl", [rejection.as_row() for rejection in self.rejected])
        write_records(folder / "records.jsonl", self.kept)

    def describe_rejections(self) -> str:
        """Return the most frequent reasons of rejection, in words."""
        worst = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(3))
        ends = ["the environment has no more training tasks"] if self.exhausted else []
        return "; ".join([*([worst] if worst else []), *ends])


def collect_traces(
    section: Mapping[str, Any],
    teacher: Teacher,
    count: int,
    seed: int,
    *,
    extra: Mapping[str, Any],
    transform: Callable[[Iterator[Candidate]], Iterator[Candidate]] = iter,
    show: Callable[[int, int], None] = lambda kept, rejected: None,
) -> CollectedTraces:
    """Collect at most `count` records of the environment in `section`, scored in a separate process.

    The records of an episode's sub-agents do not count.

    Args:
        extra: the teacher's settings besides its shares, for the provenance.
        transform: changes candidates before they are scored.
        show: called after each record or rejection with the number of kept and of rejected candidates.

    Raises:
        RequestError: when the settings of the environment or the teacher are invalid.
    """
    environment = make_environment(section)  # first, so that the scorer's process can reuse its solutions
    with Scorer(section) as scorer:
        traces = CollectedTraces(environment.id)
        candidates = transform(teacher_candidates(teacher, environment, seed))
        provenance = provenance_of(teacher, section, **extra)
        verified = verify_candidates(
            candidates,
            scorer.score,
            environment=environment.id,
            seed=seed,
            most=count,
            converse=partial(replay_agent_conversations, environment),
            provenance=provenance,
        )
        tasks: set[str] = set()
        for result in verified:
            if isinstance(result, Rejected):
                traces.rejected.append(result)
            else:
                traces.kept.append(result)
                tasks.add(result.task_id)
            show(len(tasks), len(traces.rejected))
            if len(traces.rejected) > MAX_REJECTED_PER_RECORD * count:
                return traces
    traces.exhausted = len(tasks) < count
    return traces


class TeacherGenerator:
    """Generates records with a teacher and a scorer.

    Args:
        score: scores a batch, normally `Scorer.score`.
        extra: the teacher's settings besides its shares, for the provenance.

    Raises:
        RequestError: when the teacher does not support the environment.
    """

    def __init__(
        self,
        teacher: Teacher,
        environment: Environment,
        score: ScoreBatch,
        seed: int,
        *,
        section: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        prepare_teacher(teacher, environment)
        self._teacher, self._environment, self._score, self._seed = teacher, environment, score, seed
        self.provenance = provenance_of(teacher, section, **extra)

    def rows(self, tasks: Sequence[Task], first: int) -> Iterator[TraceRecord | Rejected]:
        return verify_candidates(
            self._teacher.candidates(tasks, self._seed),
            self._score,
            environment=self._environment.id,
            seed=self._seed,
            converse=partial(replay_agent_conversations, self._environment),
            provenance=self.provenance,
        )
