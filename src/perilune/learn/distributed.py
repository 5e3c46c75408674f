"""Training in several processes (ranks) with the same result, bit for bit, as in one process.

All ranks run the same loop. With k ranks, each samples every k-th group of a step and computes every k-th
micro-batch. The ranks then exchange results, so that each has the results of a single process:

* Episodes, figures and log-probs are gathered by all ranks and put into the order of a single process.
* Gradients are summed in the order of the micro-batches: the running sum travels from rank to rank, each rank
  adds its own gradient, and the last rank broadcasts the sum. Floating-point sums depend on their order, and
  this order is that of a single process. The cost is 4 bytes per parameter sent for each micro-batch, which
  takes little time compared with the arithmetic of thousands of tokens.

Received data is never unpickled: it is JSON, safetensors, Arrow or plain numbers.
"""

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
from perilune.watchdog import STALL_SECONDS, Watchdog

RENDEZVOUS = "PERILUNE_RENDEZVOUS"  # path of the file through which ranks of one machine connect
_COLLECTIVE_TIMEOUT = timedelta(days=30)  # the watchdog acts sooner

T = TypeVar("T")


class Ranks:
    """The processes that run a stage together.

    Args:
        rank: number of this process; only rank 0 writes files.
        count: number of processes.
        sharded: whether trained weights, gradients and moments are sharded (`learn.sharding`).
    """

    def __init__(self, rank: int = 0, count: int = 1, *, sharded: bool = False) -> None:
        self.rank, self.count, self.sharded = rank, count, sharded and count > 1
        self._last_wait = time.monotonic()
        self._inbox = self._outbox = torch.empty(0)

    @property
    def leads(self) -> bool:
        """True for rank 0, which writes files."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this rank's share of items that all ranks have in the same order."""
        return list(items[self.rank :: self.count])

    def all_gather(self, what: str, payload: bytes) -> list[bytes]:
        """Gather the payloads of all ranks, by rank.

        Raises:
            ProcessLostError: when another process has ended.
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
        """Gather JSON objects, one for each item of `shard(items)`, in the order of the items."""
        if self.count == 1:
            return list(own)
        return interleave([json.loads(part) for part in self.all_gather(what, json.dumps(own).encode())])

    def all_gather_arrays(self, what: str, own: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Gather arrays, one for each item of `shard(items)`, in the order of the items; any shapes."""
        if self.count == 1:
            return list(own)
        named = {str(index): np.ascontiguousarray(array) for index, array in enumerate(own)}
        parts = [load(part) for part in self.all_gather(what, save(named))]
        return interleave([[part[str(index)] for index in range(len(part))] for part in parts])

    def broadcast(self, what: str, value: str) -> str:
        """Return the value of rank 0."""
        return self.all_gather(what, value.encode() if self.leads else b"")[0].decode()

    def check_same(self, what: str, value: str) -> None:
        """Check that all ranks computed the same value.

        Raises:
            WorkFailedError: when the values differ.
        """
        values = [payload.decode() for payload in self.all_gather(what, value.encode())]
        if len({*values}) > 1:
            summary = ", ".join(f"process {rank} has {value}" for rank, value in enumerate(values))
            raise WorkFailedError(
                f"the processes no longer agree on the {what}: {summary}",
                remedy="run the same code on the same kind of processor; if you do, report this bug",
            )

    def distribute(self, batches: Sequence[T], parameters: Sequence[nn.Parameter]) -> Iterator[T]:
        """Iterate over this rank's micro-batches, and sum the gradients of all ranks.

        The caller adds each micro-batch's gradient to the parameters. When the iteration ends, the parameters
        of every rank have the gradient of all micro-batches, summed in their order.
        """
        if self.count == 1 or not batches:
            yield from batches
            return
        sending: dist.Work | None = None
        last = len(batches) - 1
        for index in range(self.rank, len(batches), self.count):
            if index > 0:  # the running sum, which begins with batch 0, already has an earlier gradient
                _clear_gradients(parameters)
            yield batches[index]
            if index > 0:
                with self.waiting(f"the gradient of micro-batch {index}"):
                    dist.recv(self._buffers(parameters)[0], (index - 1) % self.count)
                    if sending is not None:
                        sending.wait()
                        sending = None
                _add_message(self._inbox, parameters)
            if index < last:
                _fill_message(self._buffers(parameters)[1], parameters)
                with self.waiting(f"the gradient of micro-batch {index + 1}"):
                    sending = dist.isend(self._outbox, (index + 1) % self.count)
        with self.waiting("the step's gradient"):
            if sending is not None:
                sending.wait()
            owner = last % self.count
            if self.rank == owner:
                _fill_message(self._buffers(parameters)[1], parameters)
            whole = self._buffers(parameters)[1 if self.rank == owner else 0]
            dist.broadcast(whole, owner)
        if self.rank != owner:
            _clear_gradients(parameters)
            _add_message(whole, parameters)

    def all_reduce(self, what: str, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor that has the same shape on all of them."""
        with self.waiting(what):
            dist.all_reduce(values)
        return values

    def _buffers(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """Return the receive and send buffers of a gradient: a flag per parameter, then all values."""
        size = len(parameters) + sum(parameter.numel() for parameter in parameters)
        if len(self._inbox) != size:
            kind = torch.promote_types(torch.float32, parameters[0].dtype)
            self._inbox, self._outbox = (
                torch.empty(size, dtype=kind, device=parameters[0].device) for _ in range(2)
            )
        return self._inbox, self._outbox

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for the other ranks, at most a little longer than this rank has worked since the last wait.

        Raises:
            ProcessLostError: when another process has ended.
        """
        with Watchdog(f"{what}, of the other processes", STALL_SECONDS + time.monotonic() - self._last_wait):
            try:
                yield
            except RuntimeError as error:
                if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                    raise
                reason = str(error).strip().partition("\n")[0]
                raise ProcessLostError(
                    f"another process ended while process {self.rank} waited for {what}: {reason}",
                    remedy="see the log of the process that ended",
                ) from error
        self._last_wait = time.monotonic()


SINGLE_RANK = Ranks()


def join(device: torch.device, sharded: bool | None = None) -> Ranks:
    """Connect to the other processes of the stage, given by the variables RANK and WORLD_SIZE.

    Args:
        sharded: see `Ranks`; by default, whether the device is not a CPU.

    Raises:
        ProcessLostError: when the other processes do not connect.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return SINGLE_RANK
    ranks = Ranks(rank, count, sharded=device.type != "cpu" if sharded is None else sharded)
    path = os.environ.get(RENDEZVOUS)
    if path:  # all ranks are on this machine, so other machines must not be able to connect
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with ranks.waiting("the start"):
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=None if path else "env://",
            store=dist.FileStore(path, count) if path else None,  # type: ignore[attr-defined]
            rank=rank if path else -1,
            world_size=count if path else -1,
            timeout=_COLLECTIVE_TIMEOUT,
        )
    atexit.register(_leave)
    return ranks


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """Merge the shares of all ranks into one list, the inverse of `Ranks.shard`."""
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _clear_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _fill_message(message: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Write the gradients, and a flag for each parameter that has one."""
    for flag, part, parameter in _message_parts(message, parameters):
        flag.fill_(parameter.grad is not None)
        if parameter.grad is not None:
            part.copy_(parameter.grad)


def _add_message(message: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    for flag, part, parameter in _message_parts(message, parameters):
        if not flag:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(part)
        else:
            parameter.grad += part.to(parameter.grad.dtype)


def _message_parts(
    message: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[Tensor, Tensor, nn.Parameter]]:
    """Iterate over the flag and the values of each parameter, both views of the message."""
    flags, rest = message[: len(parameters)], message[len(parameters) :]
    sizes = [parameter.numel() for parameter in parameters]
    for flag, part, parameter in zip(flags, torch.split(rest, sizes), parameters, strict=True):
        yield flag, part.view(parameter.shape), parameter
