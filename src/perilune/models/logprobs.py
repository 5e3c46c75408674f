"""Log-probs of chosen tokens: the one function that both the engine and the learner call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of every token, [N, V], in float32 at least; temperature 0 (greedy) reads as 1."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.log_softmax(logits if temperature in (0, 1) else logits / temperature, dim=-1)


def chosen(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """float32[N]: the entry of each row of float32[N, V] that int64[N] names."""
    return logprobs.gather(-1, token_ids[:, None])[:, 0]
