"""The texts that a recipe's model reads and writes: tasks of environments, and rows of the user's files."""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from perilune.data.examples import Conversation, Example, read_comparison, read_demonstration
from perilune.data.sources import Row, read_rows
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.registry import make_environment, part_sections
from perilune.environments.core.replay import replay_conversation
from perilune.models.text.tokenizer import PRINTABLE_ASCII

SAMPLED_TASKS = 8  # training tasks; some environments take a second for one
MAX_TEXTS = 50_000  # texts on which a tokenizer is trained
_CHARACTERS = frozenset(PRINTABLE_ASCII)


class Text(NamedTuple):
    """A text and its origin: FILE:LINE, or the environment, task number and role of a message."""

    place: str
    text: str


def find_foreign_character(text: str) -> str | None:
    """Return the first character that the character tokenizer of a new model lacks."""
    return None if _CHARACTERS.issuperset(text) else next(char for char in text if char not in _CHARACTERS)


def find_missing_character(texts: Iterator[Text], lacks: Callable[[str], str | None]) -> str | None:
    """Describe the first character that `lacks` finds in a text, and its place; None if there is none.

    Texts that cannot be read are no error here: the stage that uses them reports the error.
    """
    try:
        for place, text in texts:
            if (character := lacks(text)) is not None:
                return f"no token for {character!r} in {place}"
    except Exception:  # an environment's own code may raise anything
        return None
    return None


def read_environment_texts(section: Mapping[str, Any], tasks: int = SAMPLED_TASKS) -> Iterator[Text]:
    """Yield the messages of an environment's first training tasks, with the right answers that it knows.

    An environment that reads the user's own files knows the characters of all rows, and each comes as a text.
    The parts of a mixture come one by one. The tasks are those of seed 0, so that all seeds of a recipe get
    the same tokenizer.
    """
    for part in part_sections(section).values() or (section,):
        environment = make_environment(part)
        for character, place in getattr(environment, "characters", dict)().items():
            yield Text(place, character)
        for number, task in enumerate(islice(environment.tasks("train", 0), tasks), 1):
            for message in _task_messages(environment, task):
                place = f"{environment.id}, training task {number}, message of the {message['role']}"
                yield Text(place, message["content"])


def _task_messages(environment: Environment, task: Task) -> tuple[Mapping[str, str], ...]:
    """Return the conversation with the right answer, or its beginning and the answers in the task's data.

    Sessions that need the network or other processes (`confined = False`) are not opened.
    """
    opens = getattr(environment, "confined", True)
    gold = getattr(environment, "gold", lambda _: None)(task)
    if gold is not None and opens:
        return replay_conversation(environment, task, gold)
    stated = task.data.get("actions") or (task.data.get("answer"),)
    answers = [{"role": "assistant", "content": text} for text in stated if isinstance(text, str)]
    if not opens or getattr(environment, "max_turns", 1) == 1:
        return (*task.prompt, *answers)
    session = environment.reset(task, 0)
    try:
        return (*task.prompt, *session.observation.messages, *answers)
    finally:
        session.close()


def read_data_texts(path: Path) -> Iterator[Text]:
    """Yield the texts of training rows: of demonstrations, or of preferences.

    Raises:
        RequestError: naming the file, and the line or row that cannot be read.
    """
    for row in read_rows(path):
        yield from (
            Text(row.place, text) for example in _row_examples(row) for text in _example_texts(example)
        )


def read_training_texts(path: Path) -> Iterator[str]:
    """Yield the first texts of training rows, for the training of a tokenizer."""
    return (item.text for item in islice(read_data_texts(path), MAX_TEXTS))


def _row_examples(row: Row) -> tuple[Example, ...]:
    if "chosen" not in row.value:
        return (read_demonstration(row),)
    pair = read_comparison(row)
    return pair.chosen, pair.rejected


def _example_texts(example: Example) -> Iterator[str]:
    if isinstance(example, Conversation):
        for message in (*example.opening, *example.turns):
            yield message["content"]
            yield from (json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", ()))
    else:
        yield from (example.prompt, example.completion)
