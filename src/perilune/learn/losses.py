"""The three loss components, and the log-probs they are made of.

M learned tokens, V vocabulary. Weights are final (advantage, aggregation and denominator included), so a
loss is a plain sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: beyond it a token says nothing but overflow."""


class _TokenLogprobs(torch.autograd.Function):
    """Log-prob of the target and entropy of the distribution in one pass; backward reuses the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
        probabilities = logprobs.exp()
        entropy = logprobs.mul_(probabilities).sum(1).neg_()
        ctx.save_for_backward(probabilities, targets)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probabilities, targets = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        out = probabilities * -gradient
        out.scatter_add_(1, targets.unsqueeze(1), gradient)
        return out, None


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of each distribution.

    Args:
        logits: float[M, V].
        targets: int64[M].
        temperature: divides the logits, as it did when sampling.

    Returns:
        log-probs [M], differentiable, and entropies [M], which carry no gradient.
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    chosen, entropy = _TokenLogprobs.apply(logits, targets)  # type: ignore[no-untyped-call]
    return chosen, entropy


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective: sum of -min(ratio * w, clip(ratio, 1 - low, 1 + high) * w).

    Source: Schulman et al., arXiv 1707.06347, eq. 7; asymmetric range from DAPO (arXiv 2503.14476); with
    `dual_clip` c the loss of a token with w < 0 is at most -c * w (Ye et al., arXiv 1912.09729, eq. 5).

    Args:
        logprobs, old_logprobs, weights: float[M]; the last two carry no gradient.

    Returns:
        the loss, and bool[M]: tokens whose gradient the clip took away.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = ratio * weights
    limited = ratio.clamp(1 - clip_low, 1 + clip_high) * weights
    gain = torch.minimum(free, limited)
    clipped = limited < free
    if dual_clip is not None:
        floor = dual_clip * weights
        hit = (weights < 0) & (gain < floor)
        gain = torch.where(hit, floor, gain)
        clipped = clipped | hit
    return -gain.sum(), clipped


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Sum of -w * log-prob."""
    return -(weights * logprobs).sum()


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Sum of w * k3(log-prob - reference log-prob)."""
    return (weights * k3(logprobs - reference_logprobs)).sum()


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x, never negative: unbiased for KL(p || q) given x = log p - log q on samples of p.

    As a loss its gradient is that of KL(q || p) (Schulman, "Approximating KL divergence").
    """
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x
