"""System messages before prompts, for example for a teacher but not for its student."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perilune.environments.core.protocol import Task


def prepend_system_message(messages: Sequence[Mapping[str, str]], system: str) -> list[Mapping[str, str]]:
    """Return the messages with `system` before them as a system message; unchanged if `system` is empty."""
    return [{"role": "system", "content": system}, *messages] if system else list(messages)


def add_system_message(tasks: Sequence[Task], system: str) -> list[Task]:
    """Return the tasks with the system message `system` before their prompts. Scores do not depend on it."""
    return [replace(task, prompt=tuple(prepend_system_message(task.prompt, system))) for task in tasks]
