"""The size of a model: parameters, bytes in the KV cache, and compute. Pure arithmetic, without torch.

`models.card.from_config` reads a `ModelCard` from a config.json, and `models.memory` plans the memory of a
stage from it. The cache bytes per token are constant when all layers have full attention; otherwise they
depend on the sequence length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from perilune.models.card.layers import Layer

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1})
_STATE_BYTES = 4  # a recurrent state is kept in float32, whatever the model's own dtype


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A decoder-only language model in figures.

    Attributes:
        model_type: its family, as in config.json.
        layers: from the embedding to the head.
        tied: whether the head is the embedding's table.
        other_parameters: final norm, learned positions, bias of the head.
        max_positions: tokens of the longest sequence it was made for.
        notes: what a reader of the figures must know.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tied: bool
    other_parameters: int
    max_positions: int
    notes: tuple[str, ...] = ()

    @property
    def table_parameters(self) -> int:
        """Of the embedding, or of the head: V d."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Numbers the model learns."""
        return self._outside + sum(
            layer.mixer.parameters + layer.feed_forward.parameters + layer.norm_parameters
            for layer in self.layers
        )

    @property
    def active_parameters(self) -> int:
        """All but those of the experts that a token does not pass."""
        idle = sum(
            layer.feed_forward.parameters - layer.feed_forward.active_parameters for layer in self.layers
        )
        return self.parameters - idle

    @property
    def _outside(self) -> int:
        return self.table_parameters * (1 if self.tied else 2) + self.other_parameters

    def cache_bytes(self, tokens: int, item_bytes: float = 2) -> int:
        """What one sequence of `tokens` tokens takes in the cache, with elements of `item_bytes`."""
        elements = sum(layer.mixer.cached(tokens) for layer in self.layers)
        return round(elements * item_bytes) + _STATE_BYTES * sum(layer.mixer.state for layer in self.layers)

    def cache_bytes_per_token(self, tokens: int, item_bytes: float = 2) -> float:
        """The same divided by the tokens: constant for full attention, a curve for everything else."""
        return self.cache_bytes(tokens, item_bytes) / tokens

    def decode_flops(self, tokens: int) -> float:
        """To compute one token that has `tokens` in the cache, itself included: 2 a parameter it passes.

        The embedding is looked up, which costs nothing; a multiplication with its addition counts as two.
        """
        seen = ((layer.mixer, min(tokens, layer.mixer.window or tokens)) for layer in self.layers)
        return self._dense_flops + sum(mixer.flops(count) for mixer, count in seen)

    def training_flops(self, tokens: int) -> float:
        """To learn from one token of a sequence of `tokens`, on average: forward, and twice that backward."""
        seen = ((layer.mixer, mean_context(tokens, layer.mixer.window)) for layer in self.layers)
        return 3 * (self._dense_flops + sum(mixer.flops_uncached(count) for mixer, count in seen))

    @property
    def _dense_flops(self) -> int:
        looked_up = 0 if self.tied else self.table_parameters
        return 2 * (self.active_parameters - looked_up)

    def kept_bytes(self, tokens: int, item_bytes: float, *, recompute: bool = False) -> int:
        """What one token of a sequence of `tokens` keeps for its gradient, half of a layer's more while that
        layer is computed; an estimate, without logits.

        Args:
            recompute: whether of each layer only what went in is kept; of one there is then besides what it
                keeps, computes on the way and has as gradients, 4.5 times what it keeps, as measured.
        """
        of_layers = [
            4 * self.hidden_size + 3 * layer.feed_forward.width + layer.mixer.kept(tokens)
            for layer in self.layers
        ]
        kept = self.hidden_size * len(of_layers) + 4 * max(of_layers) if recompute else sum(of_layers)
        return round(item_bytes * (kept + 0.5 * max(of_layers)))

    def variants(self) -> list[tuple[str, str]]:
        """Runs of equal layers as ("0-3", "GQA 16/8 heads of 128; feed-forward 3,072"), in order."""
        runs, start = [], 0
        for name, group in groupby(layer.name for layer in self.layers):
            end = start + len(list(group))
            runs.append((f"{start}-{end - 1}" if end - start > 1 else f"{start}", name))
            start = end
        return runs

    def kinds(self) -> Counter[str]:
        """How many layers there are of each kind, in order of appearance."""
        return Counter(layer.name for layer in self.layers)


def mean_context(tokens: int, window: int | None) -> float:
    """How many tokens a token of a sequence sees on average, itself included."""
    seen = min(tokens, window or tokens)
    return (seen * (seen + 1) / 2 + (tokens - seen) * seen) / tokens
