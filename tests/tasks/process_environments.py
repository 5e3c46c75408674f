"""Digits with a stated answer: {"id": "factory", "factory": "process_environments:Stated"}."""

from task_environments import Digits

from perilune.environments.core.protocol import Outcome, Score, Task, Transcript
from perilune.environments.core.reference_answer import ReferenceAnswer


class Stated(Digits):
    """Worth 1 for an answer that has a digit; ";" begins it."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(any(character.isdigit() for character in transcript.text)))

    def reference_answer(self, task: Task) -> ReferenceAnswer:
        return ReferenceAnswer(";", (task.data["answer"],), (";",))
