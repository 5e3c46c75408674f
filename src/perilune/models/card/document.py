"""A model card as a JSON document, for the command line, reports and notebooks."""

from dataclasses import asdict
from typing import Any

from perilune.models.card.model_card import ModelCard
from perilune.models.memory import plan_memory


def card_document(card: ModelCard, *, context: int, batch: int, item_bytes: int) -> dict[str, Any]:
    """Return all numbers of a card for `batch` sequences of `context` tokens.

    Args:
        item_bytes: bytes of one weight, cache element or activation.

    Returns:
        `layers` lists runs of equal layers. `curve` has, for each sequence length of `curve_tokens`, the
        bytes of the cache, the FLOPs to generate the token at that position, and the FLOPs to train on one
        token. `memory` has the bytes of sampling and of training, by use.
    """
    sampling = plan_memory(card, sampling=(batch, context), item_bytes=item_bytes)
    training = plan_memory(card, learning=(batch * context, context), item_bytes=item_bytes)
    notes = list(card.notes)
    if context > card.max_positions:
        notes.append(f"the model supports sequences of at most {card.max_positions:,} tokens")
    if any(layer.mixer.window for layer in card.layers):
        notes.append("the memory includes tokens outside windows that the engine's cache still holds")
    return {
        "model_type": card.model_type,
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "embedding_parameters": card.table_parameters * (1 if card.tied else 2),
        "max_positions": card.max_positions,
        "layers": [{"layers": layers, "kind": name} for layers, name in card.variants()],
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
            "sampling": {"total": sampling.total, **asdict(sampling)},
            "training": {"total": training.total, **asdict(training)},
        },
        "notes": notes,
    }


def curve_tokens(context: int) -> list[int]:
    """Return powers of two from 64 up to `context`, and `context` itself."""
    powers = [64 * 2**power for power in range(context.bit_length()) if 64 * 2**power < context]
    return [*powers, context]
