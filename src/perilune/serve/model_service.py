"""The base class of the services that answer requests, for language models and speech models."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response

from perilune.serve.engine_thread import EngineThread
from perilune.serve.errors import ApiError
from perilune.serve.lanes import Lanes
from perilune.serve.metrics import Metrics
from perilune.serve.responses import StreamedResponse


class ModelService:
    """Counts requests in progress, and refuses requests when there are too many.

    Args:
        thread: samples the answers.
        max_samples: maximum number of samples in progress or waiting; further requests are refused with 429.

    Attributes:
        answering: number of requests whose responses are not sent completely.
        entering: number of samples that are not submitted to the engine yet.
        draining: whether the server is shutting down.
        open_paths: paths that need no token.
    """

    open_paths: frozenset[str] = frozenset()

    def __init__(self, thread: EngineThread, metrics: Metrics, max_samples: int) -> None:
        self.thread, self.metrics, self._max_samples = thread, metrics, max_samples
        thread.on_restart = metrics.restarts.inc
        self.draining = False
        self.answering = self.entering = 0
        self.lanes = Lanes()

    def close(self) -> None:
        self.lanes.close()

    def abort_all(self, reason: str) -> None:
        """Stop all requests; their clients get `reason` as the error."""
        self.thread.abort_all(reason)

    def gauges(self) -> Mapping[str, float]:
        """Return the current values for /metrics."""
        return {"samples_open": self.thread.num_open_samples, "requests_answering": self.answering}

    def check_capacity(self) -> None:
        """Check that the queue has room.

        Raises:
            ApiError: 429, which asks the client to retry after about the time of one answer.
        """
        busy = self.thread.num_open_samples + self.entering >= self._max_samples
        # Answers that are sampled but not read yet cost only memory, so twice as many are allowed.
        if busy or self.answering >= 2 * self._max_samples:
            wait = {"Retry-After": str(min(max(math.ceil(self.metrics.answer_seconds), 1), 30))}
            raise ApiError(429, "the queue is full", code="queue_full", headers=wait)

    async def count_answering(self, response: Awaitable[Response]) -> Response:
        """Await a response, and count the request in `answering` until the response is sent."""
        self.answering += 1
        sent_later = False
        try:
            result = await response
            sent_later = isinstance(result, StreamedResponse)
            return result
        finally:
            if not sent_later:
                self.answering -= 1

    def stream(
        self, pieces: AsyncIterator[bytes], close: Callable[[], None], media_type: str
    ) -> StreamedResponse:
        """Return a response that sends `pieces`. At its end, it calls `close` and decrements `answering`.

        Use it as a result in `count_answering`.
        """

        def finish(complete: bool) -> None:
            self.answering -= 1
            close()
            if not complete:
                self.metrics.disconnects.inc()

        return StreamedResponse(pieces, finish, media_type)
