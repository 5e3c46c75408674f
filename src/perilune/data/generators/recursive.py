"""The recursive teacher: Python that explores a context of the environment oolong with sub-agents."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perilune.data.generators.oolong import write_notes
from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.builtin.oolong.compact import ANSWER_MARK, LABELS, SIGNS, render_month
from perilune.environments.builtin.oolong.questions import AFTER_ALL, BEFORE_ALL, Question
from perilune.environments.builtin.oolong.records import draw_records
from perilune.environments.builtin.oolong.tasks import gold, line_labels, question
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError

_RANGE_LINES = 8


class RecursiveTeacher(ScriptedTeacher):
    """Writes one episode per task, for compact prompts and compact contexts.

    * lines: asks about each line that matters, at the same time, and computes the answer in code,
    * ranges: asks for the labels of eight lines at a time, and answers (tool: ask),
    * whole: asks one sub-agent, which reads the whole context with notes,
    * guess: the right answer at once, which a policy that sees two lines could not know.
    """

    name = "recursive"
    strategies: ClassVar = {"lines": 0.2, "ranges": 0.0, "whole": 0.4, "guess": 0.4}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the actions of the strategy.

        Raises:
            RequestError: when the task is of another environment, or not compact.
        """
        data: Mapping[str, Any] = task.data.get("task", {})
        if data.get("style") != "compact":
            raise RequestError(
                "the recursive teacher supports the environment recursive with compact tasks of oolong",
                where="teacher",
                remedy="set prompt: compact and tasks: {id: oolong, style: compact}",
            )
        asked, answer = Question(**data["question"]), ANSWER_MARK + gold(data)
        if strategy == "guess":
            return (answer,)
        if strategy == "ranges":
            labels = "".join(line_labels(data))
            starts = range(0, len(labels), _RANGE_LINES)
            parts = [labels[start : start + _RANGE_LINES] for start in starts]
            asks = [f"{start + 1}-{start + len(part)}" for start, part in zip(starts, parts, strict=True)]
            return (*(text for pair in zip(asks, parts, strict=True) for text in pair), answer)
        if strategy == "whole":
            reply = write_notes(asked, draw_records(data)) + answer
            return (_answer_code(f"ask(C+{question(data)!r}).split(';')[1]"), reply)
        records = zip(draw_records(data), line_labels(data), strict=True)
        return (write_count_code(asked), *(label for record, label in records if asked.includes(record)))


def write_count_code(asked: Question) -> str:
    """Return a line of Python that asks for the label of each line, and computes the answer."""
    conditions = _line_conditions(asked)
    lines = f"[l for l in C.split() if {conditions}]" if conditions else "C.split()"
    label, other = repr(LABELS[asked.label]), repr(LABELS[asked.other])
    match asked.find:
        case "count":
            return _answer_code(f"ask_all({lines}).count({label})")
        case "most" | "least":
            best = "max" if asked.find == "most" else "min"
            return f"a=ask_all({lines});" + _answer_code(f"{best}({''.join(LABELS)!r},key=a.count)")
        case "compare":
            signs = SIGNS[0] + SIGNS[1] + SIGNS[-1]
            difference = f"a.count({label})-a.count({other})"
            return f"a=ask_all({lines});n={difference};" + _answer_code(f"{signs!r}[(n>0)-(n<0)]")
        case "user" | "month":
            key = "l[1:-2]" if asked.find == "user" else "l[0]"
            entries = f"u=[{key} for l,a in zip(L,ask_all(L))if a=={label}];"
            return f"L={lines};{entries}" + _answer_code("max(u,key=u.count)")
    pairs = f"[f'{{i}}-{{j}}'for i in U for j in U if i<j and {_pair_condition(asked)}]"
    content = f"len({pairs})" if asked.find == "pairs_count" else f"','.join({pairs})"
    tally = "n=Counter(zip([int(l[1:-2])for l in L],ask_all(L)));U=sorted({i for i,_ in n})"
    return f"from collections import*;L={lines};{tally};" + _answer_code(content)


def _pair_condition(asked: Question) -> str:
    """Return the condition on users i and j, whose lines of label x are n[i,x] and n[j,x]."""
    label, other, number = repr(LABELS[asked.label]), repr(LABELS[asked.other]), asked.number
    match asked.relation:
        case "both":
            return f"min(n[i,{label}],n[j,{label}])>={number}"
        case "each":
            first = f"min(n[i,{label}],n[j,{other}])>={number}"
            return f"({first} or min(n[j,{label}],n[i,{other}])>={number})"
        case "equal":
            return f"n[i,{label}]==n[j,{label}]>={number}"
    return f"n[i,{label}]>0<n[j,{label}]and n[i,{label}]+n[j,{label}]=={number}"


def _line_conditions(asked: Question) -> str:
    conditions = [f"l[1:-2]=={str(asked.user)!r}"] if asked.user else []
    if asked.since > BEFORE_ALL:
        conditions.append(f"l[0]>={render_month(asked.since // 100)!r}")
    if asked.until < AFTER_ALL:
        conditions.append(f"l[0]<{render_month(asked.until // 100)!r}")
    return " and ".join(conditions)


def _answer_code(content: str) -> str:
    return f"answer.update(content={content},ready=1)"
