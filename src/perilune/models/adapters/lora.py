"""Low-rank adaptation (LoRA; Hu et al., arXiv 2106.09685): a frozen matrix W and a trained addition s B A.

Every product uses the merged matrix W + s (B A), which is computed from W for each product and not kept. So
the policy that is trained equals, bit for bit, the merged policy that is sampled, saved and served. The usual
W x + s B (A x) rounds differently, and sampler and learner would disagree. Merging takes r / N of the time of
a product of N rows. No gradient has the size of W:

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
from perilune.models.layers import ExpertMap, Projection
from perilune.models.memory import require_base
from perilune.models.narrow import NarrowKind, narrowed
from perilune.models.products import biased, gradient_product, linear, product
from perilune.models.scratch import scratch_buffer

BaseKind = Literal["float32", "bfloat16", "int8"]
"""How frozen matrices are stored."""

A, B = "lora_A", "lora_B"
_SCALES = "scales"  # buffer of a linear map whose weight is int8
_STREAM = 0x10FA  # separates the random numbers of A from others of the same seed


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
        pairs = [tensor for part in self.parts for tensor in pair_of(part)]
        if not (torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in pairs))):
            return linear(x, self.temporary_weight(), self.joined_bias(), self.precision)
        out: Tensor = _Merged.apply(x, self, *pairs)  # type: ignore[no-untyped-call]
        return biased(out, self.joined_bias())

    @torch.no_grad()
    def temporary_weight(self) -> Tensor:
        """float32[O, I] of all parts for one product; the next temporary weight overwrites its memory."""
        first = self.parts[0].weight
        rows = [part.weight.shape[0] for part in self.parts]
        dtype = torch.promote_types(torch.float32, first.dtype)
        out = scratch_buffer("merged", [sum(rows), first.shape[1]], dtype, first.device)
        for part, its in zip(self.parts, torch.split(out, rows), strict=True):
            self._write(part, its)
        return out

    @torch.no_grad()
    def weight_of(self, part: nn.Module) -> Tensor:
        """The merged float32[O, I] of one part, without gradient."""
        weight: Tensor = part.weight  # type: ignore[assignment]
        out = torch.empty_like(weight, dtype=torch.promote_types(torch.float32, weight.dtype))
        self._write(part, out)
        return out

    def _write(self, part: nn.Module, out: Tensor) -> None:
        widen(part, out)
        if pair := pair_of(part):
            a, b = pair
            # The kernel of all products: sums over the rank must have the same order everywhere.
            out.add_(product(b * self.scale, a.t()))


class _Merged(torch.autograd.Function):
    """A product with the merged weights of a projection, with gradients of x and of each A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: MergedProjection, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(x, *pairs)
        ctx.projection = projection
        return product(x, projection.temporary_weight(), projection.precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        projection: MergedProjection = ctx.projection
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gradient_product(grad, projection.temporary_weight().t(), projection.precision)
        gradients: list[Tensor] = []
        start = 0
        for part in projection.parts:
            stop = start + part.weight.shape[0]
            if pair := pair_of(part):
                a, b = pair
                dy, fed = grad[:, start:stop].to(b.dtype), x.to(a.dtype)
                gradients.append((dy @ b).mul_(projection.scale).t() @ fed)
                gradients.append(dy.t() @ (fed @ a.t()).mul_(projection.scale))
            start = stop
        return grad_x, None, *gradients


def attach(decoder: Decoder, targets: Collection[str], rank: int, alpha: float, seed: int) -> None:
    """Freeze `decoder` and add a trainable A and B to its linear maps called `targets` ("q_proj", ...).

    A is drawn as in PEFT, uniformly within 1 / sqrt(I). B is 0, so the policy is unchanged. In a model that
    stacks several maps in one matrix, such as `qkv_proj`, the name of one stands for all of them.
    """
    decoder.requires_grad_(False)
    random = np.random.default_rng([seed, _STREAM])
    names = {decoder.config.family.module(target) for target in targets}
    for name, part in linear_maps(decoder):
        if name.rpartition(".")[2] in names:
            out, inner = part.weight.shape
            bound = 1 / math.sqrt(inner)
            drawn = random.uniform(-bound, bound, (rank, inner)).astype(np.float32)
            set_pair(part, torch.from_numpy(drawn), torch.zeros(out, rank))
    install_merged_projections(decoder, alpha / rank)


def attach_pairs(decoder: Decoder, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
    """Freeze `decoder` and add the given A and B to the linear maps that they name."""
    decoder.requires_grad_(False)
    for name, (a, b) in pairs.items():
        set_pair(decoder.get_submodule(name), a, b)
    install_merged_projections(decoder, scale)


def narrow_kinds(decoder: Decoder, kind: BaseKind) -> dict[str, NarrowKind]:
    """How the matrices of products are stored in a base of this `kind`, by parameter; {} for float32.

    Linear maps of layers become `kind`. Embedding and head stay in bfloat16 at least, because their rounding
    matters most. Routers, norms and biases are unchanged.

    Raises:
        RequestError: for a model whose experts share tensors.
    """
    require_base(decoder.config, kind)
    if kind == "float32":
        return {}
    tables = {id(part) for part in (decoder.model.embed_tokens, *decoder.head.parts)}
    of_tables = [name for name, part in decoder.named_modules() if id(part) in tables]
    of_layers = [name for name, _ in linear_maps(decoder)]
    kinds: dict[str, NarrowKind] = dict.fromkeys((f"{name}.weight" for name in of_tables), "bfloat16")
    return kinds | dict.fromkeys((f"{name}.weight" for name in of_layers), kind)


def narrow_part(decoder: Decoder, name: str, kind: NarrowKind) -> None:
    """Store the matrix `name` as `kind` from now on. Call `install_merged_projections` afterwards."""
    part = decoder.get_submodule(name.rpartition(".")[0])
    narrow = narrowed(part.weight, kind)  # type: ignore[arg-type]
    part.weight = nn.Parameter(narrow.values, requires_grad=False)
    if narrow.scales is not None:
        part.register_buffer(_SCALES, narrow.scales)


def narrow_base(decoder: Decoder, kind: BaseKind) -> None:
    """Store all matrices of `decoder` as `narrow_kinds` says from now on, without gradients."""
    for name, own in narrow_kinds(decoder, kind).items():
        narrow_part(decoder, name, own)
    install_merged_projections(decoder)


def widen(part: nn.Module, out: Tensor) -> None:
    """Write the matrix of a part to `out`, float32[O, I]."""
    weight: Tensor = part.weight  # type: ignore[assignment]
    scales: Tensor | None = getattr(part, _SCALES, None)
    out.copy_(weight.detach())
    if scales is not None:
        out.mul_(scales[:, None])


def pair_of(part: nn.Module) -> tuple[Tensor, ...]:
    """A and B of a linear map; empty when it has none."""
    return tuple(part.get_submodule(name).weight for name in (A, B)) if hasattr(part, A) else ()  # type: ignore[misc]


def set_pair(part: nn.Module, a: Tensor, b: Tensor) -> None:
    """Add a trainable A and B to a linear map, on its device and in float32 at least."""
    weight: Tensor = part.weight  # type: ignore[assignment]
    dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
    for name, values in ((A, a), (B, b)):
        half = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
        half.weight = nn.Parameter(values.to(weight.device, dtype, copy=True))
        part.add_module(name, half)


def pairs_of(decoder: Decoder) -> dict[str, tuple[Tensor, ...]]:
    """All A and B by the name of their linear map."""
    return {name: pair for name, part in decoder.named_modules() if (pair := pair_of(part))}


def scale_of(decoder: Decoder) -> float:
    """The scale s, which all maps share; 0 without an adapter."""
    scales = [one.scale for one in decoder.projections() if isinstance(one, MergedProjection)]
    return max(scales, default=0.0)


def shared(decoder: Decoder) -> Decoder:
    """A second decoder on the same memory, without gradients; replacing its tensors spares the first."""
    kept: dict[int, Tensor] = {id(tensor): tensor for tensor in decoder.buffers()}
    kept |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in decoder.parameters()}
    return copy.deepcopy(decoder, kept)


def base_kind(decoder: Decoder) -> BaseKind:
    """How the matrices of layers are stored."""
    dtypes = {part.weight.dtype for _, part in linear_maps(decoder)} - {decoder.dtype}
    return "int8" if torch.int8 in dtypes else "bfloat16" if dtypes else "float32"


def base_of(decoder: Decoder) -> Decoder:
    """The policy without its adapter, sharing the frozen weights."""
    base = shared(decoder)
    for part in base.modules():
        if pair_of(part):
            del part.lora_A, part.lora_B
    return base


def base_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dictionary without A and B."""
    return {
        name: tensor
        for name, tensor in decoder.state_dict().items()
        if not {A, B}.intersection(name.split("."))
    }


@torch.no_grad()
def merged(decoder: Decoder, device: torch.device | None = None) -> Decoder:
    """A plain decoder with the adapter merged, bit for bit the same policy.

    Matrices are merged one at a time and moved to `device`, by default the decoder's own.
    """
    device = device or decoder.model.norm.weight.device
    with torch.device("meta"):
        plain = Decoder(decoder.config)
    weights = base_state(decoder)
    names = {id(part): name for name, part in decoder.named_modules()}
    for projection in decoder.projections():
        if isinstance(projection, MergedProjection):
            weights |= {
                f"{names[id(part)]}.weight": projection.weight_of(part).to(device)
                for part in projection.parts
            }
    kept = {name: weights[name].to(device, decoder.dtype) for name in plain.state_dict()}
    plain.load_state_dict(kept, assign=True)
    return plain


def install_merged_projections(decoder: Decoder, scale: float = 0.0) -> None:
    """Replace projections by `MergedProjection` where a matrix is narrow or has an A and a B."""

    def is_special(part: nn.Linear | nn.Embedding | ExpertMap) -> bool:
        return bool(pair_of(part)) or part.weight.dtype != decoder.dtype

    for module in list(decoder.modules()):
        for attribute, projection in list(vars(module).items()):
            if isinstance(projection, Projection) and any(is_special(part) for part in projection.parts):
                setattr(module, attribute, MergedProjection(projection, scale))


def linear_maps(decoder: Decoder) -> Iterator[tuple[str, nn.Linear]]:
    """The linear maps of all layers by name, without routers."""
    own = {
        id(part)
        for projection in decoder.projections()
        if not projection.exact and projection is not decoder.head
        for part in projection.parts
    }
    for name, part in decoder.named_modules():
        if id(part) in own and isinstance(part, nn.Linear):
            yield name, part
