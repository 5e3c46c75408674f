"""Reference answers, for process rewards that ask the policy for its answer early."""

from dataclasses import dataclass

from perilune.environments.core.protocol import Environment, Task


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
