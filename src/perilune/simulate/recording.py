"""Records the steps of the real engine: the work and the duration of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import Blocks
from perilune.engine.engine import Engine
from perilune.engine.request import Request
from perilune.engine.runner import Runner
from perilune.engine.sampler import DrawnTokens, Sampler
from perilune.engine.select_runner import fastest_runner
from perilune.engine.sequences import Rows, Sequences
from perilune.engine.step import StepBatch
from perilune.models.decoder import Decoder
from perilune.simulate.engine import SimulatedModel, StepLog
from perilune.simulate.step_cost import StepWork, Windows


class RecordedEngine(Engine):
    """The real engine with a log of its steps, like that of a `SimulatedEngine`.

    Args:
        size: as in `Engine`: slots, cache_tokens, token_budget.
    """

    def __init__(self, decoder: Decoder, **size: int) -> None:
        self.log = StepLog()
        windows = SimulatedModel.from_config(decoder.config).windows

        def runner(source: Any, num_blocks: tuple[int, ...]) -> Runner:
            return _RecordingRunner(fastest_runner(source, num_blocks), self.log, windows)

        options: dict[str, Any] = size
        super().__init__(decoder, runner=runner, **options)

    def _start_empty(self) -> None:
        super()._start_empty()
        self._sampler = _RecordingSampler(self._sequences, self.log)

    def run_timed(
        self, requests: Sequence[Request], clock: Callable[[], float]
    ) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Compute all requests together.

        Returns:
            the seconds of each step, and for each sample (request, index) the seconds from the start to its
            end.
        """
        began = clock()
        ids = {self.add(request, stream=False): number for number, request in enumerate(requests)}
        steps, ends = [], dict[tuple[int, int], float]()
        while self.unfinished:
            before = clock()
            deltas = self.step()
            now = clock()
            steps.append(now - before)
            self.log.update_last(ended=len(deltas))
            ends |= {(ids[delta.request_id], delta.sample): now - began for delta in deltas}
        return steps, ends


class _RecordingRunner:
    """Logs the work of each step of another runner."""

    def __init__(self, inner: Runner, log: StepLog, windows: Windows) -> None:
        self._inner, self._log, self._windows = inner, log, windows

    def run(self, batch: StepBatch) -> Tensor:
        self._log.add_step(StepWork.from_batch(batch, self._windows), batch)
        return self._inner.run(batch)

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        self._log.update_last(copied=sources.shape[1])
        self._inner.copy_blocks(sources, targets)

    def load_weights(self, decoder: Decoder) -> None:
        self._inner.load_weights(decoder)

    def clear(self) -> None:
        self._inner.clear()


class _RecordingSampler(Sampler):
    """Logs the samples that draw their first token."""

    def __init__(self, sequences: Sequences, log: StepLog) -> None:
        super().__init__(sequences)
        self._log = log

    def draw(
        self,
        logits: Tensor,
        rows: Rows,
        logits_of: NDArray[np.int64] | None,
        masks: Mapping[int, NDArray[np.int32]],
    ) -> DrawnTokens:
        self._log.update_last(begun=len(rows) - self._log.works[-1].rows)
        return super().draw(logits, rows, logits_of, masks)
