"""Sums of products with a calculator: a small environment of several turns, and an example of one.

`37*48+15=` asks for 1791. The policy may write one operation at a time (`37*48`), and is told what it makes
(`=1776`); or it answers, `;1791`, which ends the episode.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Split, Task, Transcript

HELD_OUT_PARTS = 10  # one tenth of all questions is held out
ANSWER_MARK = ";"
_CALL = re.compile(r"(\d{1,12})([+*])(\d{1,12})", re.ASCII)
_ANSWER = re.compile(r";(0|[1-9]\d{0,12})", re.ASCII)


class CalculatorSpec(BaseModel):
    """The environment section of a recipe, for `id: calculator`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["calculator"] = Field("calculator", description="which environment this is")
    digits: int = Field(2, ge=1, le=4, description="digits of each number")
    products: int = Field(
        1, ge=1, le=3, description="products in a question, before the number that is added"
    )
    turns: int = Field(6, ge=1, le=32, description="most turns of an episode")


class CalculatorEnvironment(MultiTurn):
    """Reward 1 for the right answer, however it was found."""

    Spec = CalculatorSpec

    def __init__(self, spec: CalculatorSpec) -> None:
        self.spec = spec
        self.id = "calculator"
        self.max_turns = spec.turns

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Questions without end, as long as there are new ones."""
        draw = random.Random(f"{self.id}/{seed}")
        seen: set[str] = set()
        misses = 0
        while misses < 1000:
            question = self._question(draw)
            digest = hashlib.sha256(question.encode()).hexdigest()
            held_out = int(digest[:8], 16) % HELD_OUT_PARTS == 0
            misses += 1
            if question not in seen and held_out == (split == "heldout"):
                misses = 0
                seen.add(question)
                yield _task(question, digest)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Calls of the calculator until there is an answer."""
        calls = 0
        action = yield ask()
        while not action.startswith(ANSWER_MARK):
            calls += 1
            action = yield ask(f"={calculated(action)}\n", role="tool")
        right = float(action == ANSWER_MARK + task.data["answer"])
        formed = float(_ANSWER.fullmatch(action) is not None)
        strategy = "calculator" if calls else "guess"
        yield end_episode(
            right,
            terms={"right": right, "well_formed": formed},
            metrics={f"strategy/{strategy}": 1.0, "calls": float(calls)},
        )

    def gold(self, task: Task) -> Transcript:
        """Every operation by the calculator, then the answer."""
        *earlier, answer = task.data["actions"]
        return Transcript(answer, earlier=tuple(earlier))

    def _question(self, draw: random.Random) -> str:
        least, most = 10 ** (self.spec.digits - 1), 10**self.spec.digits - 1
        numbers = [str(draw.randint(least, most)) for _ in range(2 * self.spec.products + 1)]
        products = [f"{a}*{b}" for a, b in zip(numbers[:-1:2], numbers[1::2], strict=True)]
        return "+".join([*products, numbers[-1]])


def calculated(call: str) -> str:
    """What the calculator says to `call`: the number, or "?" when it is no operation on two numbers."""
    found = _CALL.fullmatch(call)
    if found is None:
        return "?"
    a, b = int(found[1]), int(found[3])
    return str(a + b if found[2] == "+" else a * b)


def _task(question: str, digest: str) -> Task:
    *products, last = question.split("+")
    actions = []
    values = []
    for product in products:
        actions.append(product)
        values.append(int(calculated(product)))
    total = values[0]
    for value in (*values[1:], int(last)):
        actions.append(f"{total}+{value}")
        total += value
    return Task(
        task_id=digest[:32],
        prompt=({"role": "user", "content": f"{question}="},),
        data={"answer": str(total), "actions": [*actions, f"{ANSWER_MARK}{total}"]},
        difficulty=float(len(str(total))),
    )
