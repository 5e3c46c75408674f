"""What a policy is made to say when it is asked for its answer before it is done."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.environments.core.protocol import Environment, Task


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The right answer to a task, and how it is given.

    Nothing of it is ever put where a policy that learns can read it.

    Attributes:
        lead: text after which an answer follows at once, whatever was written before.
        forms: texts of the right answer, the usual one first.
        opens: texts with which an answer that the policy gives by itself begins.
    """

    lead: str
    forms: tuple[str, ...]
    opens: tuple[str, ...]


def reference_answer(environment: Environment, task: Task) -> ReferenceAnswer | None:
    """The answer that `environment` states for `task`; None when it does not, or never does."""
    of_task = getattr(environment, "reference_answer", None)
    found: ReferenceAnswer | None = None if of_task is None else of_task(task)
    return found
