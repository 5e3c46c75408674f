"""The arithmetic teacher: answers compact arithmetic prompts at once, or with the working written out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from perilune.data.generators.teacher import Candidate
from perilune.environments import compact, scratchpad
from perilune.environments.protocol import Task
from perilune.errors import RequestError


class ArithmeticTeacher:
    """Writes one trace a task; a digest of seed and task decides by which strategy.

    "347+268=" is answered by `78015,46111,32106;615` (scratchpad), `15,11,06;615` (brief) or `;615` (direct).
    """

    name = "arithmetic"
    strategies = ("scratchpad", "brief", "direct")

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
        mixed = hashlib.sha256(f"strategy:{seed}:{task_id}".encode()).digest()
        draw = int.from_bytes(mixed[:8], "big") / 2**64
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
    working = "" if strategy == "direct" else scratchpad.working(asked, brief=strategy == "brief")
    return f"{working}{compact.ANSWER_MARK}{task.data['answer']}"
