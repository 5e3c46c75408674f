"""The operations of the decoder, forward and backward. A row has the same result in every batch.

`models.products` has the products with matrices.

Sampling computes a token in a batch of one-token rows, training inside a packed batch. The log-probs of both
are equal bit for bit only if the result of a row does not depend on the other rows. In float32 on a CPU,
these functions guarantee this in one of two ways:

* with a C compiler, by the kernels of `models/native`, which sum each element in a fixed order;
* without one, by torch: products by oneDNN, and other functions by reductions within a row.

A GPU uses the kernels of `models/triton_elementwise`. Other devices and dtypes use torch's operations. There,
results agree up to rounding. Gradients agree up to rounding everywhere; they need not be equal bit for bit.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.models.config.layer_kinds import Experts
from perilune.models.native import ops
from perilune.models.native.ops import LANES, Activation

HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def is_native(x: Tensor, row: int = LANES) -> bool:
    """Return whether the C kernels can compute `x` with rows of `row` elements."""
    return row % LANES == 0 and _is_on_cpu(x) and ops.is_available()


def is_exact(x: Tensor) -> bool:
    """Return whether operations on `x` give a row the same bits in every batch."""
    return _is_on_cpu(x) and (HAS_ONEDNN or ops.is_available())


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` records the operations."""
    return torch._C._is_tracing()


def _is_on_cpu(x: Tensor) -> bool:
    """Return whether `x` is float32 on a CPU and not traced: a trace records only torch's operations."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and not is_tracing()


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton kernels compute `x`, which requires a GPU."""
    return x.device.type == "cuda" and x.dtype in _FUSED and has_triton()


_FUSED = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels_for(x: Tensor, row: int = LANES) -> Any:
    """Return the module with compiled kernels for `x`: C on a CPU, Triton on a GPU, None for torch.

    Both modules have `rms_norm`, `rms_norm_backward`, `rotate` and `gated`.

    Args:
        row: elements of a row, as for `is_native`.
    """
    if uses_triton(x):
        from perilune.models import triton_elementwise

        return triton_elementwise
    return ops if is_native(x, row) else None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    Args:
        x: float[..., D].
        weight: float[D], or float[H, D] for float[N, H, D].
    """
    if not (is_exact(x) or uses_triton(x)):
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]
    if kernels := _kernels_for(x, x.shape[-1]):
        return kernels.rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]
    return _normalized(x, eps)[0].mul_(weight)


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1 / size).add_(eps).rsqrt_()
    return x * scale, scale


class _RMSNorm(torch.autograd.Function):
    """n = s x with s = (mean(x^2) + eps)^-1/2, y = n w.

    dx = s (g - n mean(n g)) with g = w dy;  dw = sum over rows of n dy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if kernels := _kernels_for(x, x.shape[-1]):
            out, scale = kernels.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, scale, weight)
            return out  # type: ignore[no-any-return]
        normalized, scale = _normalized(x, eps)
        ctx.save_for_backward(normalized, scale, weight)
        return normalized * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        if kernels := _kernels_for(grad, grad.shape[-1]):
            return *kernels.rms_norm_backward(grad, x, weight, scale), None
        normalized = x
        product = normalized * grad
        grad_weight = product.sum(tuple(range(grad.dim() - weight.dim())))
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight).addcmul_(normalized, mean, value=-1).mul_(scale)
        return grad_x, grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding (Su et al., 2021), with halves paired as in Hugging Face.

    Args:
        x: float[N, H, D].
        cos, sin: float[N, 1, D], made by `full_rotary_tables`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]
    return _apply_rotation(x, cos, sin, 1)


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of each head, as many as the tables have columns, and keep the others."""
    width, size = cos.shape[-1], x.shape[-1]
    if width == size:
        return rotate(x, cos, sin)
    rotated, rest = x[..., :width].contiguous(), x[..., width:]
    return torch.cat([rotate(rotated, cos, sin), rest], dim=-1)


def full_rotary_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float[..., D] tables of `rotate` from float[..., D / 2] cosines and sines.

    The pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    if kernels := _kernels_for(x, half):
        return kernels.rotate(x, cos[:, 0, :half], sin[:, 0, half:], direction)  # type: ignore[no-any-return]
    return (x * cos).addcmul_(x.roll(half, -1), sin, value=direction)


class _Rotate(torch.autograd.Function):
    """A rotation. Its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _apply_rotation(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _apply_rotation(grad, cos, sin, -1), None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer, 2020); both float[N, F]."""
    return _gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gelu(gate) * up with gelu's tanh approximation (Hendrycks and Gimpel, 2016); as `swiglu`."""
    return _gated(gate, up, "gelu_pytorch_tanh")


