"""Digits with a reference answer: {"id": "factory", "factory": "process_environments:Stated"}."""

from task_environments import Digits

from perilune.environments.core.protocol import Outcome, Score, Task, Transcript
from perilune.environments.core.reference_answer import ReferenceAnswer


class Stated(Digits):
    """The reward is 1 if the text has a digit. The reference answer begins with ";"."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(any(character.isdigit() for character in transcript.text)))

    def reference_answer(self, task: Task) -> ReferenceAnswer:
        return ReferenceAnswer(";", (task.data["answer"],), (";",))
