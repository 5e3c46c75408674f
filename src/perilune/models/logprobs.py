"""Log-probs of chosen tokens: the one function that both the engine and the learner call."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """float32[N, V] log-probs of every token; temperature 0 (greedy) reads as 1."""
    scaled = logits.float() if temperature in (0, 1) else logits.float() / temperature
    return F.log_softmax(scaled, dim=-1)


def chosen(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """float32[N]: the entry of each row of float32[N, V] that int64[N] names."""
    return logprobs.gather(-1, token_ids[:, None])[:, 0]
