"""How much memory a model takes to sample and to learn, computed from its card alone.

An upper estimate for this package's own engine and learner, in bytes. P parameters, V vocabulary, d hidden
size; b bytes of a number of the model, 4 in float32.

Standing, from the beginning to the end:

* weights b P; the engine's frozen copy b P, plus b V d where head and embedding are one tensor and it keeps
  each in the order that is fastest to read; a reference policy b P;
* AdamW's two moments 8 P;
* keys and values of S samples of T tokens, in whole blocks; behind a window only what is being fed.

Besides, one of these at a time:

* sampling: logits and what is drawn from them, 24 S V;
* learning from N fed tokens in sequences of T: gradients b P; what each layer keeps of a token for its
  gradient, as the card says; logits, log-probs, probabilities and their gradient, 16 V for each row that is
  computed at a time (`perilune.models.logprobs.in_row_chunks`), with a gradient of the head of their own;
* an update: three temporaries of the largest tensor.

Where an adapter of A numbers learns beside frozen weights (`models.lora`), the weights take what their kind
says (embedding and head 2 bytes a number at most, if matrices are narrow), gradients 4 A and moments 8 A.
The engine's copy is merged, in float32. The reference is the base itself. Learning makes every merged matrix
anew, and what comes and goes leaves holes in the heap: b P at most, as measured. At the end all matrices are
merged, to be written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from perilune.models.card.from_config import model_card
from perilune.models.card.model_card import ITEM_BYTES, ModelCard
from perilune.models.config.decoder_config import DecoderConfig

PROCESS_BYTES = 430 << 20
"""Python, torch and the other libraries, before there is a model: resident size as measured on Linux."""

RECOMPUTING_BYTES = 160 << 20
"""More, once something is computed again for its gradient: torch loads its compiler for that."""

MENTIONED = 0.01  # smallest share of the total that is told apart

LOGITS_AT_ONCE = 1 << 26
"""Most logits that learning computes at a time: 256 MiB of them in float32.

Fewer cost time: each product reads the whole head, which takes as long as some 150 rows of it. Fewer than
8 Mi cost memory, too: glibc serves blocks below 32 MiB from its heap and does not give them back, many
tensors of the same size leave holes that the next one does not fit in, and memory grows in spite of all.
"""

_FLOAT = 4
BLOCK = 16
"""Tokens of a block of the engine's cache."""

TOKEN_BUDGET = 4096
"""Most tokens that the engine feeds in a step, unless it is told otherwise."""

