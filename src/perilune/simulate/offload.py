"""The offload store of a simulated engine: the real store without bytes, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perilune.engine.blocks import BLOCK, Blocks
from perilune.engine.offload import Bytes, OffloadSettings, OffloadStore, StoredBlock
from perilune.models.card.model_card import ModelCard
from perilune.simulate.engine import Clock, SimulatedModel, layer_windows
from perilune.simulate.hardware import ACHIEVED_BANDWIDTH, DISK_BANDWIDTH, VALUE_BYTES, Machines

_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """The size of blocks, and the bandwidths of transfers.

    Attributes:
        block_bytes: bytes of a block of each pool.
        memory: bytes per second between the cache and the host's memory.
        disk: bytes per second between the host's memory and its disk.
    """

    block_bytes: Sequence[int]
    memory: float
    disk: float

    @classmethod
    def of(cls, machines: Machines, model: ModelCard) -> OffloadTimes:
        """Return the sizes and bandwidths of one copy of the model."""
        pools = (
            [
                layer
                for layer, window in zip(model.layers, layer_windows(model), strict=True)
                if window == size
            ]
            for size in SimulatedModel.from_card(model).distinct_windows
        )
        sizes = [replace(model, layers=tuple(layers)).cache_bytes(BLOCK, VALUE_BYTES) for layers in pools]
        memory = ACHIEVED_BANDWIDTH * machines.card.host * machines.cards_per_model
        return cls(sizes, memory, ACHIEVED_BANDWIDTH * DISK_BANDWIDTH)


class SimulatedOffloadStore(OffloadStore):
    """An `OffloadStore` that advances a clock by the time of each copy.

    As in the real store, copies do not overlap with the steps of the engine.
    """

    def __init__(self, settings: OffloadSettings, times: OffloadTimes, clock: Clock) -> None:
        no_cache: Any = None
        super().__init__(settings, no_cache, lambda: clock.now)
        self._times, self._clock = times, clock
        self.load_seconds = 1 / times.memory  # initial estimate, until the first load

    def _copy(self, index: int, blocks: Blocks) -> list[StoredBlock]:
        size = self._times.block_bytes[index]
        self._clock.now += len(blocks) * size / self._times.memory
        return [StoredBlock(0, size, _NO_BYTES) for _ in blocks]

    def _overwrite(self, index: int, blocks: Blocks, contents: Sequence[Bytes]) -> int:
        size = len(contents) * self._times.block_bytes[index]
        self._clock.now += size / self._times.memory
        return size

    def _load(self, stored: StoredBlock) -> Bytes | None:
        if stored.content is None:
            self._clock.now += stored.size / self._times.disk
        return _NO_BYTES

    def _open_file(self) -> None:
        """There are no bytes to write."""

    def _write_to_file(self, stored: StoredBlock, offset: int) -> int:
        self._clock.now += stored.size / self._times.disk
        return stored.size
