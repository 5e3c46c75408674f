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
from perilune.environments.builtin.oolong.questions import Question, evaluate
from perilune.environments.builtin.oolong.records import Record, draw_records
from perilune.environments.builtin.oolong.settings import FEWEST_LINES, OolongSettings
from perilune.environments.core.protocol import Split
from perilune.environments.core.splits import new_draws
from perilune.files import canonical_json, sha256_bytes

Data = Mapping[str, Any]
SAMPLED_LINES = 1000
_STYLES: Mapping[str, ModuleType] = {"compact": compact, "natural": natural}


def draw_tasks(settings: OolongSettings, split: Split, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ids and data of distinct tasks. All tasks about a context are of one split, one after another."""
    described = (_describe(settings, random.Random(f"oolong/{seed}/{index}")) for index in itertools.count())
    by_digest = ((sha256_bytes(canonical_json(context)), context) for context in described)
    for digest, context in new_draws(split, by_digest):
        records = list(draw_records(context))
        asked: set[str] = set()
        for number in range(settings.questions):
            task = _draw(settings, context, records, number)
            task_id = digest[:24] + sha256_bytes(canonical_json(task["question"]))[:8]
            if task_id not in asked:
                asked.add(task_id)
                yield task_id, task


def _draw(settings: OolongSettings, context: Data, records: Sequence[Record], number: int) -> dict[str, Any]:
    """The data of a task: the description of its context, a question, and the right answer as text.

    Args:
        context: "seed", "lines", "users", "zipf" and "style".
        number: which question about the context, from 0.
    """
    draw = random.Random(f"oolong/question/{context['seed']}/{number}")
    asked, answer = draw_question(settings, records, draw)
    written = write_answer(asked, answer, _STYLES[context["style"]])
    return {**context, "question": asdict(asked), "answer": written}


def context_lines(data: Data) -> Iterator[str]:
    """Yield the lines of the context, each with its line end."""
    style = _STYLES[data["style"]]
    for record in draw_records(data):
        yield style.line(record) + "\n"


def question(data: Data) -> str:
    """The question, with all that an answer needs to know."""
    asked: str = _STYLES[data["style"]].ask(Question(**data["question"]))
    return asked


def gold(data: Data) -> str:
    """The right answer."""
    return str(data["answer"])


def line_labels(data: Data) -> Iterator[str]:
    """Yield the label of each line of the context, as answers write it."""
    labels = _STYLES[data["style"]].LABELS
    for record in draw_records(data):
        yield labels[record.label]


def gold_of_part(data: Data, start: int, stop: int) -> str | None:
    """The right answer to the question about the lines from `start` to before `stop`; None if several tie."""
    asked = Question(**data["question"])
    answer = evaluate(asked, list(itertools.islice(draw_records(data), start, stop)))
    return None if answer is None else write_answer(asked, answer, _STYLES[data["style"]])


def score_answer(data: Data, answer: str) -> float:
    """The score of an answer without any mark, from 0 to 1; see `score_field`."""
    return score_field(Question(**data["question"]), gold(data), answer)


def direct_prompt(data: Data) -> str:
    """The whole context and the question."""
    prompt: str = _STYLES[data["style"]].context_and_question("".join(context_lines(data)), question(data))
    return prompt


def marked(data: Data, answer: str) -> str:
    """An answer as the output of a single turn."""
    mark: str = _STYLES[data["style"]].MARK
    return mark + answer


def read_field(data: Data, text: str) -> str | None:
    """The answer in the output of a single turn; None if it has none."""
    field: str | None = _STYLES[data["style"]].read_field(text)
    return field


def _describe(settings: OolongSettings, draw: random.Random) -> dict[str, Any]:
    length = draw.choice(settings.lengths)
    lines = round(length / tokens_per_line(settings)) if settings.unit == "tokens" else length
    return {"seed": draw.getrandbits(48), "lines": max(lines, FEWEST_LINES), **_shape(settings)}


def _shape(settings: OolongSettings) -> dict[str, Any]:
    return {"users": settings.users, "zipf": settings.zipf, "style": settings.style}


@cache
def tokens_per_line(settings: OolongSettings) -> float:
    """Estimated tokens of a line, on average over a sample."""
    style = _STYLES[settings.style]
    sample = draw_records({"seed": 0, "lines": SAMPLED_LINES, **_shape(settings)})
    total: int = sum(style.tokens(style.line(record)) for record in sample)
    return total / SAMPLED_LINES
