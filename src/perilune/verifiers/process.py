"""A process that runs an environment's code, replaced when it breaks: what it was at is lost, and no more."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from perilune.environments.core.protocol import Failure, Score
from perilune.environments.core.registry import with_absolute_paths
from perilune.errors import ProcessLostError, RequestError, WorkFailedError
from perilune.sandbox.channel import BrokenChannelError, KilledError
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.fork_server import NAME, ForkServer, Worker

CHUNK = 64  # calls sent together
AGAIN_EVERY = 4  # batches, on average
STARTS = 3  # of a server that somebody kills
_UNSTEADY = (
    "the scorer gave one answer %s in a batch and %s in a process of its own; from now on every answer has a"
    " process of its own. Run `perilune environments audit` to see whether answers can change the scorer"
)
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Call(Protocol):
    """One thing that is asked of the process."""

    @property
    def boundary(self) -> str:
        """Who has failed when the process breaks over it."""
        ...

    @property
    def is_verdict(self) -> bool:
        """Whether it judges a whole transcript, and needs nothing that the process did before."""
        ...

    @property
    def steps(self) -> int:
        """How many items' time it may take, asked before `document`."""
        ...

    def document(self, generation: int) -> Mapping[str, Any]:
        """The request, for the process of that generation."""
        ...

    def read(self, answer: Mapping[str, Any]) -> Any:
        """What the answer says; the process that wrote it may be hostile.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: when it says nothing that makes sense.
        """
        ...


