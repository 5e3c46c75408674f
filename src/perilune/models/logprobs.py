"""Log-probs of chosen tokens: the functions that both the engine and the learner call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from perilune.models.kernels import is_native
from perilune.models.memory import LOGITS_AT_ONCE
from perilune.models.native import ops


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits float[N, V] to take the softmax of, in float32 at least; temperature 0 (greedy) reads as 1.

    The largest logit is subtracted before the division. The other way round, a temperature of 1e-6 multiplies
    the rounding errors of large logits to whole nats.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature in (0, 1):
        return logits
    return (logits - logits.detach().amax(-1, keepdim=True)) * (1 / temperature)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of every token, [N, V], in float32 at least; temperature 0 (greedy) reads as 1."""
    return F.log_softmax(apply_temperature(logits, temperature), dim=-1)


def gather_logprobs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """float32[N]: the entry of each row of float32[N, V] that int64[N] names."""
    return logprobs.gather(-1, token_ids[:, None])[:, 0]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of each distribution.

    Args:
        logits: float[N, V].
        targets: int64[N].
        temperature: divides the logits, as it did when sampling; 0 (greedy) reads as 1.

    Returns:
        log-probs float32[N], differentiable, and entropies float32[N], which carry no gradient.
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
    """In one pass; backward reuses the softmax."""

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
    """`of_rows(hidden, token_ids)`, computed from a few rows at a time where their logits would be large.

    Logits take N V numbers, and with their gradient several times that: gigabytes, where what is asked of
    them is one number a row. Here memory grows with N and with V but not with their product; for that,
    learning computes logits a second time, during the backward pass: the head takes some two thirds longer.
    What each row gives does not depend on its neighbours, so values are the same; gradients of the head are
    sums of the parts'.

    Args:
        of_rows: gives tensors of one entry a row, from float[n, d] and int64[n].
        hidden: float[N, d].
        token_ids: int64[N].
        vocab_size: V, logits that `of_rows` computes for a row.
    """
    rows = max(1, LOGITS_AT_ONCE // vocab_size)
    if len(hidden) <= rows:
        return of_rows(hidden, token_ids)
    learning = torch.is_grad_enabled()
    parts = [
        checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False)
        if learning
        else of_rows(*part)
        for part in zip(torch.split(hidden, rows), torch.split(token_ids, rows), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
