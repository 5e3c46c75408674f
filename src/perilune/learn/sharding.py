"""A decoder whose training is shared out over processes: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each process keeps its part of every trained weight, of its gradient and of its two moments; a layer's weights
are put together while it is computed. The decoder that everything else uses, the engine above all, stays
whole in every process and takes the new weights after each update.

FSDP adds the processes' gradients up micro-batch by micro-batch, in an order of its own: results are those of
one process to float32 rounding, not to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.errors import RequestError
from perilune.learn.distributed import Ranks
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder

T = TypeVar("T")


class ShardedDecoder:
    """A twin of a decoder, cut over processes.

    Raises:
        RequestError: when it is a mixture of experts.

    Attributes:
        module: the twin, for forward passes that carry a gradient.
        parameters: by name, this process's part of every trained weight: plain tensors, cut along the first
            axis, of the storage that the twin is put together from. A part may be empty.
    """

    def __init__(self, decoder: Decoder, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if decoder.config.experts is not None:
            raise RequestError(
                "a mixture of experts cannot be cut over processes: a micro-batch reaches some experts only",
                where="resources.sharded",
                remedy="set sharded: false: processes share the work all the same",
            )
        self._ranks = ranks
        self.module = copy.deepcopy(decoder)
        device = next(decoder.parameters()).device.type
        self._mesh = init_device_mesh(device, (ranks.count,))
        for part in (*self.module.model.layers, self.module):
            fully_shard(part, mesh=self._mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # a sum: weights carry the whole step's denominator
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self._cut = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.parameters = {name: nn.Parameter(_local(p.detach())) for name, p in self._cut.items()}

    def distribute(self, batches: Sequence[T], others: Sequence[nn.Parameter]) -> Iterator[T]:
        """As `Ranks.distribute`; all processes go through layers at the same time, so that one which has
        no micro-batch left goes along with a loss of zero.

        Args:
            others: trained parameters that are not the decoder's, whole in every process.
        """
        ranks = self._ranks
        if not ranks.leads:
            for parameter in others:
                parameter.grad = None
        for start in range(0, len(batches), ranks.count):
            index = start + ranks.rank
            if index < len(batches):
                yield batches[index]
            else:
                self._go_along()
        for name, parameter in self._cut.items():
            if parameter.grad is not None:
                own, found = self.parameters[name], _local(parameter.grad)
                own.grad = found if own.grad is None else own.grad + found
                parameter.grad = None
        if batches and others:
            self._add_up(others)

    def _go_along(self) -> None:
        from torch.distributed.tensor import DTensor

        device = self._mesh.device_type
        one = torch.zeros(1, dtype=torch.int64, device=device)
        bounds = torch.tensor([0, 1], device=device)
        loss = self.module(one, one, PackedAttention(bounds)).sum()
        for parameter in self.module.parameters():
            if not isinstance(parameter, DTensor):  # put together now: beside the layers, such as the head
                loss = loss + parameter.sum()
        (loss * 0).backward()

    def _add_up(self, others: Sequence[nn.Parameter]) -> None:
        has = torch.tensor([float(parameter.grad is not None) for parameter in others])
        has = self._ranks.all_reduce("the gradients' marks", has)
        for some, parameter in zip(has.tolist(), others, strict=True):
            if some:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._ranks.all_reduce("the critic's gradient", gradient)

    def whole_norms(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Norms of whole tensors from those of this process's parts; others' are whole already."""
        cut = [name for name in norms if name in self.parameters]
        if not cut:
            return dict(norms)
        squares = torch.stack([norms[name] for name in cut]).square()
        found = self._ranks.all_reduce("the gradient's norm", squares).sqrt()
        return {**norms, **dict(zip(cut, found, strict=True))}

    @torch.no_grad()
    def publish(self, decoder: Decoder) -> None:
        """Give the whole decoder the present weights."""
        whole = self.whole(self.parameters)
        for name, parameter in decoder.named_parameters():
            if name in whole:
                parameter.copy_(whole[name])

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by name, put together from every process's part; what is not cut stays as it is."""
        from torch.distributed.tensor import DTensor, Shard

        found = {}
        for name, part in parts.items():
            found[name] = part
            if name in self._cut:
                like = self._cut[name]
                cut = DTensor.from_local(
                    part.detach(), self._mesh, [Shard(0)], shape=like.shape, stride=like.stride()
                )
                found[name] = cut.full_tensor()
        return found

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse: this process's part of whole tensors."""
        rank, count = dist.get_rank(), self._ranks.count
        found = dict(whole)
        for name in self._cut.keys() & whole.keys():
            rows = torch.chunk(whole[name], count)
            found[name] = rows[rank] if rank < len(rows) else whole[name][:0]
        return found


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is cut."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.to_local()
