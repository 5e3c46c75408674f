"""A process that builds an environment once and forks a worker for each batch. No worker outlives its batch.

The server never sees an answer of a policy, because each worker has its own socket to the scorer. Any change
that an answer makes to a worker ends with that worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from perilune.errors import RequestError
from perilune.sandbox.channel import BrokenChannelError, Channel, ProcessSocket
from perilune.verifiers.confinement import ScorerLimits

PROCESS_NAME = "the scorer's process"
_END_TIMEOUT_S = 10.0  # time for an environment to close, and for the kernel to end a killed process
_LOG = logging.getLogger(__name__)


class ForkServer:
    """The server process, which starts at once. `open` waits until it has built the environment."""

    def __init__(self, spec: Mapping[str, Any], limits: ScorerLimits) -> None:
        self._limits = limits
        self._is_confined: bool | None = None  # None until the server is ready
        self._channel = Channel("perilune.verifiers.worker", PROCESS_NAME, limits.answer_bytes)
        self._channel.send({"spec": spec, "limits": asdict(limits)})

    @property
    def process_id(self) -> int:
        return self._channel.process_id

    def open(self) -> bool:
        """Wait until the environment is built. Return whether its workers are confined.

        Raises:
            RequestError: if the environment's section is wrong.
            KilledError, BrokenChannelError: if the process died or took too long.
        """
        if self._is_confined is not None:
            return self._is_confined
        answer = self._channel.receive(self._limits.start_seconds)
        if "refused" in answer:
            what, where, remedy = answer["refused"]
            raise RequestError(what, where=where, remedy=remedy)
        if answer["missing"]:
            walls = ", ".join(answer["missing"])
            _LOG.warning("this machine's kernel cannot confine the scorer completely; missing: %s", walls)
        self._is_confined = bool(answer["confined"])
        return self._is_confined

    def fork(self) -> Worker:
        """Fork a new worker, which has scored nothing yet.

        Raises:
            RequestError, KilledError, BrokenChannelError: as `open`.
        """
        self.open()
        worker = Worker(self, self._limits.answer_bytes)
        self._channel.send_descriptors({"fork": True}, worker.child_ends)
        worker.close_child_ends()
        try:
            worker.process_id = int(self._channel.receive(self._limits.start_seconds)["process"])
            worker.receive(self._limits.start_seconds)
        except BrokenChannelError:
            worker.close()
            raise
        return worker

    def end(self, process: int) -> int:
        """Kill a worker if it is still running, and return its exit code.

        Raises:
            BrokenChannelError: if the server has ended, which also ends its workers.
        """
        self._channel.send({"end": process})
        status = self._channel.receive(_END_TIMEOUT_S)["status"]
        return os.waitstatus_to_exitcode(int(status))

    def close(self) -> None:
        """Kill the server and its workers."""
        self._channel.close()


class Worker(ProcessSocket):
    """A process that was forked for one batch.

    Attributes:
        process_id: the worker's process id; 0 after `exit_code` or `close`.
    """

    def __init__(self, server: ForkServer, answer_bytes: int) -> None:
        super().__init__(PROCESS_NAME, answer_bytes)
        self.process_id = 0
        self._server = server

    def close_environment(self) -> None:
        """Close the worker's sessions and environment, unless this takes too long."""
        with contextlib.suppress(BrokenChannelError):
            self.send({"items": None})
            until = time.monotonic() + _END_TIMEOUT_S
            while time.monotonic() < until and self.receive(until - time.monotonic()):
                pass  # late answers to an interrupted call; the last answer is empty

    def close(self) -> None:
        try:
            self.exit_code()
        except BrokenChannelError:
            pass  # the server has ended, and the worker with it
        finally:
            super().close()

    def exit_code(self) -> int | None:
        """End the worker and return its exit code; None if it had ended before."""
        process, self.process_id = self.process_id, 0
        return self._server.end(process) if process else None
