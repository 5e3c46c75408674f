"""A process that runs an environment's code. If it breaks, it is replaced. Only work in progress is lost."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from perilune.environments.core.protocol import Failure, Score
from perilune.environments.core.registry import with_absolute_paths
from perilune.errors import ProcessLostError, RequestError, WorkFailedError
from perilune.sandbox.channel import BrokenChannelError, KilledError
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.fork_server import PROCESS_NAME, ForkServer, Worker

CHUNK_CALLS = 64  # calls sent together
RESCORE_INTERVAL_BATCHES = 4  # average number of batches from one rescored answer to the next
MAX_STARTS = 3  # attempts to start a server that is killed from outside
_INCONSISTENT = (
    "the scorer gave one answer %s in a batch and %s in a separate process; from now on every answer is"
    " scored in its own process. Run `perilune environments audit` to see if answers can change the scorer"
)
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Call(Protocol):
    """One request to the process."""

    @property
    def boundary(self) -> str:
        """The component to blame if the process breaks during this call."""

    @property
    def is_verdict(self) -> bool:
        """True if the call scores a whole transcript, independently of earlier calls."""

    @property
    def steps(self) -> int:
        """The number of environment steps. Each has the time limit of an item. Read before `document`."""

    def document(self, generation: int) -> Mapping[str, Any]:
        """Return the request, for the worker of that generation."""

    def read(self, answer: Mapping[str, Any]) -> Any:
        """Parse the answer, which may be hostile.

        Raises:
            KeyError, TypeError, ValueError, OverflowError, AttributeError: if the answer is malformed.
        """


class EnvironmentProcess:
    """One environment, built once, and a worker for each batch of calls. A worker that breaks is replaced.

    A worker that scores transcripts has scored nothing before its batch. If a batch has a higher mean reward
    than all earlier ones, and for one in four of the other batches at random, a separate worker scores one
    rewarded answer again. If the two outcomes differ, an answer may have changed the worker, or the scorer is
    not deterministic. Every answer of this batch and of all later batches then gets its own worker.

    Attributes:
        generation: number of the worker that holds the sessions. When it is replaced, its state is lost.
        restarts: number of workers that broke.
        isolates_answers: whether every answer gets its own worker.
    """

    def __init__(self, spec: Mapping[str, Any], limits: ScorerLimits, *, rescores: bool = True) -> None:
        self.generation = self.restarts = 0
        self.isolates_answers = False
        self._spec = with_absolute_paths(spec, lambda _: Path.cwd())  # the server runs in another folder
        self._limits, self._rescores = limits, rescores
        self._server: ForkServer | None = ForkServer(self._spec, limits)
        # The worker of all sessions; if the environment is not confined, the worker of all calls.
        self._session_worker: Worker | None = None
        self._sessions = 0
        self._highest_mean = -math.inf  # highest mean reward of a batch so far

    def ask(self, calls: Sequence[Call], deadline: float = math.inf) -> list[Any]:
        """Make calls in order. Return the result of each call's `read`, or a Failure of its boundary.

        Args:
            deadline: time of the monotonic clock after which the remaining calls fail.

        Raises:
            RequestError: if the environment's section is wrong.
            WorkFailedError: if the process cannot start.
        """
        if not calls:
            return []
        if not (calls[0].is_verdict and self._is_confined()):
            return self._ask_one_worker(calls, deadline, is_kept=True)
        if self.isolates_answers:
            return self._ask_separate_workers(calls, deadline)
        outcomes = self._ask_one_worker(calls, deadline)
        rewards = _rewards_by_index(outcomes)
        if len(calls) > 1 and self._rescores and self._is_rescoring_due(rewards):
            index = _choose_rewarded(rewards)
            again = self._ask_one_worker([calls[index]], deadline)[0]
            if again != outcomes[index] and time.monotonic() < deadline:
                _LOG.warning(_INCONSISTENT, outcomes[index], again)
                self.isolates_answers = True
                return self._ask_separate_workers(calls, deadline)
        return outcomes

    def begin_sessions(self, count: int) -> None:
        """Add to the number of open sessions, which share one worker."""
        self._sessions += count

    def end_sessions(self, count: int) -> None:
        """Subtract from the number of open sessions. The worker of confined sessions ends with the last."""
        self._sessions -= count
        if self._sessions <= 0 and self._session_worker is not None and self._is_confined():
            worker, self._session_worker = self._session_worker, None  # another thread may call `close`
            worker.close()
            self.generation += 1

    def close(self) -> None:
        """Close the sessions and the environment, and end the process. The next call starts a new one."""
        worker, self._session_worker = self._session_worker, None
        server, self._server = self._server, None
        with ExitStack() as stack:  # runs all of them, also if the user interrupts one
            if server is not None:
                stack.callback(server.close)
            if worker is not None:
                stack.callback(worker.close)
                worker.close_environment()

    def _is_rescoring_due(self, rewards: Mapping[int, float]) -> bool:
        """Return whether the batch has the highest mean reward so far, or is drawn at random."""
        mean = math.fsum(rewards.values()) / len(rewards) if rewards else -math.inf
        is_record = mean > self._highest_mean
        self._highest_mean = max(self._highest_mean, mean)
        return is_record or (bool(rewards) and secrets.randbelow(RESCORE_INTERVAL_BATCHES) == 0)

    def _ask_separate_workers(self, calls: Sequence[Call], deadline: float) -> list[Any]:
        return [self._ask_one_worker([call], deadline)[0] for call in calls]

    def _ask_one_worker(self, calls: Sequence[Call], deadline: float, *, is_kept: bool = False) -> list[Any]:
        """Make the calls in order in one worker, which is replaced after each call that breaks it.

        Args:
            is_kept: whether to use the worker of sessions, and keep it after the calls.
        """
        results: list[Any] = []
        worker: Worker | None = None
        if is_kept:
            worker, self._session_worker = self._session_worker, None
        try:
            while len(results) < len(calls):
                if time.monotonic() >= deadline:
                    reason = f"the batch took more than {self._limits.batch_seconds:g} s"
                    return results + [Failure(call.boundary, reason) for call in calls[len(results) :]]
                worker = worker or self._with_server(ForkServer.fork)
                chunk, is_broken = self._ask_chunk(
                    worker, calls[len(results) : len(results) + CHUNK_CALLS], deadline
                )
                results += chunk
                if is_broken:
                    worker = None
                    self.restarts += 1
                    self.generation += is_kept
            return results
        finally:
            if is_kept:
                self._session_worker = worker
            elif worker is not None:
                worker.close()

    def _ask_chunk(self, worker: Worker, calls: Sequence[Call], deadline: float) -> tuple[list[Any], bool]:
        """Return the results, up to and including a call that breaks the worker, and whether a call did."""
        results: list[Any] = []
        seconds = [self._limits.item_seconds * call.steps for call in calls]
        worker.send({"items": [call.document(self.generation) for call in calls]})
        for index, call in enumerate(calls):
            limit = min(seconds[index], max(deadline - time.monotonic(), 0.0))
            try:
                results.append(_read_answer(call, worker.receive(limit), index))
            except BrokenChannelError as broken:
                worker.close()
                return [*results, Failure(call.boundary, str(broken))], True
        return results, False

    def _is_confined(self) -> bool:
        return self._with_server(ForkServer.open)

    def _with_server(self, action: Callable[[ForkServer], T]) -> T:
        """Apply `action` to the server. A server that is killed from outside is restarted a few times."""
        for _ in range(MAX_STARTS):
            self._server = self._server or ForkServer(self._spec, self._limits)
            try:
                return action(self._server)
            except KilledError as error:
                killed = error
                self.close()
                self.generation += 1
            except BrokenChannelError as broken:
                self.close()
                raise WorkFailedError(f"{PROCESS_NAME} cannot start: {broken}") from None
            except RequestError:
                self.close()
                raise
        raise ProcessLostError(
            f"{killed}, {MAX_STARTS} times, before it scored anything",
            remedy="check whether the machine is out of memory, and try again",
        )


def _rewards_by_index(outcomes: Sequence[Any]) -> dict[int, float]:
    return {
        index: outcome.reward if isinstance(outcome, Score) else outcome.rewards[0]
        for index, outcome in enumerate(outcomes)
        if not isinstance(outcome, Failure)
    }


def _choose_rewarded(rewards: Mapping[int, float]) -> int:
    """Return the index of an answer with more than the lowest reward, drawn unpredictably."""
    lowest = min(rewards.values())
    return secrets.choice([index for index, reward in rewards.items() if reward > lowest] or list(rewards))


def _read_answer(call: Call, answer: Mapping[str, Any], index: int) -> Any:
    if answer.get("item") != index:
        raise BrokenChannelError(f"{PROCESS_NAME} answered out of turn")
    try:
        if "failure" in answer:
            boundary, reason = map(str, answer["failure"])
            return Failure(boundary, reason)
        return call.read(answer)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise BrokenChannelError(f"{PROCESS_NAME} sent a malformed answer") from None
