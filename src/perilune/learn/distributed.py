"""Several processes of one machine that learn as one: what they exchange, and in which order it is added up.

Every process goes through the same loop. What is heavy is shared out: of a step's groups each process plays
every k-th, of its micro-batches each computes every k-th. What comes of it is exchanged, so that afterwards
every process knows what a single one would:

* episodes, figures and log-probs: all are given to all, and put in the order they have in one process;
* gradients: the running sum goes from process to process in the order of the micro-batches, each adds its
  own, and the last one gives it to all. Floating-point sums depend on their order, and this is the order of
  one process: its weights are the same bits. It costs 4 bytes a parameter sent for every micro-batch, which
  is little beside the arithmetic of its thousands of tokens.

Nothing that arrives is unpickled: it is JSON, safetensors, Arrow or bare numbers.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor, nn

from perilune.errors import ProcessLostError, WorkFailedError
from perilune.watchdog import STALL, Waiting

RENDEZVOUS = "PERILUNE_RENDEZVOUS"  # names the file by which processes of this machine find each other
_NEVER = timedelta(days=30)  # the watchdog is sooner

T = TypeVar("T")


class Ranks:
    """The processes that do a stage's work together.

    Args:
        rank: this one's number; 0 leads: it alone writes what is kept.
        count: how many there are.
        sharded: whether weights being trained, gradients and moments are shared out too (`learn.sharding`).
    """

    def __init__(self, rank: int = 0, count: int = 1, *, sharded: bool = False) -> None:
        self.rank, self.count, self.sharded = rank, count, sharded and count > 1
        self._met = time.monotonic()
        self._inbox = self._outbox = torch.empty(0)

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        """Of items that all processes hold in one order, those that are this one's to work on."""
        return list(items[self.rank :: self.count])

    def all_gather(self, what: str, payload: bytes) -> list[bytes]:
        """What every process gives, by rank.

        Raises:
            ProcessLostError: when one of them has ended.
        """
        if self.count == 1:
            return [payload]
        with self.waiting(what):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(payload)]))
            lengths = [int(size) for size in sizes]
            own = torch.frombuffer(bytearray(payload.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
            parts = [torch.empty_like(own) for _ in range(self.count)]
            dist.all_gather(parts, own)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def all_gather_json(self, what: str, own: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """JSON objects about `shard(items)`, made into those of all items."""
        if self.count == 1:
            return list(own)
        return interleaved([json.loads(part) for part in self.all_gather(what, json.dumps(own).encode())])

    def all_gather_arrays(self, what: str, own: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Arrays about `shard(items)`, made into those of all items; shapes may differ."""
        if self.count == 1:
            return list(own)
        named = {str(index): np.ascontiguousarray(array) for index, array in enumerate(own)}
        parts = [load(part) for part in self.all_gather(what, save(named))]
        return interleaved([[part[str(index)] for index in range(len(part))] for part in parts])

    def broadcast(self, what: str, value: str) -> str:
        """The value that the first process gives."""
        return self.all_gather(what, value.encode() if self.leads else b"")[0].decode()

    def check_same(self, what: str, value: str) -> None:
        """Compare a value that all processes must have come to.

        Raises:
            WorkFailedError: when they differ.
        """
        values = [one.decode() for one in self.all_gather(what, value.encode())]
        if len({*values}) > 1:
            told = ", ".join(f"process {rank} has {one}" for rank, one in enumerate(values))
            raise WorkFailedError(
                f"the processes no longer agree on the {what}: {told}",
                remedy="they must run the same code on the same kind of processor; if they do, report this",
            )

    def distribute(self, batches: Sequence[T], parameters: Sequence[nn.Parameter]) -> Iterator[T]:
        """The micro-batches that are this process's to compute.

        Whoever iterates adds each one's gradient to the parameters. When the iteration ends, the parameters
        of every process have the gradient of all, added up in the order of the batches.
        """
        if self.count == 1 or not batches:
            yield from batches
            return
        sending: dist.Work | None = None
        last = len(batches) - 1
        for index in range(self.rank, len(batches), self.count):
            if index > 0:  # what was there before belongs to the sum, which the first batch begins
                _forget(parameters)
            yield batches[index]
            if index > 0:
                with self.waiting(f"the gradient of micro-batch {index}"):
                    dist.recv(self._room(parameters)[0], (index - 1) % self.count)
                    if sending is not None:
                        sending.wait()
                        sending = None
                _add(self._inbox, parameters)
            if index < last:
                _fill(self._room(parameters)[1], parameters)
                with self.waiting(f"the gradient of micro-batch {index + 1}"):
                    sending = dist.isend(self._outbox, (index + 1) % self.count)
        with self.waiting("the step's gradient"):
            if sending is not None:
                sending.wait()
            owner = last % self.count
            if self.rank == owner:
                _fill(self._room(parameters)[1], parameters)
            whole = self._room(parameters)[1 if self.rank == owner else 0]
            dist.broadcast(whole, owner)
        if self.rank != owner:
            _forget(parameters)
            _add(whole, parameters)

    def all_reduce(self, what: str, values: Tensor) -> Tensor:
        """The sum over processes of a tensor of one shape."""
        with self.waiting(what):
            dist.all_reduce(values)
        return values

    def _room(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """What a sum arrives in and what it leaves in: a mark for each parameter, then all numbers."""
        size = len(parameters) + sum(parameter.numel() for parameter in parameters)
        if len(self._inbox) != size:
            kind = torch.promote_types(torch.float32, parameters[0].dtype)
            self._inbox, self._outbox = (
                torch.empty(size, dtype=kind, device=parameters[0].device) for _ in range(2)
            )
        return self._inbox, self._outbox

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for the others, who have about as much to do as we had.

        Raises:
            ProcessLostError: when one of them has ended.
        """
        with Waiting(f"{what}, of the other processes", STALL + time.monotonic() - self._met):
            try:
                yield
            except RuntimeError as error:
                if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                    raise
                reason = str(error).strip().partition("\n")[0]
                raise ProcessLostError(
                    f"process {self.rank} waited for {what}, and another process has ended: {reason}"
                ) from error
        self._met = time.monotonic()


SINGLE_RANK = Ranks()


def join(device: torch.device, sharded: bool | None = None) -> Ranks:
    """Meet the other processes of the stage, as the environment names them (RANK and WORLD_SIZE).

    Args:
        sharded: see `Ranks`; by default where the device is not a CPU.

    Raises:
        ProcessLostError: when they do not come.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return SINGLE_RANK
    found = Ranks(rank, count, sharded=device.type != "cpu" if sharded is None else sharded)
    path = os.environ.get(RENDEZVOUS)
    if path:  # all are on this machine: nobody else shall be able to connect
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with found.waiting("the start"):
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=None if path else "env://",
            store=dist.FileStore(path, count) if path else None,  # type: ignore[attr-defined]
            rank=rank if path else -1,
            world_size=count if path else -1,
            timeout=_NEVER,
        )
    atexit.register(_leave)
    return found


def interleaved(parts: Sequence[Sequence[T]]) -> list[T]:
    """One list of what `Ranks.shard` took apart."""
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _fill(message: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Write the gradients, and which parameters have one."""
    for mark, part, parameter in _parts(message, parameters):
        mark.fill_(parameter.grad is not None)
        if parameter.grad is not None:
            part.copy_(parameter.grad)


def _add(message: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradients of a message."""
    for mark, part, parameter in _parts(message, parameters):
        if not mark:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(part)
        else:
            parameter.grad += part.to(parameter.grad.dtype)


def _parts(
    message: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[Tensor, Tensor, nn.Parameter]]:
    """A parameter's mark, and its numbers in its shape, both inside the message."""
    marks, rest = message[: len(parameters)], message[len(parameters) :]
    sizes = [parameter.numel() for parameter in parameters]
    for mark, part, parameter in zip(marks, torch.split(rest, sizes), parameters, strict=True):
        yield mark, part.view(parameter.shape), parameter
