"""The oolong teacher: right answers to questions about a context, at once or after notes on its lines."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.builtin.oolong.compact import LABELS, render_month
from perilune.environments.builtin.oolong.questions import Question
from perilune.environments.builtin.oolong.records import Record, draw_records
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class OolongTeacher(ScriptedTeacher):
    """Writes the right answer.

    * worked: notes on the lines that the question is about, then the answer. A note is the label of a line.
      If the question asks for a user, a month or pairs, only lines of the asked label have a note: their user
      or month,
    * direct: the answer at once.
    """

    name = "oolong"
    strategies: ClassVar = {"worked": 1.0, "direct": 0.0}
    supports = ("zipf", "the oolong environment")

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the answer.

        Raises:
            RequestError: when the task is in English with the strategy worked.
        """
        (answer,) = task.data["actions"]
        if strategy == "direct":
            return (answer,)
        if task.data["style"] != "compact":
            what = "the strategy worked writes notes, but answers in style natural have no notes"
            raise RequestError(what, where="strategies.worked", remedy="set style: compact")
        asked = Question(**task.data["question"])
        return (write_notes(asked, draw_records(task.data)) + answer,)


def write_notes(asked: Question, records: Iterable[Record]) -> str:
    """Return notes on the lines that the question is about."""
    return "".join(_note(asked, record) for record in records if asked.includes(record))


def _note(asked: Question, record: Record) -> str:
    if asked.find in ("count", "most", "least", "compare"):
        return LABELS[record.label]
    if record.label != asked.label and not (record.label == asked.other and asked.relation == "each"):
        return ""
    if asked.find == "month":
        return render_month(record.date // 100)
    return f"{LABELS[record.label]}{record.user}" if asked.relation == "each" else f"{record.user} "
