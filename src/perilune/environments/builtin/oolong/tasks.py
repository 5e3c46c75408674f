"""Aggregation tasks over long contexts. The functions that environments build on.

A task's data describes its context in a few numbers. The lines are drawn again when they are needed, and a
context of millions of tokens never has to be stored.

    settings = OolongSettings(lengths=(2000,))
    task_id, data = next(draw_tasks(settings, "train", seed=0))
    file.writelines(context_lines(data))
    question(data), gold(data), score_answer(data, "17")
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import Any

from perilune.environments.builtin.oolong import compact, natural
from perilune.environments.builtin.oolong.answers import score_field, write_answer
from perilune.environments.builtin.oolong.drawing import draw_question
from perilune.environments.builtin.oolong.questions import Question
from perilune.environments.builtin.oolong.records import Record, draw_records
from perilune.environments.builtin.oolong.settings import FEWEST_LINES, OolongSettings
from perilune.environments.core.protocol import Split
from perilune.environments.core.splits import select_unique
from perilune.files import canonical_json, sha256_bytes

TaskData = Mapping[str, Any]
SAMPLED_LINES = 1000
_STYLES: Mapping[str, ModuleType] = {"compact": compact, "natural": natural}


def draw_tasks(settings: OolongSettings, split: Split, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ids and data of distinct tasks. All tasks about a context are of one split, one after another."""
    contexts = (
        _draw_context(settings, random.Random(f"oolong/{seed}/{index}")) for index in itertools.count()
    )
    by_digest = ((sha256_bytes(canonical_json(context)), context) for context in contexts)
    for digest, context in select_unique(split, by_digest):
        records = list(draw_records(context))
        task_ids: set[str] = set()
        for number in range(settings.questions):
            task = _draw_task(settings, context, records, number)
            task_id = digest[:24] + sha256_bytes(canonical_json(task["question"]))[:8]
            if task_id not in task_ids:
                task_ids.add(task_id)
                yield task_id, task


def _draw_task(
    settings: OolongSettings, context: TaskData, records: Sequence[Record], number: int
) -> dict[str, Any]:
    """Return the data of a task: the description of its context, a question, and the right answer as text.

    Args:
        context: "seed", "lines", "users", "zipf" and "style".
        number: which question about the context, from 0.
    """
    draw = random.Random(f"oolong/question/{context['seed']}/{number}")
    question, answer = draw_question(settings, records, draw)
    written = write_answer(question, answer, _STYLES[context["style"]])
    return {**context, "question": asdict(question), "answer": written}


def context_lines(data: TaskData) -> Iterator[str]:
    """Yield the lines of the context, each with its line end."""
    style = _STYLES[data["style"]]
    for record in draw_records(data):
        yield style.render_line(record) + "\n"


def question(data: TaskData) -> str:
    """Return the question, with all that an answer needs to know."""
    text: str = _STYLES[data["style"]].render_question(Question(**data["question"]))
    return text


def gold(data: TaskData) -> str:
    return str(data["answer"])


def line_labels(data: TaskData) -> Iterator[str]:
    """Yield the label of each line of the context, as answers write it."""
    labels = _STYLES[data["style"]].LABELS
    for record in draw_records(data):
        yield labels[record.label]


def score_answer(data: TaskData, answer: str) -> float:
    """Return the score of an answer without any mark, from 0 to 1; see `score_field`."""
    return score_field(Question(**data["question"]), gold(data), answer)


def direct_prompt(data: TaskData) -> str:
    prompt: str = _STYLES[data["style"]].render_prompt("".join(context_lines(data)), question(data))
    return prompt


def mark_answer(data: TaskData, answer: str) -> str:
    """Return an answer as the output of a single turn."""
    mark: str = _STYLES[data["style"]].ANSWER_MARK
    return mark + answer


def read_field(data: TaskData, text: str) -> str | None:
    """Return the answer in the output of a single turn; None if it has none."""
    field: str | None = _STYLES[data["style"]].read_field(text)
    return field


def _draw_context(settings: OolongSettings, draw: random.Random) -> dict[str, Any]:
    length = draw.choice(settings.lengths)
    lines = round(length / tokens_per_line(settings)) if settings.unit == "tokens" else length
    return {"seed": draw.getrandbits(48), "lines": max(lines, FEWEST_LINES), **_shared_settings(settings)}


def _shared_settings(settings: OolongSettings) -> dict[str, Any]:
    return {"users": settings.users, "zipf": settings.zipf, "style": settings.style}


@cache
def tokens_per_line(settings: OolongSettings) -> float:
    """Return the estimated tokens of a line, on average over a sample."""
    style = _STYLES[settings.style]
    sample = draw_records({"seed": 0, "lines": SAMPLED_LINES, **_shared_settings(settings)})
    total: int = sum(style.count_tokens(style.render_line(record)) for record in sample)
    return total / SAMPLED_LINES
