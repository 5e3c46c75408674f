"""The engine on a virtual clock: the real scheduler, pools and outputs, with predicted step times.

The runner computes nothing, and the sampler returns given tokens, because lengths are an input of the
simulation. So the simulated engine takes the same steps as the real engine with the same requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import Blocks
from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadStore
from perilune.engine.request import Request, SamplingParams
from perilune.engine.sampler import DrawnTokens, Sampler
from perilune.engine.sequences import Rows, Sequences
from perilune.engine.step import StepBatch
from perilune.models.card.model_card import ModelCard
from perilune.models.config.decoder_config import STATE_WINDOW, DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.memory import DEFAULT_TOKEN_BUDGET
from perilune.simulate.step_cost import StepTimes, StepWork, Windows

Tokens = NDArray[np.int32]
VOCABULARY_SIZE = 1 << 15  # number of different simulated tokens; only the equality of tokens matters


@dataclass(slots=True)
class Clock:
    """Virtual seconds. Only predictions advance the clock."""

    now: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The part of a model's configuration that the engine reads.

    Attributes:
        vocab_size: vocabulary size plus one, for a token that ends samples.
        windows: share of the layers with each window.
    """

    vocab_size: int
    max_position_embeddings: int
    windows: Windows

    @classmethod
    def from_config(cls, config: DecoderConfig) -> SimulatedModel:
        """Return the model of a configuration."""
        shares = _window_shares([config.window(layer) for layer in range(config.num_layers)])
        return cls(config.vocab_size + 1, config.max_position_embeddings, shares)

    @classmethod
    def from_card(cls, model: ModelCard) -> SimulatedModel:
        """Return the model of a card, with a vocabulary of `VOCABULARY_SIZE` tokens."""
        return cls(VOCABULARY_SIZE + 1, model.max_positions, _window_shares(layer_windows(model)))

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The windows in the order of `DecoderConfig.distinct_windows`."""
        return tuple(sorted(self.windows, key=lambda window: window or 0))

    @property
    def config(self) -> SimulatedModel:
        """The object itself, because the engine reads `decoder.config`."""
        return self


def _window_shares(windows: Sequence[int | None]) -> Windows:
    """Return the share of each window among the windows of all layers."""
    return {window: count / len(windows) for window, count in Counter(windows).items()}


def layer_windows(model: ModelCard) -> list[int | None]:
    """Return the window of each layer; `STATE_WINDOW` for linear attention."""
    return [STATE_WINDOW if layer.mixer.state_size else layer.mixer.window for layer in model.layers]


@dataclass(slots=True)
class StepLog:
    """The steps of an engine in order, real or simulated.

    Attributes:
        works: what each step computed.
        chunks: tokens of each chunk of prefill, by step.
    """

    works: list[StepWork] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)

    def add_step(self, work: StepWork, batch: StepBatch) -> None:
        """Add the step of `batch`."""
        self.works.append(work)
        self.chunks.append(tuple(np.diff(batch.cu_seqlens)[batch.decodes :].tolist()))

    def update_last(self, **counts: int) -> None:
        """Set counts of the last step that are known only after its batch was built."""
        self.works[-1] = replace(self.works[-1], **counts)


class PredictedRunner:
    """A `Runner` without a model: it advances a clock by the predicted time of each step.

    Attributes:
        slowdown: factor of all times, when several processes share a processor.
    """

    def __init__(self, times: StepTimes, windows: Windows, clock: Clock, log: StepLog | None = None) -> None:
        self._times, self._windows, self._clock, self._log = times, windows, clock, log
        self._rows = 0
        self.slowdown = 1.0

    def run(self, batch: StepBatch) -> Tensor:
        """Advance the clock. The logits are empty."""
        work, self._rows = StepWork.from_batch(batch, self._windows), batch.decodes
        if self._log is not None:
            self._log.add_step(work, batch)
        self._clock.now += self.slowdown * self._times.step_seconds(work)
        return _NO_LOGITS

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Advance the clock by the time of the copies."""
        self._advance_clock(copied=sources.shape[1])

    def advance_draw(self, count: int, ended: int) -> None:
        """Advance the clock by the time for samples that begin and end in a draw.

        Args:
            count: number of samples that draw a token.
            ended: number of samples that draw their last token.
        """
        self._advance_clock(begun=count - self._rows, ended=ended)

    def _advance_clock(self, **counts: int) -> None:
        if self._log is not None:
            self._log.update_last(**counts)
        self._clock.now += self.slowdown * self._times.bookkeeping_seconds(**counts)

    def load_weights(self, decoder: Decoder) -> None:
        """Weights are not simulated."""

    def clear(self) -> None:
        """The cache has no content."""


_NO_LOGITS = torch.empty(0, 0)


