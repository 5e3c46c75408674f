"""The interface to a machine: run one command, with its input and output.

Everything else (staging, observing, pulling, stopping) is a command of the runner that is sent along, so a
new kind of machine has to implement one method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from perilune.errors import PeriluneError, RequestError

MAX_OUTPUT_BYTES = 1 << 28  # of a command; no operation of the runner writes as much
TOO_MUCH_OUTPUT = f"too much output: more than {MAX_OUTPUT_BYTES >> 20} MiB"


class HostUnreachableError(PeriluneError):
    """It is unknown whether the command ran. Never a reason to destroy anything."""


class HostRefusedError(RequestError):
    """The machine is the wrong one or refuses access: nothing ran, and a retry is useless."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command that ran to its end.

    Attributes:
        exit_code: 0 is success; 128 + N is signal N.
        output: stdout, unless a sink took it.
        errors: the end of stderr, for people.
    """

    exit_code: int
    output: bytes
    errors: str


class Host(Protocol):
    """A machine.

    Attributes:
        name: for messages, such as "local", "ssh:box" or "fake:machine-3".
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
        """Run `command` on the machine and wait for its end.

        Args:
            command: argument list; no shell splits or expands it.
            source: its stdin; None is empty.
            sink: receives its stdout; None keeps it in the answer.
            timeout: seconds after which the machine counts as unreachable. The command may continue to run.

        Raises:
            HostUnreachableError: the connection failed before, while or after the command ran, or its output
                exceeded `MAX_OUTPUT_BYTES`.
            HostRefusedError: the machine is the wrong one or refuses access.
        """
