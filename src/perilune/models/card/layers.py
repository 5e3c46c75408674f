"""The layers of a model, in figures: how tokens meet, and what each passes by itself.

What a layer keeps of a token so that the next one need not compute it again, in elements:

* attention with heads of its own (MHA), shared by groups (GQA) or by all (MQA): keys and values,
  KV (D_k + D_v); with a sliding window of W tokens, of the last W only;
* latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): one compressed vector for all heads, rank + rotary;
* linear attention: a state of fixed size, however many tokens went into it, so that the bytes a token fall
  with the length of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_SCORES = 512  # most attention scores of a query that learning keeps; of longer sequences it makes them again


class Mixer(Protocol):
    """How the tokens of a sequence meet in one layer."""

    @property
    def parameters(self) -> int:
        """Numbers it learns."""

    @property
    def name(self) -> str:
        """In words."""

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None for all before it."""

    def cached(self, tokens: int) -> int:
        """Elements kept of a sequence of `tokens` tokens, apart from a state; none behind a window."""

    @property
    def state(self) -> int:
        """Elements of its recurrent state, for one sequence."""

    def flops(self, tokens: float) -> float:
        """Beyond the products with parameters, for a token that sees `tokens` others in the cache."""

    def flops_uncached(self, tokens: float) -> float:
        """The same without a cache, as in learning."""

    def kept(self, tokens: int) -> int:
        """Elements of a token kept for the gradient, in sequences of `tokens` tokens; an estimate."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with keys and values.

    Attributes:
        parameters: projections, with their biases and norms.
        heads, kv_heads: of queries; of keys and values, each shared by heads / kv_heads queries.
        key_size, value_size: of one head.
        window: tokens that a token sees, itself included; None for all before it.
    """

    parameters: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    state: int = 0

    @property
    def name(self) -> str:
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        heads = f"{self.heads}/{self.kv_heads}" if kind == "GQA" else f"{self.heads}"
        size = (
            f"{self.key_size}" if self.key_size == self.value_size else f"{self.key_size}/{self.value_size}"
        )
        return f"{kind} {heads} heads of {size}{f', window {self.window:,}' if self.window else ''}"

    def cached(self, tokens: int) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * min(tokens, self.window or tokens)

    def flops(self, tokens: float) -> float:
        return 2 * self.heads * (self.key_size + self.value_size) * tokens

    def flops_uncached(self, tokens: float) -> float:
        return self.flops(tokens)

    def kept(self, tokens: int) -> int:
        size = max(self.key_size, self.value_size)
        return 3 * (self.heads + self.kv_heads) * size + self.heads * min(tokens, _SCORES)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are read out of one latent vector a token.

    Attributes:
        rank: size of the latent vector.
        rotary_size: of the one key, shared by all heads, that carries positions.
        key_size, value_size: of a head, read from the latent vector; `key_size` without the rotary part.
    """

    parameters: int
    heads: int
    rank: int
    rotary_size: int
    key_size: int
    value_size: int
    window: int | None = None
    state: int = 0

    @property
    def name(self) -> str:
        return f"MLA {self.heads} heads, latent {self.rank} + {self.rotary_size}"

    def cached(self, tokens: int) -> int:
        return (self.rank + self.rotary_size) * tokens

    def flops(self, tokens: float) -> float:
        # Queries are taken to the latent space, and what is attended to is taken back: see the paper, 2.1.2.
        return 2 * self.heads * (2 * self.rank + self.rotary_size) * tokens

    def flops_uncached(self, tokens: float) -> float:
        return 2 * self.heads * (self.key_size + self.rotary_size + self.value_size) * tokens

    def kept(self, tokens: int) -> int:
        return 6 * self.heads * (self.key_size + self.rotary_size) + self.heads * min(tokens, _SCORES)


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A recurrence: one matrix a head, which each token decays, corrects and reads.

    Attributes:
        kind: its name, for example "gated delta net" (Yang et al., arXiv 2412.06464).
        heads: of values, each with a state of its own.
        key_size, value_size: the state of a head is one by the other.
        convolution: elements kept for short convolutions, for one sequence.
    """

    parameters: int
    kind: str
    heads: int
    key_size: int
    value_size: int
    convolution: int = 0
    window: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.heads} states of {self.key_size} x {self.value_size}"

    @property
    def state(self) -> int:
        return self.heads * self.key_size * self.value_size

    def cached(self, tokens: int) -> int:
        return self.convolution

    def flops(self, tokens: float) -> float:
        return 6 * self.state  # what the key reads, the correction of it, what the query reads

    def flops_uncached(self, tokens: float) -> float:
        return self.flops(tokens)

    def kept(self, tokens: int) -> int:
        return 6 * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One network for every token, or experts of which each token passes a few.

    Attributes:
        expert_parameters: of one expert; of the whole network where it is the only one.
        inner_size: of one expert.
        experts, experts_per_token: how many there are, and how many a token passes.
        shared_experts: such that every token passes, in units of `inner_size`.
        shared_parameters: of what every token passes besides: shared experts, router, gates.
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
        """Inner units that a token passes."""
        return round((self.experts_per_token + self.shared_experts) * self.inner_size)

    @property
    def name(self) -> str:
        if self.experts == 1:
            return f"feed-forward {self.inner_size:,}"
        shared = f" + {self.shared_experts:g} shared" if self.shared_experts else ""
        return f"{self.experts_per_token} of {self.experts} experts{shared} of {self.inner_size:,}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: a mixer, a feed-forward network, and the norms around them."""

    mixer: Mixer
    feed_forward: FeedForward
    norm_parameters: int

    @property
    def name(self) -> str:
        return f"{self.mixer.name}; {self.feed_forward.name}"
