"""Run work in threads that end with the process. The work must be safe to kill at any point."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Semaphore, Thread
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], slots: Semaphore | None = None) -> Future[T]:
    """Run `work` in a thread that does not keep the process alive, unlike those of an executor.

    Args:
        slots: limits how many threads work at once.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            with slots or nullcontext():
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, daemon=True).start()
    return future


def wait_until(deadline: float | None, *futures: Future[Any]) -> None:
    """Wait for futures, and raise their exceptions; at the deadline, return without those that still run.

    Args:
        deadline: time of the monotonic clock; None waits for all.
    """
    for future in futures:
        try:
            future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.done():
                raise
