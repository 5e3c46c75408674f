"""Run a function in several processes at once."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import context

from perilune.learn.distributed import RENDEZVOUS, join

PATIENCE = 300.0  # seconds; generous, because the machine may be busy


def together(work: Callable[..., Any], *arguments: Any, count: int = 2, sharded: bool = False) -> list[Any]:
    """The result of `work(ranks, *arguments)` in each of `count` processes, or the exception it raised.

    EOFError stands for a process that died without a result.
    """
    return in_processes(_joined, count, sharded, work, arguments)


def _joined(sharded: bool, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return work(join(torch.device("cpu"), sharded), *arguments)


def in_processes(work: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """The same for `work(*arguments)`, which joins the process group itself if it needs to."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "processes")
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        started = [
            context.Process(target=_run, args=(sender, meeting, rank, count, work, arguments))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in started:
            process.start()
        try:
            for _, sender in pipes:
                sender.close()
            return [_received(receiver) for receiver, _ in pipes]
        finally:
            for process in started:
                process.kill()
                process.join()


def _received(receiver: Any) -> Any:
    assert receiver.poll(PATIENCE), "a process returned no result in time"
    try:
        return receiver.recv()
    except EOFError as error:  # it was killed
        return error


def _run(sender: Any, meeting: str, rank: int, count: int, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), RENDEZVOUS: meeting}
    try:
        sender.send(work(*arguments))
    except Exception as error:
        sender.send(error)
    sender.close()
