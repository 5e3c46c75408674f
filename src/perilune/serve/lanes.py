"""Threads for work that would block the event loop: short work, long work, chat templates and schemas.

Each lane runs one task at a time, so long work waits for other long work and short work never does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar, get_args

Lane = Literal["short", "long", "template", "schema"]
Result = TypeVar("Result")

LONG_TASK_SIZE = 1 << 14  # bytes or characters from which work counts as long: it takes a few milliseconds


class Lanes:
    """The lanes of one server."""

    def __init__(self) -> None:
        self._threads = {lane: ThreadPoolExecutor(1, thread_name_prefix=lane) for lane in get_args(Lane)}

    async def short_or_long(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work`, which processes `size` bytes or characters, in the lane for short or for long work."""
        return await self.run("short" if size < LONG_TASK_SIZE else "long", work)

    async def run(self, lane: Lane, work: Callable[[], Result]) -> Result:
        """Run `work` in a lane and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)

    def close(self) -> None:
        """Cancel work that has not started."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