class EnvironmentProcess:
    """One environment, built once, and a worker for each batch of calls; a worker that breaks is replaced.

    A worker that gives verdicts has judged nothing before its batch. When a batch pays more than any before,
    and for one in four of the other batches at random, one paid answer is judged again by a worker of its
    own. Where the two verdicts differ, an answer may have changed the worker, or the scorer is not
    deterministic: then, and in later batches, every answer has a worker of its own.

    Attributes:
        generation: of the worker that holds sessions; what a worker knew dies with it.
        restarts: how many workers broke.
        judges_alone: whether every answer has a worker of its own.
    """

    def __init__(self, spec: Mapping[str, Any], limits: ScorerLimits) -> None:
        self.generation = self.restarts = 0
        self.judges_alone = False
        self._spec = with_absolute_paths(spec, lambda _: Path.cwd())  # the process has a folder of its own
        self._limits = limits
        self._server: ForkServer | None = ForkServer(self._spec, limits)
        self._holder: Worker | None = (
            None  # of sessions, and of all calls where the environment is not confined
        )
        self._sessions = 0
        self._most = -math.inf  # mean reward of a batch so far

    def ask(self, calls: Sequence[Call], until: float = math.inf) -> list[Any]:
        """What each call's `read` made of its answer, in order, or the Failure of its boundary.

        Args:
            until: moment of the monotonic clock at which the rest is given up.

        Raises:
            RequestError: when the environment's section is wrong.
            WorkFailedError: when the process cannot start.
        """
        if not calls:
            return []
        if not (calls[0].is_verdict and self._is_confined()):
            return self._in_one_worker(calls, until, is_kept=True)
        if self.judges_alone:
            return self._alone(calls, until)
        found = self._in_one_worker(calls, until)
        rewards = _rewards(found)
        if len(calls) > 1 and self._is_due(rewards):
            index = _one_paid(rewards)
            again = self._in_one_worker([calls[index]], until)[0]
            if again != found[index] and time.monotonic() < until:
                _LOG.warning(_UNSTEADY, found[index], again)
                self.judges_alone = True
                return self._alone(calls, until)
        return found

    def begin_sessions(self, count: int) -> None:
        """So many sessions begin, in the worker of those that are open, else in a new one."""
        self._sessions += count

    def end_sessions(self, count: int) -> None:
        """So many sessions have ended, and with the last of them their worker."""
        self._sessions -= count
        if self._sessions <= 0 and self._holder is not None and self._is_confined():
            self._holder.close()
            self._holder = None
            self.generation += 1

    def close(self) -> None:
        """End the process; another starts when it is needed."""
        if self._server is not None:
            self._server.close()
        self._server = self._holder = None

    def _is_due(self, rewards: Mapping[int, float]) -> bool:
        """Whether to judge one answer again: the batch pays more than any before, or else by chance."""
        mean = math.fsum(rewards.values()) / len(rewards) if rewards else -math.inf
        is_record = mean > self._most
        self._most = max(self._most, mean)
        return is_record or (bool(rewards) and secrets.randbelow(AGAIN_EVERY) == 0)

    def _alone(self, calls: Sequence[Call], until: float) -> list[Any]:
        return [self._in_one_worker([call], until)[0] for call in calls]

    def _in_one_worker(self, calls: Sequence[Call], until: float, *, is_kept: bool = False) -> list[Any]:
        """One call after the other, in one worker, and in another after each call that breaks it."""
        found: list[Any] = []
        worker = self._holder if is_kept else None
        try:
            while len(found) < len(calls):
                if time.monotonic() >= until:
                    late = f"the batch took more than {self._limits.batch_seconds:g} s"
                    return found + [Failure(call.boundary, late) for call in calls[len(found) :]]
                worker = worker or self._with_server(ForkServer.fork)
                some, is_broken = self._chunk(worker, calls[len(found) : len(found) + CHUNK], until)
                found += some
                if is_broken:
                    worker = None
                    self.restarts += 1
                    self.generation += is_kept
            return found
        finally:
            if is_kept:
                self._holder = worker
            elif worker is not None:
                worker.close()

    def _chunk(self, worker: Worker, calls: Sequence[Call], until: float) -> tuple[list[Any], bool]:
        """What the calls gave, up to and including one that breaks the worker, and whether one did."""
        found: list[Any] = []
        seconds = [self._limits.item_seconds * call.steps for call in calls]
        worker.send({"items": [call.document(self.generation) for call in calls]})
        for index, call in enumerate(calls):
            left = min(seconds[index], max(until - time.monotonic(), 0.0))
            try:
                found.append(_read(call, worker.receive(left), index))
            except BrokenChannelError as broken:
                worker.close()
                return [*found, Failure(call.boundary, str(broken))], True
        return found, False

    def _is_confined(self) -> bool:
        return self._with_server(ForkServer.open)

    def _with_server(self, action: Callable[[ForkServer], T]) -> T:
        """Do it with the server; one that somebody kills is started again, a few times."""
        for _ in range(STARTS):
            self._server = self._server or ForkServer(self._spec, self._limits)
            try:
                return action(self._server)
            except KilledError as error:
                killed = error
                self.close()
                self.generation += 1
            except BrokenChannelError as broken:
                self.close()
                raise WorkFailedError(f"{NAME} cannot start: {broken}") from None
            except RequestError:
                self.close()
                raise
        raise ProcessLostError(
            f"{killed}, {STARTS} times, before it judged anything",
            remedy="look for a lack of memory on the machine; then try again",
        )


def _rewards(found: Sequence[Any]) -> dict[int, float]:
    """By the place of each verdict that is no Failure."""
    return {
        index: one.reward if isinstance(one, Score) else one.rewards[0]
        for index, one in enumerate(found)
        if not isinstance(one, Failure)
    }


def _one_paid(rewards: Mapping[int, float]) -> int:
    """The place of one that got more than the least, drawn so that nobody can guess it."""
    least = min(rewards.values())
    return secrets.choice([index for index, reward in rewards.items() if reward > least] or list(rewards))


def _read(call: Call, answer: Mapping[str, Any], index: int) -> Any:
    if answer.get("item") != index:
        raise BrokenChannelError(f"{NAME} answered out of turn")
    try:
        if "failure" in answer:
            boundary, reason = map(str, answer["failure"])
            return Failure(boundary, reason)
        return call.read(answer)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BrokenChannelError(f"{NAME} wrote an answer that is no outcome") from None
