"""The arithmetic teacher: answers compact arithmetic prompts at once, or with the working written out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments import compact, scratchpad
from perilune.environments.protocol import Task
from perilune.errors import RequestError


class ArithmeticTeacher:
    """Writes one trace a task; a digest of seed and task decides by which strategy.

    "347+268=" is answered by

    * scratchpad: `78015,46111,32106;615`, every column with its digits and its carry,
    * brief: `15,11,06;615`, the result of each column alone,
    * careless: `78015,46131,32106;615`, a scratchpad with one wrong digit and the right answer, as data
      that was verified by its outcome alone is bound to have,
    * direct: `;615`, no working at all.
    """

    name = "arithmetic"
    strategies: ClassVar = {"scratchpad": 0.4, "brief": 0.0, "careless": 0.0, "direct": 0.6}

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate a task.

        Raises:
            RequestError: when a prompt is no compact sum or product.
        """
        for task in tasks:
            strategy = self._strategy(seed, task.task_id)
            yield Candidate(task, write_trace(task, strategy), f"arithmetic/{strategy}")

    def _strategy(self, seed: int, task_id: str) -> str:
        draw = _draw(f"strategy:{seed}:{task_id}")
        for name, share in self.shares.items():
            draw -= share
            if draw < 0:
                return name
        return max(self.shares, key=lambda name: self.shares[name])


def write_trace(task: Task, strategy: str) -> str:
    """What the teacher answers: "working;answer", with the working that `strategy` asks for.

    Raises:
        RequestError: when the prompt is no compact sum or product.
    """
    prompt = task.prompt[-1]["content"]
    asked = compact.expression(prompt)
    if asked is None:
        raise RequestError(
            f"the arithmetic teacher cannot work out {prompt[:80]!r}",
            where="teacher",
            remedy="give it `prompt: compact` of chain_sum, products or basic_arithmetic "
            "(the last with operators + and - only or * only, and no parentheses)",
        )
    working = "" if strategy == "direct" else scratchpad.working(asked, brief=strategy == "brief") or ""
    if strategy == "careless":
        working = _slip(working, task.task_id)
    return f"{working}{compact.ANSWER_MARK}{task.data['answer']}"


def _slip(working: str, task_id: str) -> str:
    """`working` with one digit wrong."""
    places = [match.start() for match in re.finditer(r"\d", working)]
    if not places:
        return working
    place = places[int(_draw(f"place:{task_id}") * len(places))]
    digit = (int(working[place]) + 1 + int(_draw(f"digit:{task_id}") * 9)) % 10
    return f"{working[:place]}{digit}{working[place + 1 :]}"


def _draw(key: str) -> float:
    """A number in [0, 1) that `key` alone decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
