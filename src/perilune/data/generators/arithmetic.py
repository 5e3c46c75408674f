"""The arithmetic teacher: answers compact arithmetic prompts at once, or with their working written out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from perilune.data.generators.teacher import Candidate
from perilune.environments import compact, scratchpad
from perilune.environments.protocol import Task
from perilune.errors import RequestError

Strategy = Literal["direct", "brief", "scratchpad"]


class ArithmeticTeacherSpec(BaseModel):
    """How the arithmetic teacher writes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["arithmetic"] = "arithmetic"
    shares: dict[Strategy, float] = Field(
        default_factory=lambda: {"scratchpad": 0.4, "direct": 0.6},
        description="share of each strategy: scratchpad, brief (less working) or direct (none)",
    )
    max_difficulty: float | None = Field(None, description="leave harder tasks to reinforcement learning")

    @field_validator("shares")
    @classmethod
    def _sum_to_one(cls, shares: dict[Strategy, float]) -> dict[Strategy, float]:
        if any(share < 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError("shares are not negative and sum to 1")
        return shares


class ArithmeticTeacher:
    """Writes one trace a task; which strategy is decided by a digest of seed and task."""

    name = "arithmetic"

    def __init__(self, spec: ArithmeticTeacherSpec) -> None:
        self.spec = spec
        self._names = sorted(spec.shares)
        self._ends = list(accumulate(spec.shares[name] for name in self._names))

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate a task that is not too difficult.

        Raises:
            RequestError: when a prompt is no compact sum or product.
        """
        limit = self.spec.max_difficulty
        for task in tasks:
            if limit is not None and task.difficulty is not None and task.difficulty > limit:
                continue
            strategy = self._strategy(seed, task.task_id)
            yield Candidate(task, write_trace(task, strategy), f"arithmetic/{strategy}")

    def _strategy(self, seed: int, task_id: str) -> Strategy:
        mixed = hashlib.sha256(f"strategy:{seed}:{task_id}".encode()).digest()
        draw = int.from_bytes(mixed[:8], "big") / 2**64
        for name, end in zip(self._names, self._ends, strict=True):
            if draw < end:
                return name
        return self._names[-1]


def write_trace(task: Task, strategy: Strategy) -> str:
    """What the teacher answers: "working;answer", with the working that `strategy` asks for.

    Raises:
        RequestError: when the prompt is no compact sum or product.
    """
    prompt = task.prompt[-1]["content"]
    asked = compact.expression(prompt)
    if asked is None:
        raise RequestError(
            f"the arithmetic teacher cannot work out {prompt!r}",
            where="teacher",
            remedy="a compact prompt of basic_arithmetic (no brackets, no division), chain_sum or products",
        )
    working = "" if strategy == "direct" else scratchpad.working(asked, brief=strategy == "brief")
    return f"{working}{compact.ANSWER_MARK}{task.data['answer']}"


def make(spec: Mapping[str, Any]) -> ArithmeticTeacher:
    """Build the teacher; the factory behind the name "arithmetic".

    Raises:
        RequestError: when a field is unknown or impossible.
    """
    try:
        return ArithmeticTeacher(ArithmeticTeacherSpec.model_validate(dict(spec)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RequestError(first["msg"], where=f"teacher.{key}") from None
