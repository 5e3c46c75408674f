"""What a request asks for, what it gets, and how a token is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.episode import FinishReason
from perilune.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        max_tokens: most tokens to sample, the stop token included.
        temperature: divides the logits; 0 takes the most likely token.
        stop_token_ids: sampling one of them ends the sample; it is kept as its last token.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}", remedy="give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}", remedy="give 0 (greedy) or more")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue, and the counters its random numbers come from.

    Attributes:
        token_ids: at least one token.
        key: (seed, step, task); with the sample's index and the position it fixes every draw.
    """

    token_ids: list[int]
    key: tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample.

    Attributes:
        token_ids: int32[T], the stop token included when one was sampled.
        logprobs: float32[T], under the distribution they were drawn from (after temperature; at
            temperature 0, of the unscaled distribution).
        policy_version: int32[T], version of the weights that sampled each token.
        finish_reason: "stop" or "length".
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    finish_reason: FinishReason


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution.

    Args:
        logprobs: float32[B, V].
        uniform: float64[B] in [0, 1).

    Returns:
        int64[B], the drawn tokens; the last one where the log-probs are not numbers.

    A token of probability zero is never drawn. Sums in float64, so that rounding moves no boundary
    by more than the resolution of the uniform numbers.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return token.clamp_(max=logprobs.shape[-1] - 1)
