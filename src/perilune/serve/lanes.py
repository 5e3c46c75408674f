"""Threads for work that would block the event loop: short work, long work, chat templates and schemas.

Each lane runs one task at a time, so long work waits for other long work and short work never does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

LONG_TASK_SIZE = 1 << 14  # bytes or characters from which work is long: a few milliseconds


class Lanes:
    """The lanes of one server."""

    def __init__(self) -> None:
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=name)
            for name in ("short", "long", "template", "schema")
        }

    async def short_or_long(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work` on `size` bytes or characters."""
        return await self._run("short" if size < LONG_TASK_SIZE else "long", work)

    async def template(self, work: Callable[[], Result]) -> Result:
        """Run `work` that renders a chat template, which may take any time."""
        return await self._run("template", work)

    async def schema(self, work: Callable[[], Result]) -> Result:
        """Run `work` that compiles a schema."""
        return await self._run("schema", work)

    def close(self) -> None:
        """Cancel work that has not started."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, lane: str, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)
