"""Aggregation over long contexts in a single turn: all lines and the question are in the prompt."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from perilune.environments.builtin.oolong import second_opinion
from perilune.environments.builtin.oolong.settings import OolongSpec
from perilune.environments.builtin.oolong.tasks import (
    context_lines,
    direct_prompt,
    draw_tasks,
    gold,
    mark_answer,
    question,
    read_field,
    score_answer,
)
from perilune.environments.core.long_context import SAMPLE_LINES, Glimpse
from perilune.environments.core.protocol import Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn


class OolongEnvironment(SingleTurn):
    """Reward 1 for the right answer. The term "official" is the score of the OOLONG benchmark."""

    Spec = OolongSpec

    def __init__(self, spec: OolongSpec) -> None:
        self.spec = spec
        self.id = "oolong"
        self.own_format = "after ';'" if spec.style == "compact" else ""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for task in self.bare_tasks(split, seed):
            yield replace(task, prompt=({"role": "user", "content": direct_prompt(task.data)},))

    def bare_tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield the tasks without their prompts, which hold the whole context."""
        for task_id, data in draw_tasks(self.spec, split, seed):
            task_data = {**data, "actions": [mark_answer(data, gold(data))]}
            yield Task(task_id, (), task_data, difficulty=float(data["lines"]))

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Score an answer. One that the token limit cut off scores 0."""
        field = read_field(task.data, transcript.text) if transcript.finished else None
        official = 0.0 if field is None else score_answer(task.data, field)
        find = task.data["question"]["find"]
        return Score(float(official == 1.0), {"official": official}, {f"official/{find}": official})

    def gold(self, task: Task) -> Transcript:
        return Transcript(mark_answer(task.data, gold(task.data)))

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        """Return a second opinion for audits: reads lines and question as text, in separate code."""
        field = read_field(task.data, transcript.text) if transcript.finished else None
        data = task.data
        return field is not None and second_opinion.is_right(
            data["style"], context_lines(data), question(data), field
        )

    def context(self, task: Task) -> str:
        """Return the lines, for an agent that explores them with code."""
        return "".join(context_lines(task.data))

    def glimpse(self, task: Task) -> Glimpse:
        """Return the first lines alone, and how many there are."""
        first = [line.rstrip("\n") for line in islice(context_lines(task.data), SAMPLE_LINES)]
        return Glimpse(task.data["lines"], first, lambda: sum(map(len, context_lines(task.data))))

    def question(self, task: Task) -> str:
        return question(task.data)

    def reply(self, task: Task, answer: str) -> str:
        """Return the text that `score` takes for this answer."""
        return mark_answer(task.data, answer)