class TracedSampler(Sampler):
    """Returns the known tokens of each sample, and `end` as its last token.

    Args:
        traces: by request id, the tokens of each sample. The sampler removes a request when all of its
            samples have begun.
        end: the token that ends samples.
        begun: called with the request ids of samples that drew their first token.
    """

    def __init__(
        self,
        sequences: Sequences,
        traces: dict[int, list[Tokens]],
        runner: PredictedRunner,
        end: int,
        begun: Callable[[list[int]], None],
    ) -> None:
        super().__init__(sequences)
        self._traces, self._runner, self._end, self._record_first_tokens = traces, runner, end, begun
        rows = len(sequences.entries)
        self._arrival = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros((rows, 64), dtype=np.int64)
        self._not_begun: dict[int, int] = {}

    def draw(
        self,
        logits: Tensor,
        rows: Rows,
        logits_of: NDArray[np.int64] | None,
        masks: Mapping[int, NDArray[np.int32]],
    ) -> DrawnTokens:
        """Return the next known token of each of `rows`, with log-probs of 0."""
        sequences = self._sequences
        new = rows[self._arrival[rows] != sequences.arrival[rows]].tolist()
        for row in new:
            self._load_tokens(row)
        tokens = self._tokens[rows, sequences.length[rows] - sequences.prompt_length[rows]]
        self._runner.advance_draw(len(rows), int((tokens == self._end).sum()))
        self._record_first_tokens([entry.id for row in new if (entry := sequences.entries[row]) is not None])
        return DrawnTokens(tokens, np.zeros(len(rows), dtype=np.float32), {}, {})

    def _load_tokens(self, row: int) -> None:
        """Look up the tokens of a sample that begins."""
        entry, sample = self._sequences.entries[row], int(self._sequences.sample[row])
        assert entry is not None
        tokens = self._traces[entry.id][sample]
        if (missing := len(tokens) - self._tokens.shape[1]) > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(missing, self._tokens.shape[1]))))
        self._tokens[row, : len(tokens)] = tokens
        self._tokens[row, len(tokens) - 1] = self._end
        self._arrival[row] = self._sequences.arrival[row]
        remaining = self._not_begun.get(entry.id, entry.request.n) - 1
        self._not_begun[entry.id] = remaining
        if not remaining:
            del self._not_begun[entry.id], self._traces[entry.id]


class SimulatedEngine(Engine):
    """An `Engine` whose tokens are known and whose time is predicted.

    Args:
        slots, cache_tokens, token_budget: as in `Engine`.
        log: records every step.

    Attributes:
        clock: the virtual time of the engine.
        predicted: the runner that advances the clock.
        peak_use: the largest share of the cache in use so far.
        first_token_times: by request id, the time at which the first token of the request was drawn.
    """

    def __init__(
        self,
        model: SimulatedModel,
        times: StepTimes,
        *,
        slots: int,
        cache_tokens: int,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        log: StepLog | None = None,
    ) -> None:
        self.clock, self.peak_use = Clock(), 0.0
        self.first_token_times: dict[int, float] = {}
        self.predicted = PredictedRunner(times, model.windows, self.clock, log)
        self._traces: dict[int, list[Tokens]] = {}
        self._end = model.vocab_size - 1
        decoder: Any = model
        super().__init__(
            decoder,
            slots=slots,
            cache_tokens=cache_tokens,
            token_budget=token_budget,
            runner=lambda decoder, num_blocks: self.predicted,
        )

    def _start_empty(self) -> None:
        super()._start_empty()
        self._sampler = TracedSampler(
            self._sequences, self._traces, self.predicted, self._end, self._record_first_tokens
        )

    def _record_first_tokens(self, requests: list[int]) -> None:
        for request in requests:
            self.first_token_times.setdefault(request, self.clock.now)

    def _advance(self) -> None:
        super()._advance()
        self.peak_use = max(self.peak_use, self.cache_use)

    def offload_to(self, store: OffloadStore) -> None:
        """Keep the blocks that the prefix cache evicts. Call it before the first request."""
        self._offload = store
        self._start_empty()

    @property
    def block_count(self) -> int:
        """Number of blocks of the smallest pool of the cache, without the null block."""
        return min(self._num_blocks) - 1

    def submit(self, prompt: Sequence[int], samples: Sequence[Tokens]) -> int:
        """Queue a request whose samples will have these tokens; return its id."""
        longest = max(map(len, samples))
        params = SamplingParams(longest, stop_token_ids=(self._end,))
        self._traces[self._next_id] = list(samples)
        return self.add(Request(list(prompt), params, (0, 0, 0), len(samples)), stream=False)

    def swap_weights(self, version: int) -> None:
        """Use new weights, and recompute samples in flight as `Engine.update_weights` does."""
        self.version = version
        self._scheduler.switch_weights(version, recompute=True)
