"""Routes of a mixture of experts, stored with the paged KV cache.

A token's routes have the same block and offset as its keys and values, so they need no bookkeeping of their
own. A sample that shares, copies or finds a block also gets the block's routes. A cached prefix has the
routes with which it was computed. The store is small: 384 bytes per token for Qwen3-30B-A3B, whose keys and
values take 98,304 bytes per token in bfloat16.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perilune.data.routes import Routes, missing_mark, route_dtype
from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks, blocks_for
from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig


class RouteStore:
    """The routes of every cached token.

    Args:
        num_blocks: blocks for each of the model's `distinct_windows`, including the null block.

    Raises:
        RequestError: for a dense model.

    Attributes:
        table: index of the block table whose blocks have the routes: that of the longest attention window.
        experts: uint8 or int16 (the bits of uint16) [blocks, 16, layers, K].
    """

    def __init__(self, config: DecoderConfig, num_blocks: Sequence[int], device: torch.device) -> None:
        if config.experts is None:
            raise RequestError(
                f"{config.architecture} has no experts, so there are no routes to record",
                remedy="remove routing_replay, or use a mixture of experts such as qwen3_moe",
            )
        self.table = config.widest_window
        self.layers = sum(config.is_sparse(layer) for layer in range(config.num_layers))
        self.dtype = np.dtype(route_dtype(config.experts.count))
        self.missing = missing_mark(self.dtype)
        kind = torch.uint8 if self.dtype == np.uint8 else torch.int16
        shape = num_blocks[self.table], BLOCK, self.layers, config.experts.per_token
        self.experts = torch.empty(shape, dtype=kind, device=device)
        self.clear()

    def clear(self) -> None:
        """Mark all routes as missing."""
        self.experts.fill_(self.missing if self.dtype == np.uint8 else -1)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the routes of the blocks `sources` int64[W, C] to the blocks `targets`."""
        self.experts[targets[self.table]] = self.experts[sources[self.table]]

    def gather(self, table: Blocks, rows: int) -> Routes:
        """Return the routes of the first `rows` tokens of a sample with the block tables int32[W, C].

        Tokens before the longest attention window are marked as missing: their blocks have been released.
        """
        blocks = table[self.table, : blocks_for(rows)].astype(np.int64)
        experts = self.experts[torch.from_numpy(blocks).to(self.experts.device)].cpu().numpy()
        routes: Routes = experts.view(self.dtype).reshape(-1, *experts.shape[2:])[:rows]
        routes[np.repeat(blocks == NULL_BLOCK, BLOCK)[:rows]] = self.missing
        return routes


class RouteRecorder:
    """A `Routing` that stores the routes of a step.

    Args:
        slots: int64[N], 16 times the block of each token plus its offset, on the device of the store.
    """

    def __init__(self, store: RouteStore, slots: Tensor) -> None:
        self._store, self._slots = store, slots

    def forced_experts(self, layer: int, rows: int) -> Tensor | None:
        return None

    def observe(self, layer: int, logits: Tensor, own: Tensor, chosen: Tensor) -> None:
        experts = self._store.experts.flatten(0, 1)
        experts[self._slots, layer] = chosen.to(experts.dtype)
