"""Estimates the memory of sampling and training from a model's card.

The estimate is an upper bound in bytes for the engine and the learner of this package. P parameters,
V vocabulary size, d hidden size, b bytes per number of the model (4 in float32).

Persistent memory, held throughout:

* weights: b P;
* the engine's frozen copy of the weights: b P, plus b V d when head and embedding are one tensor, because the
  engine stores each in its fastest layout;
* a reference policy: b P;
* AdamW's two moments: 8 P;
* keys and values of S samples of T tokens, in whole blocks; layers with a window hold only the window and the
  tokens of the current step.

Transient memory, of which only the largest item counts:

* sampling: logits and intermediate results, 24 S V;
* training on N tokens in sequences of T: gradients b P; activations, as the card computes them; logits,
  log-probs, probabilities and their gradient, 16 V for each row computed at a time
  (`models.logprobs.compute_in_row_chunks`), and one more gradient of the head; in linear attention, the
  states of 64 tokens of each sequence in one layer, which the backward pass recomputes;
* an update: three temporaries of the largest tensor.

With an adapter of A parameters and frozen weights (`models.adapters.lora`), the weights take the bytes of
their storage kind (embedding and head 2 bytes per number when matrices are narrow), gradients 4 A and moments
8 A. The engine's copy is merged and float32. The base serves as the reference policy. Training recomputes
each merged matrix, which fragments the heap by at most b P (measured). The last step merges all matrices to
write them.

On a GPU, merged matrices do not fragment memory, and the last step moves each merged matrix to the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from perilune.errors import RequestError
from perilune.models.card.from_config import model_card
from perilune.models.card.layers import STATE_INTERVAL
from perilune.models.card.model_card import ITEM_BYTES, ModelCard
from perilune.models.config.decoder_config import STATE_WINDOW, DecoderConfig
from perilune.models.config.family import Family

if TYPE_CHECKING:
    from perilune.models.narrow import Precision

PROCESS_BYTES = 430 << 20
"""Resident size of Python, torch and the other libraries without a model, measured on Linux."""

CHECKPOINTING_BYTES = 160 << 20
"""Extra memory with activation checkpointing, because torch then loads its compiler."""

_MIN_SHOWN_SHARE = 0.01  # smallest share of the total that a description mentions

MAX_LOGITS_PER_CHUNK = 1 << 26
"""Largest number of logits that training computes at once: 256 MiB in float32.

Smaller chunks are slower, because each product reads the whole head, which takes as long as computing about
150 rows. Chunks below 8 Mi logits also need more memory: glibc takes blocks below 32 MiB from its heap, which
then fragments and grows.
"""

MAX_LOGITS_PER_CHUNK_ON_GPU = 1 << 28
"""As `MAX_LOGITS_PER_CHUNK`, on a GPU: 1 GiB in float32. There, each chunk makes two passes over the head and
its gradient."""

DISTILLATION_ROW = 4
"""Memory of a row of logits in distillation, relative to other training. Measured: 2.5 to 3.9."""

_GPU_ITEM_BYTES: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.1}
"""Bytes of an activation on a GPU, measured on an H100; the inputs of norms stay float32."""

_FLOAT_BYTES = 4
BLOCK = 16
"""Tokens in a block of the engine's cache."""

MAX_STATE_TOKENS = 512
"""Largest number of tokens of one sequence in a step with linear attention, where each block has a state."""

DEFAULT_TOKEN_BUDGET = 4096
"""Default limit on the tokens that the engine computes in a step."""

