"""Low-rank adaptation (LoRA; Hu et al., arXiv 2106.09685): a frozen matrix W and a trained addition s B A.

Every product computes the merged matrix W + s (B A) and discards it afterwards. So the trained policy equals,
bit for bit, the merged policy that is sampled, saved and served. The usual W x + s B (A x) rounds
differently, so that sampler and learner would disagree. Merging takes r / N of the time of a product of N
rows. No gradient has the size of W:

    dx = dy (W + s B A);   dB = s dy^T (x A^T);   dA = s (dy B)^T x

W may be stored in bfloat16 or int8 (`models.narrow`), as in QLoRA (Dettmers et al., arXiv 2305.14314, with
four bits). It is widened one matrix at a time and merged in float32.

A is float32[r, I], B float32[O, r]; s = alpha / r. They are submodules of their linear map under PEFT's
names, `q_proj.lora_A.weight` and `q_proj.lora_B.weight`.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from perilune.models.decoder import Decoder
from perilune.models.layers import ExpertLinear, Projection
from perilune.models.memory import check_base_kind
from perilune.models.narrow import NarrowKind, round_weight
from perilune.models.products import add_bias, gradient_matmul, linear, matmul
from perilune.models.scratch import scratch_buffer

BaseKind = Literal["float32", "bfloat16", "int8"]
"""Storage of frozen matrices."""

A, B = "lora_A", "lora_B"
_SCALES = "scales"  # buffer of a linear map whose weight is int8
_SEED_STREAM = 0x10FA  # separates the random numbers of A from other uses of the same seed


class MergedProjection(Projection):
    """Linear maps of one input with the weights W + s B A, stacked.

    Args:
        base: the maps; a map without A and B has the weight W.
        scale: s.
    """

    def __init__(self, base: Projection, scale: float) -> None:
        super().__init__(*base.parts, exact=base.exact)
        self.scale, self.precision = scale, base.precision

    def __call__(self, x: Tensor) -> Tensor:
        pairs = [tensor for part in self.parts for tensor in get_pair(part)]
        if not (torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in pairs))):
            return linear(x, self.temporary_weight(), self.stack_biases(), self.precision)
        out: Tensor = _Merged.apply(x, self, *pairs)  # type: ignore[no-untyped-call]
        return add_bias(out, self.stack_biases())

    @torch.no_grad()
    def temporary_weight(self) -> Tensor:
        """Return float32[O, I] of all parts for one product. The next temporary weight overwrites it."""
        first = self.parts[0].weight
        rows = [part.weight.shape[0] for part in self.parts]
        dtype = torch.promote_types(torch.float32, first.dtype)
        out = scratch_buffer("merged", [sum(rows), first.shape[1]], dtype, first.device)
        for part, weight in zip(self.parts, torch.split(out, rows), strict=True):
            self._write(part, weight)
        return out

    @torch.no_grad()
    def get_weight(self, part: nn.Module) -> Tensor:
        """Return the merged float32[O, I] of one part, without gradient."""
        weight: Tensor = part.weight  # type: ignore[assignment]
        out = torch.empty_like(weight, dtype=torch.promote_types(torch.float32, weight.dtype))
        self._write(part, out)
        return out

    def _write(self, part: nn.Module, out: Tensor) -> None:
        write_float32(part, out)
        if pair := get_pair(part):
            a, b = pair
            # `matmul`, so that the sum over the rank has the same order everywhere.
            out.add_(matmul(b * self.scale, a.t()))


class _Merged(torch.autograd.Function):
    """A product with the merged weights of a projection, with gradients of x and of each A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: MergedProjection, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(x, *pairs)
        ctx.projection = projection
        return matmul(x, projection.temporary_weight(), projection.precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        projection: MergedProjection = ctx.projection
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gradient_matmul(grad, projection.temporary_weight().t(), projection.precision)
        gradients: list[Tensor] = []
        start = 0
        for part in projection.parts:
            stop = start + part.weight.shape[0]
            if pair := get_pair(part):
                a, b = pair
                dy, fed = grad[:, start:stop].to(b.dtype), x.to(a.dtype)
                gradients.append((dy @ b).mul_(projection.scale).t() @ fed)
                gradients.append(dy.t() @ (fed @ a.t()).mul_(projection.scale))
            start = stop
        return grad_x, None, *gradients


def attach_adapter(decoder: Decoder, targets: Collection[str], rank: int, alpha: float, seed: int) -> None:
    """Freeze `decoder` and add a trainable A and B to its linear maps called `targets` ("q_proj", ...).

    A is drawn as in PEFT, uniformly within 1 / sqrt(I). B is 0, so the policy is unchanged. In a model that
    stacks several maps in one matrix, such as `qkv_proj`, the name of one stands for all of them.
    """
    decoder.requires_grad_(False)
    random = np.random.default_rng([seed, _SEED_STREAM])
    names = {decoder.config.family.module_name(target) for target in targets}
    for name, part in layer_linear_maps(decoder):
        if name.rpartition(".")[2] in names:
            out, inner = part.weight.shape
            bound = 1 / math.sqrt(inner)
            values = random.uniform(-bound, bound, (rank, inner)).astype(np.float32)
            set_pair(part, torch.from_numpy(values), torch.zeros(out, rank))
    install_merged_projections(decoder, alpha / rank)


def attach_adapter_pairs(decoder: Decoder, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
    """Freeze `decoder` and add the given A and B to the linear maps that they name."""
    decoder.requires_grad_(False)
    for name, (a, b) in pairs.items():
        set_pair(decoder.get_submodule(name), a, b)
    install_merged_projections(decoder, scale)


def base_kinds(decoder: Decoder, kind: BaseKind) -> dict[str, NarrowKind]:
    """Return the storage of each matrix in a base of this `kind`, by name of the parameter; {} for float32.

    Linear maps of layers are stored as `kind`. Embedding and head are bfloat16 even if `kind` is int8,
    because their rounding matters most. Routers, norms and biases are unchanged.

    Raises:
        RequestError: for a model whose experts share tensors.
    """
    check_base_kind(decoder.config, kind)
    if kind == "float32":
        return {}
    tables = {id(part) for part in (decoder.model.embed_tokens, *decoder.head.parts)}
    table_names = [name for name, part in decoder.named_modules() if id(part) in tables]
    layer_names = [name for name, _ in layer_linear_maps(decoder)]
    kinds: dict[str, NarrowKind] = dict.fromkeys((f"{name}.weight" for name in table_names), "bfloat16")
    return kinds | dict.fromkeys((f"{name}.weight" for name in layer_names), kind)


def convert_matrix(decoder: Decoder, name: str, kind: NarrowKind) -> None:
    """Convert the matrix `name` to `kind`. Call `install_merged_projections` afterwards."""
    part = decoder.get_submodule(name.rpartition(".")[0])
    narrow = round_weight(part.weight, kind)  # type: ignore[arg-type]
    part.weight = nn.Parameter(narrow.values, requires_grad=False)
    if narrow.scales is not None:
        part.register_buffer(_SCALES, narrow.scales)


def convert_base(decoder: Decoder, kind: BaseKind) -> None:
    """Convert all matrices of `decoder` to the kinds of `base_kinds`, without gradients."""
    for name, narrow_kind in base_kinds(decoder, kind).items():
        convert_matrix(decoder, name, narrow_kind)
    install_merged_projections(decoder)


def write_float32(part: nn.Module, out: Tensor) -> None:
    """Write the matrix of a part to `out`, float32[O, I]."""
    weight: Tensor = part.weight  # type: ignore[assignment]
    scales: Tensor | None = getattr(part, _SCALES, None)
    out.copy_(weight.detach())
    if scales is not None:
        out.mul_(scales[:, None])


def get_pair(part: nn.Module) -> tuple[Tensor, ...]:
    """Return A and B of a linear map, or () without an adapter."""
    return tuple(part.get_submodule(name).weight for name in (A, B)) if hasattr(part, A) else ()  # type: ignore[misc]


def set_pair(part: nn.Module, a: Tensor, b: Tensor) -> None:
    """Add a trainable A and B to a linear map, on its device and in float32 at least."""
    weight: Tensor = part.weight  # type: ignore[assignment]
    dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
    for name, values in ((A, a), (B, b)):
        half = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
        half.weight = nn.Parameter(values.to(weight.device, dtype, copy=True))
        part.add_module(name, half)


def adapter_pairs(decoder: Decoder) -> dict[str, tuple[Tensor, ...]]:
    """Return A and B by the name of their linear map."""
    return {name: pair for name, part in decoder.named_modules() if (pair := get_pair(part))}


def adapter_scale(decoder: Decoder) -> float:
    """Return the scale s, which all maps share; 0 without an adapter."""
    scales = [part.scale for part in decoder.projections() if isinstance(part, MergedProjection)]
    return max(scales, default=0.0)


def share_weights(decoder: Decoder) -> Decoder:
    """Return a decoder on the same memory, without gradients. Its tensors can be replaced independently."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in decoder.buffers()}
    tensors |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in decoder.parameters()}
    return copy.deepcopy(decoder, tensors)


def base_kind(decoder: Decoder) -> BaseKind:
    """Return the storage of the layers' matrices."""
    dtypes = {part.weight.dtype for _, part in layer_linear_maps(decoder)} - {decoder.dtype}
    return "int8" if torch.int8 in dtypes else "bfloat16" if dtypes else "float32"


def without_adapter(decoder: Decoder) -> Decoder:
    """Return the policy without its adapter, sharing the frozen weights."""
    base = share_weights(decoder)
    for part in base.modules():
        if get_pair(part):
            del part.lora_A, part.lora_B
    return base


def base_state(decoder: Decoder) -> dict[str, Tensor]:
    """Return the state dictionary without A and B."""
    return {
        name: tensor
        for name, tensor in decoder.state_dict().items()
        if not {A, B}.intersection(name.split("."))
    }


@torch.no_grad()
def merge_adapter(decoder: Decoder, device: torch.device | None = None) -> Decoder:
    """Return a plain decoder with the adapter merged: the same policy, bit for bit.

    Matrices are merged one at a time and moved to `device`, by default that of the decoder.
    """
    device = device or decoder.model.norm.weight.device
    with torch.device("meta"):
        plain = Decoder(decoder.config)
    weights = base_state(decoder)
    names = {id(part): name for name, part in decoder.named_modules()}
    for projection in decoder.projections():
        if isinstance(projection, MergedProjection):
            weights |= {
                f"{names[id(part)]}.weight": projection.get_weight(part).to(device)
                for part in projection.parts
            }
    state = {name: weights[name].to(device, decoder.dtype) for name in plain.state_dict()}
    plain.load_state_dict(state, assign=True)
    return plain


def install_merged_projections(decoder: Decoder, scale: float = 0.0) -> None:
    """Replace projections with a narrow matrix, or with A and B, by `MergedProjection`s with this scale."""

    def is_special(part: nn.Linear | nn.Embedding | ExpertLinear) -> bool:
        return bool(get_pair(part)) or part.weight.dtype != decoder.dtype

    for module in list(decoder.modules()):
        for attribute, projection in list(vars(module).items()):
            if isinstance(projection, Projection) and any(is_special(part) for part in projection.parts):
                setattr(module, attribute, MergedProjection(projection, scale))


def layer_linear_maps(decoder: Decoder) -> Iterator[tuple[str, nn.Linear]]:
    """Iterate over the linear maps of all layers by name, without routers."""
    ids = {
        id(part)
        for projection in decoder.projections()
        if not projection.exact and projection is not decoder.head
        for part in projection.parts
    }
    for name, part in decoder.named_modules():
        if id(part) in ids and isinstance(part, nn.Linear):
            yield name, part
