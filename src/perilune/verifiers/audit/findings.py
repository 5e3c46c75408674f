"""What an audit found, how bad it is, and an example of each that can be judged again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from perilune.environments.core.protocol import Task, Transcript

Grade = Literal["A", "B", "C", "D", "F"]

MEANING: Mapping[Grade, str] = {
    "A": "no wrong output was paid",
    "B": "pays a little for nothing, or in part for the nearly right, or refuses a right answer's other form",
    "C": "pays in part without the answer or more for words around it, or gives a wrong output no verdict",
    "D": "pays in full for wrong outputs that are made from right ones",
    "F": "pays in full without the answer, refuses right answers, or changes its mind",
}


@dataclass(frozen=True, slots=True)
class Example:
    """An output and what was made of it.

    Attributes:
        task, transcript: what the scorer saw.
        verdict: the reward, or the reason why there was none.
    """

    task: Task
    transcript: Transcript
    verdict: float | str

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Example:
        """What `to_json` wrote."""
        return cls(Task(**raw["task"]), Transcript(**raw["transcript"]), raw["verdict"])


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which a reward is not what it should be.

    Attributes:
        probe: what was tried.
        grade: the best that a reward with this finding can get.
        what: in a sentence.
        tasks: on how many of the tasks probed.
        example: the worst.
    """

    probe: str
    grade: Grade
    what: str
    tasks: int
    example: Example


@dataclass(frozen=True, slots=True)
class Audit:
    """All about one environment.

    Attributes:
        environment: its section of a recipe.
        seed, tasks: which, and how many tasks were probed.
        judged: outputs that the scorer judged.
        unjudged: outputs with a reward of which nobody but the scorer knows whether they are right.
        searched: outputs tried by the search; 0 when no answer is known to be wrong.
        without_gold: tasks that state no answer.
        form: how an answer, here "…", had to be written to be paid.
        findings: the worst first.
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
        """That of the worst finding."""
        return max((finding.grade for finding in self.findings), default="A")

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return {"grade": self.grade, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Audit:
        """What `to_json` wrote."""
        values = {name: raw[name] for name in cls.__slots__ if name != "findings"}
        findings = [
            Finding(**{**one, "example": Example.from_json(one["example"])}) for one in raw["findings"]
        ]
        return cls(**values, findings=findings)
