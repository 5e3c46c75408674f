"""The components of the loss.

M learned tokens, V vocabulary. Weights include advantage, aggregation and denominator, so a loss is a plain
sum over tokens.
"""

import torch
from torch import Tensor

from perilune.learn.weights import KLEstimator, Surrogate

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this range before `exp`, to avoid overflow."""


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    weights: Tensor,
    surrogate: Surrogate,
    episode_of: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the token losses that `surrogate` defines: those of PPO, GSPO or CISPO.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; asymmetric range from DAPO (arXiv 2503.14476); dual
    clip from Ye et al. (arXiv 1912.09729, eq. 5); GSPO (arXiv 2507.18071, eq. 14); CISPO (arXiv 2506.13585).

    Args:
        logprobs, old_logprobs, weights: float[M]; the last two carry no gradient.
        episode_of: int64[M], required for ratios of whole episodes, whose learned tokens must all be among
            the M tokens.

    Returns:
        The loss, and bool[M]: the tokens whose gradient the clip removed (or bounded, with CISPO).
    """
    log_ratio = logprobs - old_logprobs
    if surrogate.ratio != "token":
        assert episode_of is not None
        per_episode = episode_mean if surrogate.ratio == "sequence" else episode_sum
        log_ratio = logprobs - logprobs.detach() + per_episode(log_ratio.detach(), episode_of)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    limited = ratio.clamp(surrogate.low, surrogate.high)
    if surrogate.clip == "weight":
        return -(weights * limited.detach() * logprobs).sum(), limited != ratio
    free = ratio * weights
    gain = torch.minimum(free, limited * weights)
    clipped = gain < free
    if surrogate.dual is not None:
        floor = surrogate.dual * weights
        hit = (weights < 0) & (gain < floor)
        gain = torch.where(hit, floor, gain)
        clipped = clipped | hit
    return -gain.sum(), clipped


def episode_sum(values: Tensor, episode_of: Tensor) -> Tensor:
    """Return for each token the sum of float[M] `values` over the tokens of its episode, float[M]."""
    episodes = int(episode_of.max()) + 1 if len(episode_of) else 0
    return values.new_zeros(episodes).index_add_(0, episode_of, values)[episode_of]


def episode_mean(values: Tensor, episode_of: Tensor) -> Tensor:
    """Return for each token the mean of float[M] `values` over the tokens of its episode, float[M]."""
    return episode_sum(values, episode_of) / torch.bincount(episode_of)[episode_of]


def value(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> Tensor:
    """Return the sum of w/2 * max((v - return)^2, (v' - return)^2), v' = v clipped to old value +- clip.

    Source: the value loss of PPO's reference code; all arguments float[M].
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return (weights * torch.maximum((values - returns).square(), (clipped - returns).square())).sum() / 2


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy float[N] in nats of rows of logits float[N, V]; differentiable."""
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -w * log-prob."""
    return -(weights * logprobs).sum()


def reference_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    weights: Tensor,
    estimator: KLEstimator = "k3",
    sampler_logprobs: Tensor | None = None,
) -> Tensor:
    """Return the sum of w * estimate of (log-prob - reference log-prob).

    Args:
        sampler_logprobs: required by k3_corrected, whose ratio carries a gradient.
    """
    x = logprobs - reference_logprobs
    if estimator == "k2":
        return (weights * k2(x)).sum()
    if estimator == "k3_corrected":
        assert sampler_logprobs is not None
        weights = weights * (logprobs - sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return (weights * k3(x)).sum()


def k2(x: Tensor) -> Tensor:
    """Return x^2 / 2, a biased estimate of KL(p || q), x = log p - log q on samples of p, with low variance.

    As a loss its gradient is that of KL(p || q) (Schulman, "Approximating KL divergence").
    """
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2


def k3(x: Tensor) -> Tensor:
    """Return exp(-x) - 1 + x, an unbiased estimate >= 0 of KL(p || q), x = log p - log q on samples of p.

    As a loss its gradient is that of KL(q || p) (Schulman, "Approximating KL divergence").
    """
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x
