"""Limits: what an engine can be asked for."""

from __future__ import annotations

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

CACHE_BYTES = 4 << 30
"""Room for keys and values when nothing else is said; on a CPU only what is used is taken."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Of one engine.

    Attributes:
        vocab_size: tokens are 0 .. vocab_size - 1.
        positions: most tokens of a sequence.
        num_blocks: of the cache, the null block included.
        has_tokenizer: whether texts can be told.
    """

    vocab_size: int
    positions: int
    num_blocks: int
    has_tokenizer: bool

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(self.positions, (self.num_blocks - 1) * BLOCK)

    def check(self, request: Request, where: str) -> None:
        """Raise RequestError, naming `where`, on a request that cannot be served."""
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
        if params.stop and not self.has_tokenizer:
            raise RequestError("stop texts need a tokenizer", where=where, remedy="give Engine a tokenizer")
        if params.min_tokens and request.constraint is not None:
            raise RequestError(
                "min_tokens and a constraint may ask for opposites", where=where, remedy="use one"
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
                "min_tokens forbids stop tokens, and every token is one", where=where, remedy="leave one out"
            )

    def check_tokens(self, prompt: Sequence[int] | NDArray[np.int64], more: int, where: str) -> None:
        """Raise RequestError on a prompt that cannot be fed, or not with so many tokens more."""
        total = len(prompt) + more
        if not len(prompt):
            raise RequestError("has no tokens", where=where)
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestError(f"has a token outside 0..{self.vocab_size - 1}", where=where)
        if total > self.positions:
            raise RequestError(
                f"has {len(prompt)} tokens, and with {more} more passes the model's "
                f"{self.positions} positions",
                where=where,
                remedy="shorten the prompt, or ask for fewer tokens",
            )
        if blocks_for(total) >= self.num_blocks:
            raise RequestError(
                f"has {len(prompt)} tokens, and with {more} more passes the cache's "
                f"{(self.num_blocks - 1) * BLOCK}",
                where=where,
                remedy="shorten the prompt, ask for fewer tokens, or give the engine more cache_tokens",
            )


def check_state(state: Mapping[str, Tensor], decoder: Decoder) -> None:
    """Raise RequestError unless `state` has the names and shapes of the decoder's."""
    own = decoder.state_dict()
    if missing := sorted(own.keys() ^ state.keys()):
        raise RequestError(f"{missing[0]} is on one side only", where="new weights")
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)}, not {list(tensor.shape)}"
            raise RequestError(f"{name} is {shapes}", where="new weights")


def default_cache_tokens(config: DecoderConfig | ModelShape, slots: int) -> int:
    """Tokens for `slots` of the longest samples, or as many as have room in `CACHE_BYTES`."""
    size = torch.float32.itemsize
    if isinstance(config, ModelShape):
        room = CACHE_BYTES // config.cache_bytes(BLOCK, size)
    else:
        counts = range(1, 1 + slots * blocks_for(config.max_position_embeddings))
        room = bisect_right(
            counts, CACHE_BYTES, key=lambda count: blocks_bytes(config, 1 + count, slots, size)
        )
    return max(BLOCK, min(slots * config.max_position_embeddings, room * BLOCK))
