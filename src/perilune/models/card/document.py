"""A model's card as one document of plain figures, which the command line, a report or a notebook shows."""

from __future__ import annotations

from typing import Any

from perilune.models.card.model_card import ModelCard
from perilune.models.memory import MemoryPlan, plan_memory


def card_document(card: ModelCard, *, context: int, batch: int, item_bytes: int) -> dict[str, Any]:
    """All figures of a card that is used with `batch` sequences of `context` tokens.

    Args:
        item_bytes: of a number of weights, cache and activations.

    Returns:
        model_type; parameters, active_parameters, embedding_parameters; layers, runs of equal ones; curve,
        by length of the sequence (`curve_tokens`): bytes a token and bytes of the cache, flops to generate
        the token at that place and to learn from one of such a sequence; memory in bytes of sampling and of
        training, by what takes it; notes.
    """
    sampling = plan_memory(card, sampling=(batch, context), item_bytes=item_bytes)
    training = plan_memory(card, learning=(batch * context, context), item_bytes=item_bytes)
    notes = list(card.notes)
    if context > card.max_positions:
        notes.append(f"the model was made for sequences of at most {card.max_positions:,} tokens")
    if any(layer.mixer.window for layer in card.layers):
        notes.append("the engine's cache also keeps what lies behind a window: memory counts it")
    return {
        "model_type": card.model_type,
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "embedding_parameters": card.table_parameters * (1 if card.tied else 2),
        "max_positions": card.max_positions,
        "layers": [{"layers": which, "kind": name} for which, name in card.variants()],
        "kinds": dict(card.kinds()),
        "item_bytes": item_bytes,
        "curve": [
            {
                "tokens": tokens,
                "cache_bytes_per_token": card.cache_bytes_per_token(tokens, item_bytes),
                "cache_bytes": card.cache_bytes(tokens, item_bytes),
                "generation_flops": card.decode_flops(tokens),
                "training_flops_per_token": card.training_flops(tokens),
            }
            for tokens in curve_tokens(context)
        ],
        "memory": {
            "batch": batch,
            "tokens": context,
            "sampling": _bytes(sampling),
            "training": _bytes(training),
        },
        "notes": notes,
    }


def curve_tokens(context: int) -> list[int]:
    """Powers of two from 64 up to `context`, and `context` itself."""
    powers = [64 * 2**power for power in range(context.bit_length()) if 64 * 2**power < context]
    return [*powers, context]


def _bytes(plan: MemoryPlan) -> dict[str, Any]:
    return {"total": plan.total, "persistent": dict(plan.persistent), "transient": dict(plan.transient)}
