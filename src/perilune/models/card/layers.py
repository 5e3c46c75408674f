"""Sizes of the layers of a model: the mixer, which combines tokens, and the feed-forward network.

Elements in the cache per token and layer:

* attention with one key-value head per query head (MHA), per group (GQA) or for all (MQA): KV (D_k + D_v);
  with a sliding window of W tokens, only for the last W tokens;
* latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): one compressed vector for all heads, rank + rotary;
* linear attention: a state of fixed size per sequence, so the bytes per token fall with the length.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

STATE_INTERVAL = 64
"""Tokens between recurrent states that are kept for the gradient; the backward pass recomputes the others."""

_SCORES = 512  # maximum number of attention scores per query kept for the gradient; others are recomputed


@dataclass(frozen=True, slots=True)
class Mixer(ABC):
    """The part of a layer that combines the tokens of a sequence.

    Attributes:
        parameters: number of parameters of the projections, with their biases and norms.
        heads: number of query heads; in linear attention, of value heads, each of which has a state.
    """

    parameters: int
    heads: int

    @property
    @abstractmethod
    def name(self) -> str:
        """A short description."""

    @property
    def window(self) -> int | None:
        """Number of tokens that a token attends to, including itself; None for all earlier ones."""
        return None

    @property
    def state_size(self) -> int:
        """Number of elements of the recurrent state of one sequence."""
        return 0

    @abstractmethod
    def cached_elements(self, tokens: int) -> int:
        """Return the cached elements of a sequence of `tokens` tokens, without the recurrent state."""

    @abstractmethod
    def flops(self, tokens: float) -> float:
        """Return the FLOPs of a token with `tokens` in the cache, without products with parameters."""

    def flops_uncached(self, tokens: float) -> float:
        """Return the FLOPs of a token that attends to `tokens` tokens without a cache, as in training."""
        return self.flops(tokens)

    @abstractmethod
    def kept_elements(self, tokens: int) -> int:
        """Estimate the elements per token kept for the gradient, in sequences of `tokens` tokens."""


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Softmax attention with keys and values.

    Attributes:
        kv_heads: key-value heads, each shared by heads / kv_heads query heads.
        key_size, value_size: of one head.
    """

    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    @property
    def name(self) -> str:
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        heads = f"{self.heads}/{self.kv_heads}" if kind == "GQA" else f"{self.heads}"
        size = (
            f"{self.key_size}" if self.key_size == self.value_size else f"{self.key_size}/{self.value_size}"
        )
        return f"{kind} {heads} heads of {size}{f', window {self.window:,}' if self.window else ''}"

    def cached_elements(self, tokens: int) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * min(tokens, self.window or tokens)

    def flops(self, tokens: float) -> float:
        return 2 * self.heads * (self.key_size + self.value_size) * tokens

    def kept_elements(self, tokens: int) -> int:
        size = max(self.key_size, self.value_size)
        return 3 * (self.heads + self.kv_heads) * size + self.heads * min(tokens, _SCORES)


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    """Attention whose keys and values are projected from one latent vector per token.

    Attributes:
        rank: size of the latent vector.
        rotary_size: size of the rotary key, which all heads share.
        key_size, value_size: of one head; `key_size` is without the rotary part.
    """

    rank: int
    rotary_size: int
    key_size: int
    value_size: int

    @property
    def name(self) -> str:
        return f"MLA {self.heads} heads, latent {self.rank} + {self.rotary_size}"

    def cached_elements(self, tokens: int) -> int:
        return (self.rank + self.rotary_size) * tokens

    def flops(self, tokens: float) -> float:
        # Queries are projected into the latent space and the output back: section 2.1.2 of the paper.
        return 2 * self.heads * (2 * self.rank + self.rotary_size) * tokens

    def flops_uncached(self, tokens: float) -> float:
        return 2 * self.heads * (self.key_size + self.rotary_size + self.value_size) * tokens

    def kept_elements(self, tokens: int) -> int:
        return 6 * self.heads * (self.key_size + self.rotary_size) + self.heads * min(tokens, _SCORES)


@dataclass(frozen=True, slots=True)
class LinearAttention(Mixer):
    """A recurrence over one matrix per head, which each token decays, updates and reads.

    Attributes:
        kind: its name, for example "gated delta net" (Yang et al., arXiv 2412.06464).
        key_size, value_size: the state of a head is [key_size, value_size].
        convolution: number of elements that the short convolutions keep for one sequence.
    """

    kind: str
    key_size: int
    value_size: int
    convolution: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.heads} states of {self.key_size} x {self.value_size}"

    @property
    def state_size(self) -> int:
        return self.heads * self.key_size * self.value_size

    def cached_elements(self, tokens: int) -> int:
        return self.convolution

    def flops(self, tokens: float) -> float:
        return 6 * self.state_size  # read with the key, update, read with the query

    def kept_elements(self, tokens: int) -> int:
        return 6 * self.heads * (self.key_size + self.value_size) + self.state_size // STATE_INTERVAL


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One network for every token, or a mixture of experts.

    Attributes:
        expert_parameters: parameters of one expert, or of the network when there are no experts.
        inner_size: inner width of one expert.
        experts, experts_per_token: number of all experts, and of those that compute one token.
        shared_experts: inner width of the experts that compute every token, in units of `inner_size`.
        shared_parameters: parameters of shared experts, router and gates.
    """

    expert_parameters: int
    inner_size: int
    experts: int = 1
    experts_per_token: int = 1
    shared_experts: float = 0
    shared_parameters: int = 0

    @property
    def parameters(self) -> int:
        return self.experts * self.expert_parameters + self.shared_parameters

    @property
    def active_parameters(self) -> int:
        return self.experts_per_token * self.expert_parameters + self.shared_parameters

    @property
    def width(self) -> int:
        """Number of inner units that compute one token."""
        return round((self.experts_per_token + self.shared_experts) * self.inner_size)

    @property
    def name(self) -> str:
        if self.experts == 1:
            return f"feed-forward {self.inner_size:,}"
        shared = f" + {self.shared_experts:g} shared" if self.shared_experts else ""
        return f"{self.experts_per_token} of {self.experts} experts{shared} of {self.inner_size:,}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: a mixer, a feed-forward network and their norms."""

    mixer: Mixer
    feed_forward: FeedForward
    norm_parameters: int

    @property
    def name(self) -> str:
        return f"{self.mixer.name}; {self.feed_forward.name}"
