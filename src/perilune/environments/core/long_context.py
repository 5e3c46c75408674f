"""Long contexts, which an agent explores instead of reading."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from perilune.environments.core.protocol import Task

SAMPLE_LINES = 2


class Glimpse(NamedTuple):
    """The first view of a context: its size and first lines.

    Attributes:
        characters: counts all characters, which may take as long as drawing the context.
    """

    lines: int
    first: Sequence[str]
    characters: Callable[[], int]


class LongContexts(Protocol):
    """An environment of long contexts: methods besides the protocol.

    It may also have `glimpse(task)`, if that is cheaper than the context, and `bare_tasks(split, seed)`: the
    tasks without prompts that hold the context.
    """

    def context(self, task: Task) -> str:
        """Return the context of a task."""

    def question(self, task: Task) -> str:
        """Return the question about the context."""


def make_glimpse(context: str) -> Glimpse:
    lines = context.count("\n") + (not context.endswith("\n"))
    return Glimpse(lines, list(islice(context.splitlines(), SAMPLE_LINES)), context.__len__)
