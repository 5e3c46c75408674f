"""What the execution plane asks of another machine: run one command, with its input and its output.

Everything else (staging, looking, pulling, stopping) is a command of the runner that travels with the bundle,
so that a new kind of machine has one method to offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from perilune.errors import PeriluneError, RequestError


class HostUnreachableError(PeriluneError):
    """Whether the command ran is not known. Never a reason to destroy anything."""


class HostRefusedError(RequestError):
    """It is the wrong machine, or lets nobody in: nothing was run, and a retry is vain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a command that was run to its end.

    Attributes:
        exit_code: 0 is success; a signal's is 128 + its number.
        output: of stdout, unless a sink took it.
        errors: the last of stderr, for people.
    """

    exit_code: int
    output: bytes
    errors: str


class Host(Protocol):
    """A machine.

    Attributes:
        name: what people call it, as "local", "ssh:box" or "fake:machine-3".
    """

    name: str

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        """Run `command` there and wait for its end.

        Args:
            command: argument list; no shell ever splits or expands it.
            source: what it reads from stdin; None is nothing.
            sink: takes its stdout as it comes; None keeps it in the answer.
            timeout: seconds after which the machine counts as unreachable. What was started may live on.

        Raises:
            HostUnreachableError: when the way there is cut, before, while or after the command ran.
            HostRefusedError: when the machine is the wrong one or lets nobody in.
        """
        ...
