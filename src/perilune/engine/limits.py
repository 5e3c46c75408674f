"""The requests that an engine can serve, and the default size of its cache."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, blocks_for
from perilune.engine.request import Request
from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.memory import blocks_bytes
from perilune.models.transformers_model import ModelShape

DEFAULT_CACHE_BYTES = 4 << 30
"""Default size of the KV cache. On a CPU, only used memory is allocated."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine.

    Attributes:
        vocab_size: tokens are 0 .. vocab_size - 1.
        positions: maximum number of tokens of a sequence that the model supports.
        num_blocks: blocks of the cache, including the null block.
        has_tokenizer: whether stop texts are possible.
        block_size: tokens per block.
    """

    vocab_size: int
    positions: int
    num_blocks: int
    has_tokenizer: bool
    block_size: int = BLOCK

    @property
    def cache_tokens(self) -> int:
        """Capacity of the cache in tokens, in the layers without a window."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum number of tokens of one sequence."""
        return min(self.positions, self.cache_tokens)

    def check(self, request: Request, where: str) -> None:
        """Raise a RequestError that names `where` for a request that the engine cannot serve."""
        params, key = request.params, request.key
        self.check_tokens(request.token_ids, params.max_tokens, where)
        last = request.first_sample + request.n - 1
        words = (*key[1:], request.first_sample, max(last, 0))
        if not (0 <= key[0] < 2**64 and all(0 <= word < 2**32 for word in words)):
            raise RequestError(f"key {key} does not fit 64, 32 and 32 bits", where=where)
        if not 0 <= request.position <= len(request.token_ids):
            raise RequestError(
                f"position is {request.position}", where=where, remedy="give 0 to the prompt's length"
            )
        if request.inputs is not None and request.n != 1:
            raise RequestError("a request with input embeddings has one sample", where=where, remedy="n = 1")
        if params.stop and not self.has_tokenizer:
            raise RequestError("stop texts need a tokenizer", where=where, remedy="give Engine a tokenizer")
        if params.min_tokens and request.constraint is not None:
            raise RequestError(
                "min_tokens and a constraint can contradict each other", where=where, remedy="use one of them"
            )
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            outside = [token for token in tokens if not 0 <= token < self.vocab_size]
            if outside:
                raise RequestError(
                    f"{name} names token {outside[0]}",
                    where=where,
                    remedy=f"use the model's ids, 0 to {self.vocab_size - 1}",
                )
        if params.min_tokens and len(set(params.stop_token_ids)) == self.vocab_size:
            raise RequestError(
                "min_tokens forbids all tokens: each is a stop token", where=where, remedy="leave one out"
            )

    def check_tokens(self, prompt: Sequence[int] | NDArray[np.int64], new_tokens: int, where: str) -> None:
        """Raise a RequestError for a prompt that does not fit with `new_tokens` further tokens."""
        total = len(prompt) + new_tokens
        if not len(prompt):
            raise RequestError("there are no tokens", where=where)
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestError(
                f"a token is outside the vocabulary, 0 to {self.vocab_size - 1}",
                where=where,
                remedy="encode the text with the tokenizer of this model",
            )
        if total > self.positions:
            raise RequestError(
                f"{len(prompt)} tokens and {new_tokens} more exceed the model's {self.positions} positions",
                where=where,
                remedy="shorten the prompt, or request fewer tokens",
            )
        if total > self.cache_tokens:
            raise RequestError(
                f"{len(prompt)} tokens and {new_tokens} more exceed the cache's {self.cache_tokens}",
                where=where,
                remedy="shorten the prompt, request fewer tokens, or give the engine more cache_tokens",
            )


def check_state_dict(state: Mapping[str, Tensor], decoder: Decoder) -> None:
    """Raise a RequestError unless `state` has the names and shapes of the decoder."""
    expected = decoder.state_dict()
    if different := sorted(expected.keys() ^ state.keys()):
        what = f"only one of the decoder and the new state has {different[0]}"
        raise RequestError(what, where="new weights")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)}, not {list(tensor.shape)}"
            raise RequestError(f"{name} has shape {shapes}", where="new weights")


def default_cache_tokens(config: DecoderConfig | ModelShape, slots: int) -> int:
    """Return the tokens of `slots` samples of maximum length, or as many as fit `DEFAULT_CACHE_BYTES`."""
    size = torch.float32.itemsize
    if isinstance(config, ModelShape):
        room = DEFAULT_CACHE_BYTES // config.cache_bytes(BLOCK, size)
    else:
        counts = range(1, 1 + slots * blocks_for(config.max_position_embeddings))
        room = bisect_right(
            counts, DEFAULT_CACHE_BYTES, key=lambda count: blocks_bytes(config, 1 + count, slots, size)
        )
    return max(BLOCK, min(slots * config.max_position_embeddings, room * BLOCK))
