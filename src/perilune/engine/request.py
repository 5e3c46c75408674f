"""Requests to the engine and their results.

A request asks for `n` samples of one prompt. A sample arrives either whole, as a `Completion`, or in pieces,
as `Delta`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.data.routes import Routes
from perilune.errors import PeriluneError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from perilune.engine.constraints import Constraint


_MAX_MAGNITUDE = 1e30  # float32 holds this, its inverse, and the product of either with a logit
_RANGES = {
    "max_tokens": (1, float("inf")),
    "temperature": (1 / _MAX_MAGNITUDE, _MAX_MAGNITUDE),
    "min_tokens": (0, float("inf")),
    "top_k": (0, float("inf")),
    "top_p": (1 / _MAX_MAGNITUDE, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "top_logprobs": (0, float("inf")),
}
_COUNTS = ("max_tokens", "min_tokens", "top_k", "top_logprobs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options for sampling a completion.

    The logits are changed in this order: repetition, frequency and presence penalty, bias, minimum length,
    constraint, temperature, top-k, top-p, min-p. Log-probs are under the resulting distribution.

    Attributes:
        max_tokens: maximum number of tokens to sample, including the stop token.
        temperature: divides the logits; 0 takes the most likely token.
        stop_token_ids: tokens that end the sample, as its last token.
        stop: texts that end the sample. The text of the sample ends before the stop text. Its tokens end with
            the token that completed the stop text. Needs an engine with a tokenizer.
        min_tokens: before this many tokens, stop tokens cannot be drawn and stop texts are ignored.
        top_k: draw from the k most likely tokens (Fan et al. 2018); 0 for all.
        top_p: draw from the smallest set of tokens with this total probability (Holtzman et al. 2020).
        min_p: draw from tokens with at least this share of the largest probability (Nguyen et al. 2024).
        repetition_penalty: divides positive logits of tokens in the prompt or sample, and multiplies negative
            ones (Keskar et al. 2019).
        presence_penalty: subtracted from the logits of tokens in the sample, not in its prompt.
        frequency_penalty: subtracted once for each occurrence of the token in the sample.
        logit_bias: added to the logits of these tokens.
        raw_logprobs: also return the log-prob of each token under the model's own distribution.
        top_logprobs: number of most likely tokens to return for each position, with their log-probs under the
            distribution drawn from.

    Raises:
        RequestError: when a number is out of its range, or a count is not an integer.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    raw_logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value <= high or (name == "temperature" and value == 0)):
                allowed = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
                or_greedy = ", or 0 (greedy)" if name == "temperature" else ""
                raise RequestError(f"{name} is {value}", remedy=f"give {allowed}{or_greedy}")
            if name in _COUNTS and not isinstance(value, int | np.integer):
                raise RequestError(f"{name} is {value}", remedy="give an integer")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}", remedy=f"give at most max_tokens, {self.max_tokens}"
            )
        if not all(abs(bias) <= _MAX_MAGNITUDE for bias in self.logit_bias.values()):
            raise RequestError(
                f"logit_bias contains a number beyond {_MAX_MAGNITUDE:g}", remedy="use -100 to forbid a token"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop contains an empty text", remedy="leave it out")

    @property
    def is_plain(self) -> bool:
        """True if only temperature changes logits, and no other log-probs are requested."""
        options = self.top_k, self.min_p, self.min_tokens, self.logit_bias
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        extra = self.raw_logprobs, self.top_logprobs
        return self.top_p == 1 and not any((*options, *penalties, *extra))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue, and the key of the random numbers.

    Attributes:
        token_ids: at least one token.
        key: (seed, step, task). The key, the index of the sample and the position determine every draw.
        position: number of tokens at the end of `token_ids` that were sampled before, as in `Request`.
    """

    token_ids: list[int]
    key: tuple[int, int, int]
    position: int = 0


