"""Sums of products with a calculator: a small multi-turn environment, and an example of one.

`37*48+15=` asks for 1791. The policy may write one operation at a time (`37*48`) and sees its result
(`=1776`). `;1791` answers and ends the episode.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Split, Task, Transcript
from perilune.environments.core.splits import select_unique
from perilune.frozen import Frozen

ANSWER_MARK = ";"
_CALL = re.compile(r"(\d{1,12})([+*])(\d{1,12})", re.ASCII)
_ANSWER = re.compile(r";(0|[1-9]\d{0,12})", re.ASCII)


class CalculatorSpec(Frozen):
    """The environment section of a recipe, for `id: calculator`."""

    id: Literal["calculator"] = Field("calculator", description="id of the environment")
    digits: int = Field(2, ge=1, le=4, description="digits of each number")
    products: int = Field(
        1,
        ge=1,
        le=3,
        description="number of products in a question, which adds them and one more number: `37*48+15`"
        " has one product",
    )
    turns: int = Field(6, ge=1, le=32, description="maximum turns of an episode")


class CalculatorEnvironment(MultiTurn):
    """Reward 1 for the right answer, with or without the calculator."""

    Spec = CalculatorSpec

    def __init__(self, spec: CalculatorSpec) -> None:
        self.spec = spec
        self.id = "calculator"
        self.max_turns = spec.turns

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        draw = random.Random(f"{self.id}/{seed}")
        questions = (self._draw_question(draw) for _ in itertools.count())
        drawn = ((hashlib.sha256(question.encode()).hexdigest(), question) for question in questions)
        return (_make_task(question, digest) for digest, question in select_unique(split, drawn))

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        calls = 0
        action = yield ask()
        while not action.startswith(ANSWER_MARK):
            calls += 1
            action = yield ask(f"={calculate(action)}\n", role="tool")
        right = float(action == ANSWER_MARK + task.data["answer"])
        well_formed = float(_ANSWER.fullmatch(action) is not None)
        strategy = "calculator" if calls else "guess"
        yield end_episode(
            right,
            terms={"right": right, "well_formed": well_formed},
            metrics={f"strategy/{strategy}": 1.0, "calls": float(calls)},
        )

    def gold(self, task: Task) -> Transcript:
        *earlier, answer = task.data["actions"]
        return Transcript(answer, earlier=tuple(earlier))

    def _draw_question(self, draw: random.Random) -> str:
        lowest, highest = 10 ** (self.spec.digits - 1), 10**self.spec.digits - 1
        numbers = [str(draw.randint(lowest, highest)) for _ in range(2 * self.spec.products + 1)]
        products = [f"{a}*{b}" for a, b in zip(numbers[:-1:2], numbers[1::2], strict=True)]
        return "+".join([*products, numbers[-1]])


def calculate(call: str) -> str:
    """Return the result of an operation on two numbers; "?" for any other text."""
    match = _CALL.fullmatch(call)
    if match is None:
        return "?"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


def _make_task(question: str, digest: str) -> Task:
    *products, last = question.split("+")
    actions = [*products]
    values = [int(calculate(product)) for product in products]
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
