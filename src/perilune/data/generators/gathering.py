"""Enough records: a teacher writes until as many as are wanted were kept, or far too many were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perilune.data.generators.registry import provenance_of
from perilune.data.generators.teacher import Candidate, Rejected, Teacher, verified, written
from perilune.data.records import TraceRecord, write_records
from perilune.environments.core.registry import make_environment
from perilune.environments.core.replay import conversation
from perilune.files import write_json_lines
from perilune.verifiers import Scorer

MOST_REJECTED = 4  # give up after this many rejected candidates for every record asked for


@dataclass(slots=True)
class Gathered:
    """What came of a teacher's candidates."""

    environment: str
    kept: list[TraceRecord] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def reasons(self) -> Counter[str]:
        """How often candidates were not kept, by why."""
        return Counter(one.reason for one in self.rejected)

    @property
    def sources(self) -> Counter[str]:
        """How many records each source wrote."""
        return Counter(record.source for record in self.kept)

    def write(self, folder: Path) -> None:
        """Write `records.jsonl`, and what was not kept to `rejected.jsonl`, each with its reason."""
        rows = [
            {
                "task_id": one.candidate.task.task_id,
                "source": one.candidate.source,
                "text": one.candidate.text,
                "reason": one.reason,
            }
            for one in self.rejected
        ]
        write_json_lines(folder / "rejected.jsonl", rows)
        write_records(folder / "records.jsonl", self.kept)

    def told(self) -> str:
        """The commonest reasons, in words."""
        worst = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(3))
        return worst or "no more tasks"


def gather(
    section: Mapping[str, Any],
    teacher: Teacher,
    count: int,
    seed: int,
    *,
    told: Mapping[str, Any],
    prepare: Callable[[Iterator[Candidate]], Iterator[Candidate]] = iter,
    show: Callable[[int, int], None] = lambda kept, rejected: None,
) -> Gathered:
    """At most `count` records of the environment that `section` describes, judged in a process of their own.

    Args:
        told: what the teacher was told beside its shares, for the records' provenance.
        prepare: changes candidates before they are judged.
        show: is told after each candidate how many were kept, and how many were not.

    Raises:
        RequestError: when the environment or the teacher cannot do what is asked for.
    """
    environment = make_environment(section)  # first: what it solves, the scorer's process then finds solved
    with Scorer(section) as scorer:
        found = Gathered(environment.id)
        candidates = prepare(written(teacher, environment, seed))
        provenance = provenance_of(teacher, section, **told)
        for one in verified(
            candidates, scorer.score, environment=environment.id, seed=seed,
            converse=partial(conversation, environment), provenance=provenance,
        ):  # fmt: skip
            if isinstance(one, Rejected):
                found.rejected.append(one)
            else:
                found.kept.append(one)
            show(len(found.kept), len(found.rejected))
            if len(found.kept) == count or len(found.rejected) > MOST_REJECTED * count:
                break
    return found
