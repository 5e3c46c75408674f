"""The gate: new requests wait while the server is paused, and are refused while the model sleeps."""

import asyncio

from perilune.serve.engine_thread import StoppedError
from perilune.serve.errors import ApiError


class Gate:
    """Holds or refuses requests before they reach the engine.

    Attributes:
        sleeping: the parts of the model that sleep ("weights", "kv_cache"). If any part sleeps, requests get
            status 503.
    """

    def __init__(self) -> None:
        self.sleeping: set[str] = set()
        self._refusal = ""  # the reason
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def closed(self) -> bool:
        """True if new requests wait."""
        return not self._opened.is_set()

    def close(self) -> None:
        """Make new requests wait."""
        self._opened.clear()

    def open(self) -> None:
        """Admit waiting and new requests."""
        self._opened.set()

    def refuse_all(self, reason: str) -> None:
        """Refuse all requests from now on, including those that wait."""
        self._refusal = reason
        self.open()

    def check_awake(self) -> None:
        """Raise an error while the model sleeps, or after `refuse_all`."""
        if self._refusal:
            raise StoppedError(self._refusal)
        if self.sleeping:
            message = "the model sleeps; wake it up with POST /wake_up"
            raise ApiError(503, message, code="sleeping", headers={"Retry-After": "10"})

    async def enter(self) -> None:
        """Wait until the gate is open.

        Raises:
            ApiError: 503, when the model sleeps.
            StoppedError: after `refuse_all`.
        """
        self.check_awake()
        while self.closed:
            await self._opened.wait()
            self.check_awake()