Model = DecoderConfig | ModelCard
"""A model card or a configuration."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use.

    Attributes:
        persistent: bytes that are allocated all the time.
        transient: bytes that are allocated one item at a time, so only the largest item counts.
    """

    persistent: Mapping[str, int]
    transient: Mapping[str, int]

    @property
    def total(self) -> int:
        """Peak bytes."""
        return sum(self.persistent.values()) + max(self.transient.values(), default=0)

    def __str__(self) -> str:
        limit = _MIN_SHOWN_SHARE * self.total
        summaries = [
            separator.join(f"{name} {_readable(size)}" for name, size in parts.items() if size >= limit)
            for separator, parts in ((", ", self.persistent), (" or ", self.transient))
        ]
        return f"about {_readable(self.total)}: {', plus '.join(filter(None, summaries))}"


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """Settings that reduce the memory of training.

    Attributes:
        adapter: parameters of the adapter that is trained; None when the whole model is trained.
        base: storage of frozen matrices: "float32", "bfloat16" or "int8".
        recompute: whether activation checkpointing is on.
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
    item_bytes: int = _FLOAT_BYTES,
    savings: MemorySavings = MemorySavings(),
    gpu: Precision | None = None,
) -> MemoryPlan:
    """Estimate the memory of a process with one model.

    Args:
        sampling: number of concurrent samples, and number of tokens of the longest sample with its prompt.
        learning: number of tokens of one forward pass, and of its longest sequence.
        reference: whether the process holds a frozen reference policy.
        item_bytes: bytes of one weight, cache element or activation. The optimizer is float32.
        gpu: precision of matrix products if the model is on a GPU; None on a CPU.
    """
    card = get_model_card(model)
    weights = item_bytes * card.parameters
    process = PROCESS_BYTES + (CHECKPOINTING_BYTES if savings.recompute else 0)
    persistent = {"process": process, "weights": base_bytes(card, savings.base, item_bytes)}
    trained = card.parameters if savings.adapter is None else savings.adapter
    transient = {}
    if sampling:
        persistent["engine"] = weights + (item_bytes * card.table_parameters if card.tied else 0)
        persistent["cache"] = cache_bytes(card, *sampling, item_bytes)
        transient["sampling"] = 24 * sampling[0] * card.vocab_size
    if savings.adapter is not None:
        persistent["adapter"] = _FLOAT_BYTES * trained
        transient["merging"] = weights if gpu is None else 2 * _FLOAT_BYTES * _largest(card)
    elif reference:
        persistent["reference"] = weights
    if learning:
        persistent["moments"] = 2 * _FLOAT_BYTES * trained
        transient["learning"] = item_bytes * trained + learning_bytes(
            card, *learning, item_bytes, recompute=savings.recompute, gpu=gpu
        )
        transient["update"] = 3 * _FLOAT_BYTES * min(trained, _largest(card))
        if savings.adapter is not None:
            transient["learning"] += transient["merging"]
    return MemoryPlan(persistent, transient)


@lru_cache(maxsize=64)
def get_model_card(model: Model) -> ModelCard:
    return model if isinstance(model, ModelCard) else model_card(model.to_hf())


def cache_bytes(model: Model, samples: int, length: int, item_bytes: int = _FLOAT_BYTES) -> int:
    """Return the bytes of the KV cache of `samples` samples of `length` tokens including the prompt."""
    return blocks_bytes(model, 1 + samples * -(-length // BLOCK), samples, item_bytes)


def blocks_bytes(
    model: Model,
    num_blocks: int,
    samples: int,
    item_bytes: int = _FLOAT_BYTES,
    *,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
) -> int:
    """Return the bytes of a KV cache of `num_blocks` blocks for `samples` samples.

    Layers with a window have fewer blocks. A block of linear attention has one state in float32.
    """
    size = 0
    for mixer in (layer.mixer for layer in get_model_card(model).layers):
        window = STATE_WINDOW if mixer.state_size else mixer.window
        blocks = window_blocks(window, num_blocks, slots=samples, token_budget=token_budget)
        block_bytes = mixer.cached_elements(1) * BLOCK * item_bytes
        if mixer.state_size:
            block_bytes = (mixer.cached_elements(1) + mixer.state_size) * _FLOAT_BYTES
        size += blocks * block_bytes
    return size


def window_blocks(
    window: int | None,
    num_blocks: int,
    *,
    slots: int,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    size: int = BLOCK,
) -> int:
    """Return the number of blocks of `size` tokens for layers with this window, at most `num_blocks`.

    This is enough for the window of the next query of each of `slots` samples, with a partly filled block at
    both ends, and for the `token_budget` tokens of a step.
    """
    if window is None:
        return num_blocks
    if window == STATE_WINDOW:
        token_budget = min(token_budget, 2 * MAX_STATE_TOKENS)
    return min(num_blocks, 1 + slots * (max_blocks_touched(window, size) + 1) + -(-token_budget // size))


def max_blocks_touched(tokens: int, size: int = BLOCK) -> int:
    """Return the largest number of blocks of `size` that `tokens` consecutive tokens can touch."""
    return (tokens + size - 2) // size + 1


def check_base_kind(config: DecoderConfig, kind: str) -> None:
    """Check that the matrices of a frozen model can be stored as `kind`.

    Raises:
        RequestError: for a model whose experts share tensors, unless `kind` is float32.
    """
    if kind != "float32" and config.family.fused_experts:
        what = f"the experts of {config.architecture} cannot be stored in {kind}"
        raise RequestError(what, where="lora.base", remedy="set base to float32")


def base_bytes(model: Model, kind: str, item_bytes: int = _FLOAT_BYTES) -> int:
    """Return the bytes of a model whose matrices are stored as `kind`; int8 adds a scale for each output."""
    card = get_model_card(model)
    if kind == "float32":
        return item_bytes * card.parameters
    tables = card.table_parameters * (1 if card.tied else 2)
    matrices = card.parameters - tables
    scales = _FLOAT_BYTES * matrices // card.hidden_size if kind == "int8" else 0
    return ITEM_BYTES[kind] * matrices + scales + 2 * tables


def adapter_parameters(config: DecoderConfig, rank: int, targets: Collection[str]) -> int:
    """Return the number of parameters of A and B for the linear maps named in `targets`, in all layers."""
    d, size, family = config.hidden_size, config.head_dim, config.family
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    inward = 2 * queries if family.output_gate else queries
    maps, width = {"q_proj": inward, "k_proj": keys, "v_proj": keys}, queries
    if config.latent is not None:
        maps, width = {}, config.num_heads * config.latent.value_size
        if config.latent.query_rank is None:
            maps["q_proj"] = queries
    attending = config.num_layers - (0 if config.delta is None else len(config.delta.layers))
    sides = attending * (_sides(family, d, maps, targets) + _sides(family, width, {"o_proj": d}, targets))

    def network(inner: int) -> int:
        gates = _sides(family, d, {"gate_proj": inner, "up_proj": inner}, targets)
        return gates + _sides(family, inner, {"down_proj": d}, targets)

    for layer in range(config.num_layers):
        experts = config.experts
        if experts is None or not config.is_sparse(layer):
            sides += network(config.intermediate_size)
            continue
        if not family.fused_experts:
            sides += experts.count * network(experts.intermediate_size)
        sides += network(experts.shared_size) if experts.shared_size else 0
    return rank * sides


def _sides(family: Family, inputs: int, outputs: Mapping[str, int], targets: Collection[str]) -> int:
    """Return the sum of inputs and outputs over the targeted maps; maps with the same name count once."""
    rows: dict[str, int] = {}
    for name, count in outputs.items():
        rows[family.module_name(name)] = rows.get(family.module_name(name), 0) + count
    named = {family.module_name(target) for target in targets}
    return sum(inputs + count for name, count in rows.items() if name in named)


def learning_bytes(
    model: Model,
    tokens: int,
    length: int,
    item_bytes: int = _FLOAT_BYTES,
    *,
    recompute: bool = False,
    gpu: Precision | None = None,
) -> int:
    """Return the bytes that a forward pass over sequences of `length` keeps for the backward pass."""
    card = get_model_card(model)
    rows = _rows_per_chunk(card, gpu)
    parts = item_bytes * card.table_parameters if tokens > rows else 0
    logits = 4 * _FLOAT_BYTES * min(tokens, rows) * card.vocab_size
    states = STATE_INTERVAL * max(layer.mixer.state_size for layer in card.layers) * -(-tokens // length)
    if gpu is not None:
        item = _GPU_ITEM_BYTES[gpu]
        if recompute:  # the layer being computed needs 2.5 times its activations, and then not the logits
            inputs = tokens * _FLOAT_BYTES * card.hidden_size * len(card.layers)
            layer = round(2.5 * tokens * card.layer_bytes(length, item)) + states * _FLOAT_BYTES
            return inputs + max(layer, logits + parts)
        return tokens * card.activation_bytes(length, item) + states * _FLOAT_BYTES + logits + parts
    activations = tokens * card.activation_bytes(length, item_bytes, recompute=recompute)
    return activations + states * _FLOAT_BYTES + logits + parts


def added_by_distillation(model: Model, tokens: int, gpu: Precision | None) -> int:
    """Return the bytes that distillation adds to `learning_bytes`: smaller chunks of larger rows."""
    card = get_model_card(model)
    rows = _rows_per_chunk(card, gpu)
    added = min(DISTILLATION_ROW * tokens, rows) - min(tokens, rows)
    return 4 * _FLOAT_BYTES * added * card.vocab_size


def _rows_per_chunk(card: ModelCard, gpu: Precision | None) -> int:
    limit = MAX_LOGITS_PER_CHUNK if gpu is None else MAX_LOGITS_PER_CHUNK_ON_GPU
    return max(1, limit // card.vocab_size)


def _largest(card: ModelCard) -> int:
    """Return the elements of the largest tensor; the experts of a layer may be one tensor."""
    networks = (layer.feed_forward for layer in card.layers)
    return max(card.table_parameters, *(network.experts * network.expert_parameters for network in networks))


def _readable(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
