"""The size of a model: parameters, bytes in the KV cache, and compute. Pure arithmetic, without torch.

`models.card.from_config` reads a `ModelCard` from a config.json, and `models.memory` plans the memory of a
stage from it. The cache bytes per token are constant when all layers have full attention; otherwise they
depend on the sequence length.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from perilune.models.card.layers import Layer

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1})
_STATE_BYTES = 4  # recurrent states are float32, whatever the dtype of the model


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The sizes of a decoder-only language model.

    Attributes:
        model_type: the family, as in config.json.
        layers: the layers in order.
        tied: whether the head and the embedding are one table.
        other_parameters: parameters of the final norm, of learned positions and of the head's bias.
        max_positions: number of tokens of the longest sequence that the model supports.
        notes: limitations of the numbers.
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
        """Number of parameters V d of the embedding, which is also that of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        layers = sum(
            layer.mixer.parameters + layer.feed_forward.parameters + layer.norm_parameters
            for layer in self.layers
        )
        return layers + self.table_parameters * (1 if self.tied else 2) + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute one token: all except the experts that the token does not use."""
        idle = sum(
            layer.feed_forward.parameters - layer.feed_forward.active_parameters for layer in self.layers
        )
        return self.parameters - idle

    def cache_bytes(self, tokens: int, item_bytes: float = 2) -> int:
        """Return the bytes of a sequence of `tokens` tokens in the cache, with elements of `item_bytes`."""
        elements = sum(layer.mixer.cached_elements(tokens) for layer in self.layers)
        state_bytes = _STATE_BYTES * sum(layer.mixer.state_size for layer in self.layers)
        return round(elements * item_bytes) + state_bytes

    def cache_bytes_per_token(self, tokens: int, item_bytes: float = 2) -> float:
        """Return cache bytes divided by tokens, which depends on the length except in full attention."""
        return self.cache_bytes(tokens, item_bytes) / tokens

    def decode_flops(self, tokens: int) -> float:
        """Return the FLOPs to compute one token that attends to `tokens` tokens, including itself.

        Each active parameter counts as 2 FLOPs, a multiplication and an addition. The embedding look-up does
        not count.
        """
        contexts = ((layer.mixer, min(tokens, layer.mixer.window or tokens)) for layer in self.layers)
        return self._dense_flops + sum(mixer.flops(count) for mixer, count in contexts)

    def training_flops(self, tokens: int) -> float:
        """Return the mean FLOPs to train on one token of a sequence of `tokens`: 3 times the forward pass."""
        contexts = ((layer.mixer, mean_context(tokens, layer.mixer.window)) for layer in self.layers)
        return 3 * (self._dense_flops + sum(mixer.flops_uncached(count) for mixer, count in contexts))

    @property
    def _dense_flops(self) -> int:
        looked_up = 0 if self.tied else self.table_parameters
        return 2 * (self.active_parameters - looked_up)

    def activation_bytes(self, tokens: int, item_bytes: float, *, recompute: bool = False) -> int:
        """Estimate the activation bytes per token that the backward pass over `tokens` needs, without logits.

        The layer being computed takes half of its activations again.

        Args:
            recompute: whether activation checkpointing keeps only the input of each layer. The layer being
                recomputed then takes 4.5 times its activations (measured), for temporaries and gradients.
        """
        layers = self._layer_activations(tokens)
        elements = self.hidden_size * len(layers) + 4 * max(layers) if recompute else sum(layers)
        return round(item_bytes * (elements + 0.5 * max(layers)))

    def layer_bytes(self, tokens: int, item_bytes: float) -> int:
        """Estimate the activation bytes per token of the largest layer alone."""
        return round(item_bytes * max(self._layer_activations(tokens)))

    def _layer_activations(self, tokens: int) -> list[int]:
        """Return the activations per token of each layer that the backward pass needs."""
        return [
            4 * self.hidden_size + 3 * layer.feed_forward.width + layer.mixer.kept_elements(tokens)
            for layer in self.layers
        ]

    def variants(self) -> list[tuple[str, str]]:
        """Return runs of equal layers in order: ("0-3", "GQA 16/8 heads of 128; feed-forward 3,072"), ..."""
        runs, start = [], 0
        for name, group in groupby(layer.name for layer in self.layers):
            end = start + len(list(group))
            runs.append((f"{start}-{end - 1}" if end - start > 1 else f"{start}", name))
            start = end
        return runs

    def kinds(self) -> Counter[str]:
        """Return the number of layers of each kind, in order of appearance."""
        return Counter(layer.name for layer in self.layers)


def mean_context(tokens: int, window: int | None) -> float:
    """Return the mean number of tokens that a token attends to, including itself."""
    context = min(tokens, window or tokens)
    return (context * (context + 1) / 2 + (tokens - context) * context) / tokens
