"""Records by a teacher, of which the environment's own scorer keeps those that pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from perilune.data.generators.registry import provenance_of
from perilune.data.generators.teacher import Rejected, ScoreBatch, Teacher, meet, verified
from perilune.data.records import TraceRecord
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.replay import conversation


class Taught:
    """What a teacher writes, judged.

    Args:
        score: judges a batch, normally `Scorer.score`.
        section: of the environment, for the provenance of the rows.
        told: what the teacher was told beside its shares, likewise.

    Raises:
        RequestError: when the teacher does not know the environment.
    """

    def __init__(
        self,
        teacher: Teacher,
        environment: Environment,
        score: ScoreBatch,
        seed: int,
        *,
        section: Mapping[str, Any],
        told: Mapping[str, Any],
    ) -> None:
        meet(teacher, environment)
        self._teacher, self._environment, self._score, self._seed = teacher, environment, score, seed
        self.provenance = provenance_of(teacher, section, **told)

    def rows(self, tasks: Sequence[Task], first: int) -> Iterator[TraceRecord | Rejected]:
        """What became of each candidate."""
        return verified(
            self._teacher.candidates(tasks, self._seed),
            self._score,
            environment=self._environment.id,
            seed=self._seed,
            converse=partial(conversation, self._environment),
            provenance=self.provenance,
        )