def clamped_glu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up within -7 and 7 (gpt-oss); as `swiglu`."""
    return _gated(gate, up, "clamped")


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return,no-untyped-call]
    return _apply_gate(gate, up, activation)


def _apply_gate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if kernels := _kernels_for(gate):
        return kernels.gated(gate, up, activation)  # type: ignore[no-any-return]
    if activation == "clamped":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return gate.mul(_ALPHA).neg_().exp_().add_(1).reciprocal_().mul_(gate).mul_(up + 1)
    return (_silu(gate) if activation == "silu" else _gelu(gate)).mul_(up)


_LIMIT, _ALPHA = 7.0, 1.702


def _silu(x: Tensor) -> Tensor:
    """Compute x / (1 + exp(-x)).

    torch's function is faster, but rounds the last elements of each thread differently, unless each thread
    computes a multiple of 32 elements.
    """
    threads = torch.get_num_threads()
    if not is_exact(x) or (threads <= 2 and x.shape[-1] % (32 * threads) == 0):
        return F.silu(x)
    return x / x.neg().exp_().add_(1)


def _gelu(x: Tensor) -> Tensor:
    """Compute x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    Where `is_exact`, the result of an element does not depend on its position in the tensor.
    """
    if not is_exact(x):
        return F.gelu(x, approximate="tanh")
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_((2 / torch.pi) ** 0.5)
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


class _Gated(torch.autograd.Function):
    """y = f(g) u;  dg = dy u f'(g);  du = dy f(g)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _apply_gate(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if uses_triton(grad):
            return *_kernels_for(grad).gated_backward(grad, gate, up, ctx.activation), None
        if ctx.activation == "clamped":
            return *_clamped_backward(grad, gate, up), None
        if ctx.activation == "gelu_pytorch_tanh":
            grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
            return grad_gate, _gelu(gate).mul_(grad), None
        if is_native(gate):
            return *ops.swiglu_backward(grad, gate, up), None
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad), None


def _clamped_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(a g): dg = dy (u + 1) s (1 + a g (1 - s)) and du = dy g s, and 0 beyond the limits."""
    inner, outer = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    share = (inner * _ALPHA).sigmoid()
    grad_gate = grad * (outer + 1) * share * (1 + _ALPHA * inner * (1 - share))
    return grad_gate * (gate <= _LIMIT), grad * inner * share * (up.abs() <= _LIMIT)


def route(
    logits: Tensor, per_token: int, normalized: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the K most probable experts of each token; on ties the lower index.

    Args:
        logits: float[N, E].
        per_token: K.
        normalized: scale the weights of each token to sum to one.
        forced: int64[N, K], experts to choose instead, in this order; in rows of -1, `logits` decide.

    Returns:
        Probabilities [N, K] in float32 at least, the largest first, and indices int64[N, K].
    """
    if is_native(logits):
        if torch.is_grad_enabled() and logits.requires_grad:
            return _Route.apply(logits, per_token, normalized, forced)  # type: ignore[no-any-return,no-untyped-call]
        return ops.route(logits, per_token, normalized, forced)
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    ordered, indices = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, indices = ordered[:, :per_token], indices[:, :per_token]
    if forced is not None:
        indices = torch.where(forced < 0, indices, forced)
        weights = probabilities.gather(-1, indices)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, indices


class _Route(torch.autograd.Function):
    """w = p at the chosen experts with p = softmax(x); dx = p (g - sum(g p)), g = dw there and 0 elsewhere.

    If normalized, w is the softmax of the chosen logits alone.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, per_token: int, normalized: bool, forced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = ops.route(logits, per_token, normalized, forced)
        ctx.save_for_backward(logits, weights, chosen)
        ctx.normalized = normalized
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, weights, chosen = ctx.saved_tensors
        dot = (grad * weights).sum(-1, keepdim=True)
        if ctx.normalized:
            grad_logits = torch.zeros_like(logits).scatter_(-1, chosen, weights * (grad - dot))
            return grad_logits, None, None, None
        spread = torch.zeros_like(logits).scatter_(-1, chosen, grad)
        return logits.softmax(-1) * (spread - dot), None, None, None


def route_by_sigmoid(
    logits: Tensor, experts: Experts, correction: Tensor, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by their corrected sigmoid in the best groups (DeepSeek-V3, arXiv 2412.19437).

    Args:
        logits: float[N, E].
        correction: float[E], added to the scores for the choice and not for the weights.
        forced: as for `route`.

    Returns:
        As `route`: weights, which sum to `experts.scale` if normalized, and indices.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = sigmoid(logits)
    with torch.no_grad():
        indices = _choose_in_best_groups(scores + correction, experts)
        if forced is not None:
            indices = torch.where(forced < 0, indices, forced)
    weights = scores.gather(-1, indices)
    if experts.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights if experts.scale == 1 else weights * experts.scale), indices


def _choose_in_best_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Return the indices int64[N, K] of the largest scores in the best groups; on ties the lower index."""
    if experts.groups > 1:
        groups = scores.view(len(scores), experts.groups, -1)
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        best = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : experts.groups_per_token]
        unseen = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        scores = groups.masked_fill(unseen[..., None], -torch.inf).flatten(1)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, : experts.per_token]


class _Sigmoid(torch.autograd.Function):
    """1 / (1 + exp(-x)). The result of an element does not depend on its position in the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.neg().exp_().add_(1).reciprocal_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out: Tensor = ctx.saved_tensors[0]
        return grad * out * (1 - out)


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)). An element has the same result in every batch."""
    out: Tensor = _Sigmoid.apply(x)  # type: ignore[no-untyped-call]
    return out
