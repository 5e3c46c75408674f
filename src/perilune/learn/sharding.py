"""Sharded training of a decoder with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each rank keeps its shard of every trained weight, with its gradient and its two moments. A layer's weights
are gathered while the layer is computed. In addition, every rank has a whole decoder for the engine and other
code, which gets the new weights after each update.

FSDP sums gradients over ranks in its own order, so results equal those of one process up to float32 rounding,
not bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.learn.checkpoints import check_fits
from perilune.learn.distributed import Ranks
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder

T = TypeVar("T")


class ShardedDecoder:
    """A copy of a decoder without experts, sharded over ranks.

    Attributes:
        module: the sharded copy, for forward passes with gradients.
        parameters: this rank's shard of every trained weight, by name: plain tensors, split along the first
            axis, that share storage with `module`. A shard may be empty.
    """

    def __init__(self, decoder: Decoder, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self._ranks = ranks
        with torch.device("meta"):
            self.module = type(decoder)(decoder.config)
        self.module.set_precision(decoder.precision)
        self.module.recompute = decoder.recompute
        device = next(decoder.parameters()).device.type
        self._mesh = init_device_mesh(device, (ranks.count,))
        names = {id(part): f"{name}." if name else "" for name, part in self.module.named_modules()}
        for part in (*self.module.model.layers, self.module):
            _copy_into(part, decoder, names[id(part)])  # only one layer at a time is unsharded
            fully_shard(part, mesh=self._mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # a sum: the weights include the denominator of the step
            part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        self._sharded = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.parameters = {name: nn.Parameter(_local_shard(p.detach())) for name, p in self._sharded.items()}

    def distribute(self, batches: Sequence[T], others: Sequence[nn.Parameter]) -> Iterator[T]:
        """Iterate over this rank's micro-batches and sum gradients, as `Ranks.distribute` does.

        A rank that has no micro-batch left runs the layers with a loss of 0, because ranks compute layers
        together.

        Args:
            others: trained parameters besides the decoder's, which every rank has in full.
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
                self._run_without_loss()
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                shard, gradient = self.parameters[name], _local_shard(parameter.grad)
                shard.grad = gradient if shard.grad is None else shard.grad + gradient
                parameter.grad = None
        if batches and others:
            self._reduce(others)

    def _run_without_loss(self) -> None:
        from torch.distributed.tensor import DTensor

        device = self._mesh.device_type
        token = torch.zeros(1, dtype=torch.int64, device=device)
        bounds = torch.tensor([0, 1], device=device)
        loss = self.module(token, token, PackedAttention(bounds)).sum()
        for parameter in self.module.parameters():
            if not isinstance(parameter, DTensor):  # gathered outside of the layers, such as the head
                loss = loss + parameter.sum()
        (loss * 0).backward()

    def _reduce(self, others: Sequence[nn.Parameter]) -> None:
        flags = torch.tensor([float(parameter.grad is not None) for parameter in others])
        flags = self._ranks.all_reduce("the gradients' flags", flags)
        for flag, parameter in zip(flags.tolist(), others, strict=True):
            if flag:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._ranks.all_reduce("the critic's gradient", gradient)

    def gather_norms(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute norms of whole tensors from the norms of this rank's shards; other norms are unchanged."""
        names = [name for name in norms if name in self.parameters]
        if not names:
            return dict(norms)
        squares = torch.stack([norms[name] for name in names]).square()
        whole = self._ranks.all_reduce("the gradient's norm", squares).sqrt()
        return {**norms, **dict(zip(names, whole, strict=True))}

    @torch.no_grad()
    def publish(self, decoder: Decoder) -> None:
        """Copy the current weights to the whole decoder, one tensor at a time."""
        for name, parameter in decoder.named_parameters():
            if name in self.parameters:
                parameter.copy_(self._gather(name, self.parameters[name]))

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors from the shards of all ranks; tensors that are not sharded are unchanged."""
        return {name: self._gather(name, part) for name, part in parts.items()}

    def gather_on_leader(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather into CPU memory of the first rank only. Other ranks take part and return {}."""
        tensors = {}
        for name, part in parts.items():
            whole = self._gather(name, part)
            if self._ranks.leads:
                tensors[name] = whole.cpu()
        return tensors

    def _gather(self, name: str, part: Tensor) -> Tensor:
        """Gather a whole tensor from the shards of all ranks; return `part` if it is not sharded."""
        from torch.distributed.tensor import DTensor, Shard

        if name not in self._sharded:
            return part
        like = self._sharded[name]
        cut = DTensor.from_local(
            part.detach(), self._mesh, [Shard(0)], shape=like.shape, stride=like.stride()
        )
        return cut.full_tensor()

    def shard(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of whole tensors, the inverse of `gather`."""
        rank, count = dist.get_rank(), self._ranks.count
        shards = dict(whole)
        for name in self._sharded.keys() & whole.keys():
            rows = torch.chunk(whole[name], count)
            shards[name] = rows[rank] if rank < len(rows) else whole[name][:0]
        return shards

    def scatter(
        self, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor], directory: Path
    ) -> dict[str, Tensor]:
        """Return this rank's shards of the tensors `whole` of the first rank, in CPU memory.

        Args:
            whole: ignored in other ranks, which may be on machines without the checkpoint.
            parts: this rank's shards of tensors with the same names, shapes and dtypes.

        Raises:
            RequestError: as `check_fits`, in the first rank.
        """
        like = {
            name: torch.empty_like(part, device="meta")
            if name not in self._sharded
            else torch.empty(self._sharded[name].shape, dtype=part.dtype, device="meta")
            for name, part in parts.items()
        }
        if self._ranks.leads:
            check_fits(like, whole, directory)
        shards = {}
        for name, shape in like.items():
            tensor = whole[name] if self._ranks.leads else torch.empty_like(shape, device="cpu")
            with self._ranks.waiting("the checkpoint"):
                dist.broadcast(tensor, 0)
            shards[name] = self.shard({name: tensor})[name].clone()
        return shards


@torch.no_grad()
def _copy_into(part: nn.Module, source: nn.Module, prefix: str) -> None:
    """Replace each meta parameter of `part` by a copy of the parameter `prefix` + name of `source`."""
    for name, parameter in list(part.named_parameters()):
        if parameter.is_meta:
            original = source.get_parameter(prefix + name)
            owner, _, attribute = name.rpartition(".")
            copy = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            setattr(part.get_submodule(owner), attribute, copy)


def _local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.to_local()
