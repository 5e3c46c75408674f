"""Limits: what an engine can be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, blocks_for
from perilune.engine.request import Request
from perilune.errors import RequestError
from perilune.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Limits:
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

    def check(self, request: Request, where: str) -> None:
        """Raise RequestError, naming `where`, on a request that cannot be served."""
        params, key = request.params, request.key
        self.check_tokens(request.token_ids, params.max_tokens, where)
        last = request.first_sample + request.n - 1
        if not (0 <= key[0] < 2**64 and all(0 <= word < 2**32 for word in (*key[1:], max(last, 0)))):
            raise RequestError(f"key {key} does not fit 64, 32 and 32 bits", where=where)
        if params.stop and not self.has_tokenizer:
            raise RequestError("stop texts need a tokenizer", where=where, remedy="give Engine a tokenizer")
        if params.min_tokens and request.constraint is not None:
            raise RequestError(
                "min_tokens and a constraint may ask for opposites", where=where, remedy="use one"
            )
        outside = [token for token in params.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise RequestError(
                f"logit_bias names token {outside[0]}", where=where, remedy="use the model's ids"
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
