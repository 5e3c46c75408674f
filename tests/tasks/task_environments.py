"""An environment for these tests that starts in a moment: {"id": "factory", "factory": MODULE:Digits}."""

import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from perilune.environments.protocol import Failure, Outcome, Score, Split, Task, Transcript


class Digits:
    """Write digits: worth the share of digits in an answer, so that even a fresh policy can climb.

    The section may say `raises`, `hangs` and `refuses`: first hex digits of the ids of tasks whose scorer
    does so; `raises_on`: characters, at the start of an answer, on which it raises; `equal`: every answer is
    worth that; `limit`: how many questions there are; `prefix`: what stands before each question; `answer`:
    what the environment states as the right one.
    """

    id = "digits"

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number in range(self.section.get("limit", 100_000)):
            question = f"{self.section.get('prefix', '')}{(number * 7919 + seed * 104_729) % 100_003}="
            task_id = sha256(question.encode()).hexdigest()[:16]
            if (task_id[-1] in "0123") == (split == "heldout"):
                prompt = ({"role": "user", "content": question},)
                data = {"answer": self.section.get("answer", question.strip("=")[::-1])}
                yield Task(task_id, prompt, data, difficulty=float(number % 2))

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        first = task.task_id[0]
        if first in self.section.get("raises", "") or transcript.text[:1] in self.section.get(
            "raises_on", []
        ):
            raise ValueError("no idea what this is")
        if first in self.section.get("hangs", ""):
            time.sleep(3600)
        if first in self.section.get("refuses", ""):
            return Failure("environment", "nobody can judge this")
        if "equal" in self.section:
            return Score(self.section["equal"])
        text = transcript.text
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        kind = "digits" if share > 0.5 else "other"
        return Score(share, {"digits": share}, {f"strategy/{kind}": 1.0})


class Ends(Digits):
    """Worth 1 for an answer that has a digit, so that a fresh policy is right now and then; else 0."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(any(character.isdigit() for character in transcript.text)))


class Silent(Digits):
    """Asks nothing."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for task in super().tasks(split, seed):
            yield Task(task.task_id, ({"role": "user", "content": ""},), task.data)
