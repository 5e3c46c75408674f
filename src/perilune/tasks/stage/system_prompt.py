"""Prompts with a system message in front: what a teacher is told and the student is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perilune.environments.core.protocol import Task


def hinted_messages(messages: Sequence[Mapping[str, str]], system: str) -> list[Mapping[str, str]]:
    """The messages, after `system` as a system message when it says anything."""
    return [{"role": "system", "content": system}, *messages] if system else list(messages)


def hinted(tasks: Sequence[Task], system: str) -> list[Task]:
    """The tasks, their prompts after `system`; how they are judged does not change."""
    return [replace(task, prompt=tuple(hinted_messages(task.prompt, system))) for task in tasks]
