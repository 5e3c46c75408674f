"""The results of an audit: findings, their grades, and an example of each that can be scored again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from perilune.environments.core.protocol import Task, Transcript

Grade = Literal["A", "B", "C", "D", "F"]

GRADE_MEANINGS: Mapping[Grade, str] = {
    "A": "no wrong output got a reward",
    "B": "small reward without the answer, partial reward for nearly right answers, or another form refused",
    "C": "partial reward without the answer, more reward for filler, or failure on a wrong output",
    "D": "full reward for wrong outputs that are derived from right ones",
    "F": "full reward without the answer, right answers refused, or inconsistent rewards",
}


@dataclass(frozen=True, slots=True)
class Example:
    """An output and its reward.

    Attributes:
        task, transcript: the scorer's input.
        verdict: the reward, or the reason of the failure.
    """

    task: Task
    transcript: Transcript
    verdict: float | str


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of a reward.

    Attributes:
        grade: the best possible grade of a reward with this finding.
        what: the defect in one sentence.
        tasks: number of probed tasks that show it.
        example: the example with the highest reward.
    """

    probe: str
    grade: Grade
    what: str
    tasks: int
    example: Example


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of one environment.

    Attributes:
        environment: the environment's section of a recipe.
        seed: seed of tasks, probes and search.
        tasks: number of probed tasks.
        judged: number of outputs scored.
        unjudged: number of rewarded outputs for which it is unknown whether they are right.
        searched: number of outputs tried by the search; 0 if wrong answers cannot be recognized.
        without_gold: number of probed tasks without a gold answer.
        form: the form in which an answer, here "…", gets its reward.
        findings: the findings, the worst first.
    """

    environment: Mapping[str, Any]
    seed: int
    tasks: int
    judged: int
    unjudged: int
    searched: int
    without_gold: int
    form: str
    findings: Sequence[Finding] = field(default=())

    @property
    def grade(self) -> Grade:
        """The grade of the worst finding."""
        return max((finding.grade for finding in self.findings), default="A")

    def to_json(self) -> dict[str, Any]:
        return {"grade": self.grade, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Audit:
        return TypeAdapter(cls).validate_python(raw)
