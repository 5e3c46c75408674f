"""Log-probs of tokens, for both the engine and the learner."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from perilune.models.kernels import is_native
from perilune.models.memory import LOGITS_AT_ONCE, LOGITS_AT_ONCE_ON_GPU
from perilune.models.native import ops

_ROWS = 256  # a multiple of what the matrix units of processors compute at a time


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits float[N, V] divided by the temperature, in float32 at least. Temperature 0 (greedy) counts as 1.

    The largest logit is subtracted before the division. In the other order, a temperature of 1e-6 would turn
    the rounding errors of large logits into whole nats.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature in (0, 1):
        return logits
    return (logits - logits.detach().amax(-1, keepdim=True)) * (1 / temperature)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs [N, V] of all tokens, in float32 at least. Temperature 0 (greedy) counts as 1."""
    return F.log_softmax(apply_temperature(logits, temperature), dim=-1)


def gather_logprobs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """The entry of each row of float32[N, V] at int64[N], float32[N]."""
    return logprobs.gather(-1, token_ids[:, None])[:, 0]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of each distribution.

    Args:
        logits: float[N, V].
        targets: int64[N].
        temperature: divides the logits, as in sampling; 0 (greedy) counts as 1.

    Returns:
        log-probs float32[N], differentiable, and entropies float32[N], without gradient.
    """
    temperature = temperature or 1.0
    if is_native(logits):
        of_native: tuple[Tensor, Tensor] = _Native.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
        return of_native
    of_torch: tuple[Tensor, Tensor] = _Torch.apply(apply_temperature(logits.float(), temperature), targets)  # type: ignore[no-untyped-call]
    return of_torch


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, normalizers, entropy = ops.token_logprobs(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        gradient = ops.token_logprobs_backward(gradients[0], logits, targets, ctx.temperature, normalizers)
        return gradient, None, None


class _Torch(torch.autograd.Function):
    """One pass forward. The backward pass reuses the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        picked = gather_logprobs(logprobs, targets)
        probabilities = logprobs.exp()
        entropy = logprobs.mul_(probabilities).sum(1).neg_()
        ctx.save_for_backward(probabilities, targets)
        ctx.mark_non_differentiable(entropy)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probabilities, targets = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        out = probabilities * -gradient
        out.scatter_add_(1, targets.unsqueeze(1), gradient)
        return out, None


def in_row_chunks(
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    hidden: Tensor,
    token_ids: Tensor,
    vocab_size: int,
) -> tuple[Tensor, ...]:
    """`of_rows(hidden, token_ids)`, computed in chunks of rows when the logits would be large.

    N V logits and their gradient take gigabytes, although only one number per row is needed. In chunks,
    memory grows with N and with V but not with their product. In exchange, training recomputes the logits in
    the backward pass, and the head takes about two thirds longer. Rows do not depend on each other, so the
    values are the same. The gradient of the head is the sum over the chunks.

    Args:
        of_rows: maps float[n, d] and int64[n] to tensors with one entry per row.
        hidden: float[N, d].
        token_ids: int64[N].
        vocab_size: V, the logits that `of_rows` computes per row.
    """
    most = LOGITS_AT_ONCE_ON_GPU if hidden.device.type == "cuda" else LOGITS_AT_ONCE
    rows = max(1, most // vocab_size)
    rows = rows // _ROWS * _ROWS or rows
    if len(hidden) <= rows:
        return of_rows(hidden, token_ids)
    training = torch.is_grad_enabled()
    parts = [
        checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False)
        if training
        else of_rows(*part)
        for part in zip(torch.split(hidden, rows), torch.split(token_ids, rows), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