class InputEmbeddings(Protocol):
    """The decoder's inputs for one request that are not (only) the embeddings of its tokens.

    For example, a speech model adds the embeddings of several codes.
    """

    def rows(self, start: int, stop: int) -> Tensor:
        """Return float[stop - start, d], the inputs of these positions of prompt and sample."""

    def receive_hidden_state(self, hidden: Tensor) -> None:
        """Receive the hidden state float[d] from which the next token is drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for `n` samples of a prompt.

    Attributes:
        token_ids: the prompt, at least one token.
        params: how to sample.
        key: (seed, step, task) of the random numbers; a server uses (seed, 0, 0).
        n: number of samples.
        position: position of the first random number. To resume a sample after k tokens, append these tokens
            to the prompt, and set `position` to k, `n` to 1 and `first_sample` to the index of the sample.
        first_sample: index of the first sample.
        adapter: name of a LoRA adapter given to `Engine.add_adapter`.
        constraint: a grammar that the samples must match.
        returns_in: seconds until the next request of the same session is expected, for example because a tool
            is running; 0 if unknown. The prefix cache keeps the session longer. Samples do not depend on it.
        continues_text: whether the text of the samples continues the text of the prompt, so that a space at
            its beginning is kept. SentencePiece tokenizers drop this space at the beginning of a text.
        inputs: inputs of the decoder, which replace the embeddings of the tokens. The input of a token must
            be known before the step that computes it. Such a request has one sample and shares no prefix.
            Only runners with `takes_inputs` support it.
    """

    token_ids: list[int]
    params: SamplingParams
    key: tuple[int, int, int] = (0, 0, 0)
    n: int = 1
    position: int = 0
    first_sample: int = 0
    adapter: str | None = None
    constraint: Constraint | None = None
    returns_in: float = 0.0
    continues_text: bool = False
    inputs: InputEmbeddings | None = None


TopLogprobs = list[list[tuple[int, float]]]
"""For each token, the most likely tokens of its position with their log-probs, most likely first."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample.

    Attributes:
        token_ids: int32[T], including a sampled stop token.
        logprobs: float32[T] under the distribution drawn from (after temperature; at temperature 0, the
            unscaled distribution).
        policy_version: int32[T], version of the weights that sampled each token.
        finish_reason: "stop", "length" or "aborted".
        text: the text up to a stop text; None when it was not requested or the engine has no tokenizer.
        raw_logprobs: float32[T] under the model's own distribution, if requested.
        top_logprobs: the most likely tokens of each position, if requested.
        routed_experts: [P + T - 1, layers, K], the experts of all tokens of the prompt (P) and the sample (T)
            but the last, if the engine records routes.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    finish_reason: FinishReason
    text: str | None = None
    raw_logprobs: NDArray[np.float32] | None = None
    top_logprobs: TopLogprobs | None = None
    routed_experts: Routes | None = None


@dataclass(slots=True, eq=False)
class Delta:
    """The new tokens of one sample since its last delta. The last delta has a `finish_reason`.

    Attributes:
        request_id: as `Engine.add` returned it.
        sample: index of the sample, 0 .. n - 1.
        token_ids, logprobs, policy_version: of the new tokens.
        text: the new text, or "" without a tokenizer. Text that may belong to a stop text or to an incomplete
            character is held back, so `text` and `token_ids` may differ by a few tokens.
        finish_reason: None while the sample continues.
        raw_logprobs, top_logprobs: one per token, if requested.
        cached_tokens: tokens of the prompt found in the prefix cache.
        failure: the error if the request failed. The request gets no further delta; other requests continue.
        routed_experts: as in `Completion`, in a delta that is a whole sample.
    """

    request_id: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    policy_version: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    raw_logprobs: list[float] | None = None
    top_logprobs: TopLogprobs | None = None
    cached_tokens: int = 0
    failure: PeriluneError | None = None
    routed_experts: Routes | None = None

    def extend(self, later: Delta) -> None:
        """Append `later`, a delta of the same sample."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.policy_version += later.policy_version
        self.text += later.text
        self.finish_reason = later.finish_reason
        for name in ("raw_logprobs", "top_logprobs"):
            more = getattr(later, name)
            if more is not None:
                setattr(self, name, (getattr(self, name) or []) + more)
