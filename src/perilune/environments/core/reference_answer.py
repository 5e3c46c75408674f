"""The right answers that environments state: for process rewards that ask for them early, and for reports."""

from dataclasses import dataclass

from perilune.environments.core.protocol import Environment, Task, Transcript


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The reference answer to a task and the text that introduces an answer. It is never shown to the policy
    that trains.

    Attributes:
        lead: text that makes the policy answer at once.
        forms: spellings of the right answer, the usual one first.
        opens: texts with which the policy begins an answer by itself.
    """

    lead: str
    forms: tuple[str, ...]
    opens: tuple[str, ...]


def reference_answer(environment: Environment, task: Task) -> ReferenceAnswer | None:
    of_task = getattr(environment, "reference_answer", None)
    answer: ReferenceAnswer | None = None if of_task is None else of_task(task)
    return answer


def expected_answer(environment: Environment, task: Task) -> str:
    """Return a right answer of a task, for people who read the episode; "" if the environment states none.

    It is what the environment's method `expected_answer` returns, or else the text of its `gold` for a task
    with one turn. For several turns it is `task.data["answer"]`, or else all actions of `gold`, one a line.
    """
    of_task = getattr(environment, "expected_answer", None)
    if of_task is not None:
        return str(of_task(task))
    answer, find_gold = task.data.get("answer"), getattr(environment, "gold", None)
    if isinstance(answer, str) and (find_gold is None or getattr(environment, "max_turns", 1) > 1):
        return answer
    gold: Transcript | None = find_gold and find_gold(task)
    return "" if gold is None else "\n".join(gold.actions)