Model = DecoderConfig | ModelCard
"""A model's card, or the configuration it follows from."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what takes them.

    Attributes:
        standing: held from the beginning to the end.
        passing: held one at a time, so that only the largest counts.
    """

    persistent: Mapping[str, int]
    transient: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes at the highest moment."""
        return sum(self.persistent.values()) + max(self.transient.values(), default=0)

    def __str__(self) -> str:
        told = [
            separator.join(f"{name} {_readable(size)}" for name, size in parts.items() if self._tell(size))
            for separator, parts in ((", ", self.persistent), (" or ", self.transient))
        ]
        return f"about {_readable(self.total)}: {'; then '.join(filter(None, told))}"

    def _tell(self, size: int) -> bool:
        return size >= MENTIONED * self.total


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """What is done for learning to take less.

    Attributes:
        adapter: numbers of the adapter that learns; None where the whole model does.
        base: how its frozen matrices are kept.
        recompute: whether layers are computed again for their gradients.
    """

    adapter: int | None = None
    base: str = "float32"
    recompute: bool = False


def plan_memory(
    model: Model,
    *,
    sampling: tuple[int, int] | None = None,
    learning: tuple[int, int] | None = None,
    reference: bool = False,
    item_bytes: int = _FLOAT,
    savings: MemorySavings = MemorySavings(),
) -> MemoryPlan:
    """What a process takes that holds one model of this shape.

    Args:
        sampling: samples in flight, and tokens of the longest with its prompt.
        learning: tokens of one forward pass, and tokens of the longest sequence in it.
        reference: whether a frozen reference policy is held.
        item_bytes: of a number of weights, cache and activations; the optimizer's are float32 always.
    """
    card = card_of(model)
    weights = item_bytes * card.parameters
    process = PROCESS_BYTES + (RECOMPUTING_BYTES if savings.recompute else 0)
    persistent = {"process": process, "weights": base_bytes(card, savings.base, item_bytes)}
    trained = card.parameters if savings.adapter is None else savings.adapter
    transient = {}
    if sampling:
        persistent["engine"] = weights + (item_bytes * card.table_parameters if card.tied else 0)
        persistent["cache"] = cache_bytes(card, *sampling, item_bytes)
        transient["sampling"] = 24 * sampling[0] * card.vocab_size
    if savings.adapter is not None:
        persistent["adapter"] = _FLOAT * trained
        transient["merging"] = weights
    elif reference:
        persistent["reference"] = weights
    if learning:
        persistent["moments"] = 2 * _FLOAT * trained
        transient["learning"] = item_bytes * trained + learning_bytes(
            card, *learning, item_bytes, recompute=savings.recompute
        )
        transient["update"] = 3 * _FLOAT * min(trained, _largest(card))
        if savings.adapter is not None:
            transient["learning"] += weights
    return MemoryPlan(persistent, transient)


@lru_cache(maxsize=64)
def card_of(model: Model) -> ModelCard:
    """The card of a model that the decoder can compute."""
    return model if isinstance(model, ModelCard) else model_card(model.to_hf())


def cache_bytes(model: Model, samples: int, length: int, item_bytes: int = _FLOAT) -> int:
    """The KV cache of `samples` samples of `length` tokens with prompts, in whole blocks and one more."""
    return blocks_bytes(model, 1 + samples * -(-length // BLOCK), samples, item_bytes)


def blocks_bytes(model: Model, num_blocks: int, samples: int, item_bytes: int = _FLOAT) -> int:
    """The KV cache of `num_blocks` blocks, or as many as a window has use for; and states of `samples`."""
    mixers = [layer.mixer for layer in card_of(model).layers]
    of_samples = sum(mixer.cached(1) * item_bytes + mixer.state * _FLOAT for mixer in mixers if mixer.state)
    of_blocks = sum(
        mixer.cached(1) * BLOCK * window_blocks(mixer.window, num_blocks, slots=samples)
        for mixer in mixers
        if not mixer.state
    )
    return samples * of_samples + of_blocks * item_bytes


def window_blocks(
    window: int | None, num_blocks: int, *, slots: int, token_budget: int = TOKEN_BUDGET
) -> int:
    """How many blocks layers with that window have use for: `num_blocks`, or less where that is as good.

    Each of `slots` samples keeps what its next query sees, in blocks that it fills in part at both ends; and
    `token_budget` tokens are being fed.
    """
    if window is None:
        return num_blocks
    return min(num_blocks, 1 + slots * (blocks_in(window) + 1) + -(-token_budget // BLOCK))


def blocks_in(tokens: int) -> int:
    """Most blocks that so many tokens in a row lie in."""
    return (tokens + BLOCK - 2) // BLOCK + 1


def base_bytes(model: Model, kind: str, item_bytes: int = _FLOAT) -> int:
    """A model whose matrices are kept in `kind`, in int8 with a scale for each output; norms count too."""
    card = card_of(model)
    if kind == "float32":
        return item_bytes * card.parameters
    tables = card.table_parameters * (1 if card.tied else 2)
    matrices = card.parameters - tables
    scales = _FLOAT * matrices // card.hidden_size if kind == "int8" else 0
    return ITEM_BYTES[kind] * matrices + scales + 2 * tables


def adapter_parameters(config: DecoderConfig, rank: int, targets: Collection[str]) -> int:
    """Numbers of A and B of the linear maps called `targets`, in all layers."""
    d, queries, keys = (
        config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim,
    )  # fmt: skip
    attention = {"q_proj": d + queries, "k_proj": d + keys, "v_proj": d + keys, "o_proj": queries + d}
    sides = config.num_layers * sum(size for name, size in attention.items() if name in targets)
    for layer in range(config.num_layers):
        sparse = config.experts is not None and config.is_sparse(layer)
        count, inner = 1, config.intermediate_size
        if sparse and config.experts is not None:
            count, inner = config.experts.count, config.experts.intermediate_size
        sides += count * (d + inner) * sum(name in targets for name in ("gate_proj", "up_proj", "down_proj"))
    return rank * sides


def learning_bytes(
    model: Model, tokens: int, length: int, item_bytes: int = _FLOAT, *, recompute: bool = False
) -> int:
    """What a forward pass over `tokens` tokens in sequences of `length` keeps for its backward pass."""
    card = card_of(model)
    rows = max(1, LOGITS_AT_ONCE // card.vocab_size)
    parts = item_bytes * card.table_parameters if tokens > rows else 0
    logits = 4 * _FLOAT * min(tokens, rows) * card.vocab_size
    return tokens * card.kept_bytes(length, item_bytes, recompute=recompute) + logits + parts


def _largest(card: ModelCard) -> int:
    """Numbers of the largest tensor; experts of a layer may be one."""
    networks = (layer.feed_forward for layer in card.layers)
    return max(card.table_parameters, *(network.experts * network.expert_parameters for network in networks))


def _readable(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
