"""The thread that steps the engine, and its interface to the event loop.

The thread runs commands (add, abort) between two steps. It passes the deltas of a step to the event loop in
one call, which distributes them to the streams. A stream merges deltas that its reader has not taken yet. So
a stream holds at most one answer, and a slow reader uses bounded memory and delays no other request.

A request that fails ends only its own stream. If a step fails, all requests in flight get an error and the
engine is restarted. If the restart fails, the server stops.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from perilune.engine.request import Delta, Request
from perilune.errors import RequestError, WorkFailedError

_log = logging.getLogger(__name__)


class StoppedError(WorkFailedError):
    """The error of a request that the server stopped. The client may send it again later."""


class StepEngine(Protocol):
    """The part of the engine that the thread uses."""

    @property
    def unfinished(self) -> bool:
        """True if a sample is not finished."""

    def add(self, request: Request, *, stream: bool) -> int: ...

    def step(self) -> list[Delta]: ...

    def abort(self, request_id: int) -> object: ...

    def restart(self) -> None:
        """Drop all requests; raises if the engine can no longer sample."""


class Stream:
    """The deltas of some requests, for one reader in the event loop.

    The samples of all requests are numbered consecutively; these numbers are called choices.

    Args:
        per_token: one delta for each token; otherwise one delta for each finished choice.

    Attributes:
        accepted: done when the engine has accepted the requests; has the error if the engine refuses them.
    """

    def __init__(self, requests: Sequence[Request], thread: EngineThread, *, per_token: bool) -> None:
        self.requests, self.per_token = requests, per_token
        self.remaining = sum(request.n for request in requests)  # choices that have not finished
        self._thread = thread
        self.ids: tuple[int, ...] = ()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._pending: dict[int, Delta] = {}
        self._failure: BaseException | None = None

    async def next_deltas(self) -> list[tuple[int, Delta]]:
        """Wait for new deltas, and return at most one for each choice; empty at the end.

        Raises:
            RequestError: when the engine finds the requests impossible.
            WorkFailedError: when the requests or the engine failed, or the requests were aborted.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if not self.remaining:
                return []
            self._changed.clear()
            await self._changed.wait()
        deltas, self._pending = list(self._pending.items()), {}
        return deltas

    async def linger(self, seconds: float) -> None:
        """Wait so that the next deltas have more tokens; return early when the stream ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def abort(self, reason: str = "aborted") -> None:
        if self.remaining:
            self.fail(StoppedError(reason))
            self._thread.abort(self.ids)

    def mark_accepted(self, ids: tuple[int, ...]) -> None:
        """Record that the engine has accepted the requests."""
        self.ids = ids
        if not self.remaining:  # aborted meanwhile
            self._thread.abort(ids)
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: BaseException) -> None:
        self._failure, self.remaining = error, 0
        self._thread.forget(self)
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved, because the waiter may be gone
        self._changed.set()
        self._ended.set()

    def push(self, choice: int, delta: Delta) -> None:
        """Add a delta; merge it into the delta that the reader has not taken yet, if there is one."""
        if delta.finish_reason is not None:
            self.remaining -= 1
        waiting = self._pending.get(choice)
        if waiting is None:
            self._pending[choice] = delta
        else:
            waiting.extend(delta)
        if not self.remaining:
            self._ended.set()
        self._changed.set()


class EngineThread:
    """Steps an engine in a thread.

    Args:
        engine: only this thread may use it after `start`.

    Attributes:
        on_failure: called in the event loop when the engine has failed permanently.
        on_restart: called in the event loop when the engine was restarted after a failure.
        paused: whether the thread stops computing steps; set it with `run_between_steps`.
        failure: the error after which the engine could not be restarted.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.on_restart: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Used in the event loop only: unfinished streams, and the stream and first choice of each request.
        self._unfinished: set[Stream] = set()
        self._streams: dict[int, tuple[Stream, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.paused = False
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread. Call it in the event loop that reads the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step."""
        self._commands.put(None)
        self._thread.join()

    @property
    def num_open_samples(self) -> int:
        return sum(stream.remaining for stream in self._unfinished)

    async def submit(self, requests: Sequence[Request], *, per_token: bool) -> Stream:
        """Pass requests to the engine, which accepts all or none; `per_token` is as in `Stream`.

        Raises:
            RequestError: when the engine refuses a request.
            WorkFailedError: when the engine has failed.
        """
        if self.failure is not None:
            raise WorkFailedError("the engine has failed")
        stream = Stream(requests, self, per_token=per_token)
        self._unfinished.add(stream)
        self._commands.put(lambda: self._add(stream))
        try:
            await stream.accepted
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    async def run_between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread between two steps.

        Raises:
            RequestError: raised by `work`, which must not have changed anything.
            WorkFailedError: when `work` raises another error, after which the engine counts as failed.
        """
        if self.failure is not None:
            raise WorkFailedError("the engine has failed")
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                work()
            except RequestError as refusal:
                error = refusal
                self._call_in_loop(lambda: finished.set_exception(error))
            except BaseException as failure:
                _log.error("the engine failed between two steps", exc_info=failure)
                lasting = failure
                self._call_in_loop(lambda: self._fail_permanently(lasting))
                self._call_in_loop(lambda: finished.set_exception(WorkFailedError("the engine has failed")))
            else:
                self._call_in_loop(lambda: finished.set_result(None))

        self._commands.put(command)
        await asyncio.shield(finished)

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)
        self._commands.put(lambda: self._abort(ids))

    def abort_all(self, reason: str) -> None:
        """Stop all requests; their readers get `reason` as the error."""
        for stream in list(self._unfinished):
            stream.abort(reason)

    def forget(self, stream: Stream) -> None:
        self._unfinished.discard(stream)

    def _run(self) -> None:
        while True:
            try:
                if not self._run_commands():
                    return
                deltas = self._engine.step()
            except BaseException as error:  # a panic in a Rust library is not an Exception
                if not self._restart(error):
                    return
                continue
            if deltas:
                self._call_in_loop(lambda deltas=deltas: self._deliver(deltas))  # type: ignore[misc]

    def _restart(self, error: BaseException) -> bool:
        """Fail all requests in flight and restart the engine; return whether the engine works again."""
        _log.error("the engine failed and is restarted", exc_info=error)
        self._call_in_loop(self._fail_all)
        try:
            self._engine.restart()
        except BaseException as persistent:
            failure = persistent
            self._call_in_loop(lambda: self._fail_permanently(failure))
            return False
        self._call_in_loop(self.on_restart)
        return True

    def _run_commands(self) -> bool:
        """Run queued commands, waiting while there is no step to compute. Return False to stop the thread."""
        while True:
            try:
                command = self._commands.get(block=self.paused or not self._engine.unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, stream: Stream) -> None:
        ids: list[int] = []
        try:
            for request in stream.requests:
                ids.append(self._engine.add(request, stream=stream.per_token))
        except BaseException as error:
            refusal = error if isinstance(error, RequestError) else WorkFailedError("the engine failed")
            if refusal is not error:
                _log.error("a request could not be added", exc_info=error)
            self._abort(ids)
            self._call_in_loop(lambda: stream.fail(refusal))
            return
        self._call_in_loop(lambda: self._register(stream, tuple(ids)))

    def _abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _register(self, stream: Stream, ids: tuple[int, ...]) -> None:
        choice = 0
        for request_id, request in zip(ids, stream.requests, strict=True):
            self._streams[request_id] = (stream, choice)
            choice += request.n
        stream.mark_accepted(ids)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            entry = self._streams.get(delta.request_id)
            if entry is None:  # aborted
                continue
            stream, first = entry
            if delta.failure is not None:
                self.abort(stream.ids)
                stream.fail(delta.failure)
                continue
            stream.push(first + delta.sample, delta)
            if not stream.remaining:
                self.forget(stream)
                for request_id in stream.ids:
                    self._streams.pop(request_id, None)

    def _fail_all(self) -> None:
        for stream in list(self._unfinished):
            stream.fail(WorkFailedError("the engine failed"))
        self._streams.clear()

    def _fail_permanently(self, error: BaseException) -> None:
        self.failure = error
        self._fail_all()
        self.on_failure(error)
