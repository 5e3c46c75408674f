"""How much memory a model takes to sample and to learn, computed from its configuration alone.

An upper estimate for float32 and this package's own decoder, in bytes. P parameters, V vocabulary, d hidden
size, F feed-forward size, L layers, H query heads, KV key-value heads, D head size.

Standing, from the beginning to the end:

* weights 4 P; the engine's frozen copy 4 P, plus 4 V d where head and embedding are one tensor, for it keeps
  each in the order that is fastest to read; a reference policy 4 P;
* AdamW's two moments 8 P;
* keys and values of S samples of T tokens, 8 L KV D S T: the cache grows by an eighth or more at a time,
  keeps what it outgrew beside what it grew to, and stays for the next call (hence 17/8 of that).

Besides, one of these at a time:

* sampling: logits and what is drawn from them, 24 S V;
* learning from N fed tokens in sequences of T: gradients 4 P; what each layer keeps of a token for its
  gradient, 4 (4 d + 3 F + 3 (H + KV) D + H T), half of that again while one layer is computed; logits,
  log-probs, probabilities and their gradient, 16 N V;
* an update: three temporaries of the largest tensor, or a second frozen copy beside the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perilune.models.config import DecoderConfig

PROCESS_BYTES = 430 << 20
"""Python, torch and the other libraries, before there is a model: resident size as measured on Linux."""

MENTIONED = 0.01  # smallest share of the total that is told apart

_FLOAT = 4
_GROWTH = 17 / 8  # of the KV cache


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what takes them.

    Attributes:
        standing: held from the beginning to the end.
        passing: held one at a time, so that only the largest counts.
    """

    standing: Mapping[str, int]
    passing: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes at the highest moment."""
        return sum(self.standing.values()) + max(self.passing.values(), default=0)

    def __str__(self) -> str:
        told = [
            separator.join(f"{name} {_readable(size)}" for name, size in parts.items() if self._tell(size))
            for separator, parts in ((", ", self.standing), (" or ", self.passing))
        ]
        return f"about {_readable(self.total)}: {'; then '.join(filter(None, told))}"

    def _tell(self, size: int) -> bool:
        return size >= MENTIONED * self.total


def plan_memory(
    config: DecoderConfig,
    *,
    sampling: tuple[int, int] | None = None,
    learning: tuple[int, int] | None = None,
    reference: bool = False,
) -> MemoryPlan:
    """What a process takes that holds one model of this shape.

    Args:
        sampling: samples in flight, and tokens of the longest with its prompt.
        learning: tokens of one forward pass, and tokens of the longest sequence in it.
        reference: whether a frozen reference policy is held.
    """
    weights = _FLOAT * parameter_count(config)
    standing = {"process": PROCESS_BYTES, "weights": weights}
    passing = {}
    if sampling:
        standing["engine"] = weights + _FLOAT * _tied(config)
        standing["cache"] = cache_bytes(config, *sampling)
        passing["sampling"] = 24 * sampling[0] * config.vocab_size
    if reference:
        standing["reference"] = weights
    if learning:
        standing["moments"] = 2 * weights
        passing["learning"] = weights + learning_bytes(config, *learning)
        passing["update"] = max(standing.get("engine", 0), 3 * _FLOAT * _largest(config))
    return MemoryPlan(standing, passing)


def parameter_count(config: DecoderConfig) -> int:
    """Numbers a decoder of this shape learns."""
    d, size = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    attention = 2 * d * queries + 2 * d * keys
    attention += {"head": 2 * size, "full": queries + keys, None: 0}[config.qk_norm]
    attention += (queries + 2 * keys) * config.qkv_bias + d * config.attention_bias
    norms = 2 * d * (config.family.pre_norm + config.family.post_norm)
    embeddings = config.vocab_size * d * (1 if config.tie_word_embeddings else 2)
    mlps = sum(_mlp_count(config, layer) for layer in range(config.num_layers))
    return embeddings + config.num_layers * (attention + norms) + mlps + d


def _mlp_count(config: DecoderConfig, layer: int) -> int:
    d, experts = config.hidden_size, config.experts
    if experts is not None and config.is_sparse(layer):
        return experts.count * d * (3 * experts.intermediate_size + 1)
    inner = config.intermediate_size
    return 3 * d * inner + (2 * inner + d) * config.mlp_bias


def cache_bytes(config: DecoderConfig, samples: int, length: int) -> int:
    """The KV cache of `samples` samples of `length` tokens, prompts included."""
    token = 2 * _FLOAT * config.num_layers * config.num_kv_heads * config.head_dim
    return int(token * samples * length * _GROWTH)


def learning_bytes(config: DecoderConfig, tokens: int, length: int) -> int:
    """What a forward pass over `tokens` tokens in sequences of `length` keeps for its backward pass."""
    heads, keys = config.num_heads, config.num_kv_heads
    kept = 4 * config.hidden_size + 3 * _inner(config)
    kept += 3 * (heads + keys) * config.head_dim + heads * length
    layers = config.num_layers + 0.5
    return int(_FLOAT * tokens * (kept * layers + 4 * config.vocab_size))


def _inner(config: DecoderConfig) -> int:
    """Feed-forward width that a token goes through, in the widest layer."""
    experts = config.experts
    sparse = 0 if experts is None else experts.per_token * experts.intermediate_size
    return max(config.intermediate_size, sparse)


def _tied(config: DecoderConfig) -> int:
    return config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0


def _largest(config: DecoderConfig) -> int:
    return config.hidden_size * max(config.vocab_size, config.intermediate_size)


def _readable(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
