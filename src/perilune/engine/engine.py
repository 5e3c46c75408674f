"""The engine: continues prompts in a batch that is formed anew at every step, exactly and reproducibly.

One step: the scheduler chooses tokens to feed, the runner computes logits, the sampler draws, and the
scheduler takes note. Everything else here is coming and going.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import blocks_for
from perilune.engine.constraints import Constraint
from perilune.engine.limits import EngineLimits, check_state, default_cache_tokens
from perilune.engine.outputs import Collection, OutputProcessor
from perilune.engine.pools import BlockPools
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams
from perilune.engine.runner import AdaptingRunner, Runner
from perilune.engine.sampler import Sampler
from perilune.engine.scheduler import Scheduler
from perilune.engine.scoring import MOST_LOGITS, Bounds, Pair, in_batches, lay_out
from perilune.engine.select_runner import fastest_runner
from perilune.engine.sequences import Entry, Sequences
from perilune.engine.step import Counters
from perilune.errors import RequestError, WorkFailedError
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import TOKEN_BUDGET, window_blocks
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import TransformersModel


class Engine:
    """Samples from, and scores with, one decoder.

    Not for several threads at a time.

    Args:
        decoder: what to sample with, on its device and in its dtype. The engine works on a copy of its
            weights, taken now and at every `update_weights`, so that training it does not change a version.
            A `TransformersModel`, which is not trained, is used as it is.
        slots: most samples in flight at once.
        cache_tokens: room for keys and values, in tokens of all samples together, rounded up to blocks of 16.
            By default for `slots` samples of the longest kind, at most 4 GiB.
        token_budget: most tokens fed in one step; longer prompts are fed in chunks.
        score_tokens: most tokens of one scoring batch.
        tokenizer: needed for stop texts and for the text of deltas.
        runner: makes what computes the steps, from the decoder and the number of blocks for each of its
            `distinct_windows`.

    Attributes:
        version: of the policy whose weights it has.
        checksum: of the weights that `update_weights` took last; empty before.
        counters: what has happened so far.
    """

    def __init__(
        self,
        decoder: Decoder | TransformersModel,
        *,
        slots: int = 256,
        cache_tokens: int | None = None,
        token_budget: int = TOKEN_BUDGET,
        score_tokens: int = 16384,
        tokenizer: Tokenizer | None = None,
        runner: Callable[[Any, tuple[int, ...]], Runner] = fastest_runner,
    ) -> None:
        self._source: Any = decoder
        self._config = decoder.config
        self._slots, self._token_budget, self._score_tokens = (
            slots,
            max(token_budget, 2 * slots),
            score_tokens,
        )
        self._tokenizer = tokenizer
        num_blocks = 1 + blocks_for(cache_tokens or default_cache_tokens(decoder.config, slots))
        self._num_blocks = tuple(
            window_blocks(window, num_blocks, slots=slots, token_budget=self._token_budget)
            for window in decoder.config.distinct_windows
        )
        self._runner = runner(decoder, self._num_blocks)
        self._limits = EngineLimits(
            decoder.config.vocab_size,
            decoder.config.max_position_embeddings,
            num_blocks,
            tokenizer is not None,
        )
        self.version = 0
        self.checksum = ""
        self.counters = Counters()
        self._adapters: list[Adapter] = []
        self._adapter_numbers: dict[str, int] = {}
        self._next_id = 0
        self._open()

    def _open(self) -> None:
        """Begin with nothing in flight and nothing cached."""
        windows = self._config.distinct_windows
        self._sequences = Sequences(self._slots, self._config.vocab_size, len(windows))
        self._pools = BlockPools(self._num_blocks, windows)
        self._scheduler = Scheduler(self._sequences, self._pools, self._token_budget, self.counters)
        self._scheduler.version = self.version
        self._sampler = Sampler(self._sequences)
        self._outputs = OutputProcessor(self._sequences, self._tokenizer)

    def _enter(
        self, request: Request, collection: Collection | None = None, *, stream: bool = False
    ) -> Entry:
        adapter = self._adapter_number(request.adapter, "request")
        entry = Entry(self._next_id, request, np.array(request.token_ids, dtype=np.int32), request.n, adapter)
        self._next_id += 1
        self._outputs.expect(entry, collection, stream=stream)
        self._scheduler.add(entry)
        return entry

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request, *, stream: bool = True) -> int:
        """Let `request` wait for its turn, and return its id. Its samples come out of `step`.

        Args:
            stream: in pieces, a delta a token; otherwise each sample in one delta when it has ended.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, more tokens than the model has
                positions for or the cache has room for, an unknown adapter, or stop texts without tokenizer.
        """
        self._limits.check(request, "request")
        return self._enter(request, stream=stream).id

    def step(self) -> list[Delta]:
        """Feed, and draw from, all samples in flight as far as there is room.

        Returns what they have gained. The last delta of a sample has a `finish_reason`. A request that fails,
        because the model gives it no finite probabilities for instance, ends with a delta that has a
        `failure`; others go on. An error of the whole step is raised, and everything in flight is gone then.
        """
        self._advance()
        deltas, self._outputs.pending = self._outputs.pending, []
        return deltas

    def abort(self, request_id: int) -> list[Completion]:
        """Drop a request at whatever point it is; its blocks are free at once.

        Returns what its unfinished samples had so far, in order, with the finish reason "aborted". No further
        deltas of it come out of `step`. An unknown or finished request is no error: nothing is returned.
        """
        entry = self._outputs.entries.get(request_id)
        if entry is None:
            return []
        rows = sorted(self._scheduler.rows_of(entry), key=self._sequences.sample.__getitem__)
        partial = [self._outputs.completion(row, "aborted") for row in rows]
        self._scheduler.remove(entry)
        self._outputs.drop(entry, rows)
        return partial

    def stream(self, request: Request) -> Iterator[Delta]:
        """Deltas of `request` alone, as they come. Leaving the loop early aborts it.

        Other requests in flight advance too; their deltas come out of the next `step`.
        """
        request_id = self.add(request)
        try:
            while request_id in self._outputs.entries:
                deltas = self.step()
                self._outputs.pending = [one for one in deltas if one.request_id != request_id]
                for one in (delta for delta in deltas if delta.request_id == request_id):
                    if one.failure is not None:
                        raise one.failure
                    yield one
        finally:
            self.abort(request_id)

    @property
    def unfinished(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self._scheduler.unfinished or bool(self._outputs.pending)

    @property
    def positions(self) -> int:
        """Most tokens of prompt and sample together: what the model has positions, and the cache room for."""
        return self._limits.longest

    @property
    def waiting(self) -> int:
        """Requests with samples that have not begun."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Samples that have begun and not ended."""
        return sum(entry is not None for entry in self._sequences.entries)

    @property
    def cache_use(self) -> float:
        """Share of the cache that samples in flight hold; where windows differ, of the fullest part."""
        return self._pools.use

    # -- sampling and scoring ----------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `n` times; `result[i][j]` is sample j of prompt i.

        `on_progress(finished, total)` is called after every step, with counts of samples. All samples fit
        the `constraint`, unless they are cut off or given up ("length", "aborted").

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the
                model has positions for or the cache has room for.
            WorkFailedError: when the model gives no finite probabilities.
        """
        requests = [
            Request(prompt.token_ids, params, prompt.key, n, constraint=constraint) for prompt in prompts
        ]
        for index, request in enumerate(requests):
            self._limits.check(request, f"prompt {index}")
        collection = Collection(len(requests) * n)
        total = collection.unfinished
        if total:
            for request in requests:
                self._enter(request, collection)
        try:
            while collection.unfinished:
                self._advance()
                if collection.failure is not None:
                    raise collection.failure
                if on_progress is not None:
                    on_progress(total - collection.unfinished, total)
        except BaseException:
            for entry_id in collection.samples:
                self.abort(entry_id)
            raise
        groups = iter(collection.samples.values())
        return [[samples[j] for j in range(n)] for samples in groups] if n else [[] for _ in prompts]

    @torch.inference_mode()
    def score(
        self,
        prompt_ids: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> list[NDArray[np.float32]]:
        """Log-probs float32[T] of each `token_ids[i]` after `prompt_ids[i]`, with the adapter of that name.

        Computed as `sample` would, in whatever blocks are free: samples in flight are not disturbed, but may
        have to be computed again.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the
                model has positions for or the cache has room for.
        """
        pairs = []
        for index, (prompt, answer) in enumerate(zip(prompt_ids, token_ids, strict=True)):
            self._limits.check_tokens(prompt, len(answer), f"prompt {index}")
            self._limits.check_tokens([*prompt[:1], *answer], 0, f"answer {index}")
            pairs.append(Pair(np.array([*prompt, *answer], dtype=np.int64), len(answer)))
        number = self._adapter_number(adapter, "score")
        rows = max(1, MOST_LOGITS // self._config.vocab_size)
        bounds = Bounds(self._score_tokens, min(self._num_blocks) - 1, rows, self._token_budget)
        scores: list[NDArray[np.float32]] = []
        for batch in in_batches(pairs, bounds):
            blocks = self._scheduler.allocate_temporarily(sum(blocks_for(len(pair.tokens)) for pair in batch))
            logprobs = []
            try:
                for step, targets in lay_out(batch, blocks, number, bounds):
                    logits = self._runner.run(step)
                    of_targets = torch.from_numpy(targets).to(logits.device)
                    logprobs.append(token_logprobs(logits, of_targets, temperature)[0].cpu().numpy())
            finally:
                self._pools.free_temporary(blocks)
            scores += np.split(np.concatenate(logprobs), np.cumsum([pair.answer for pair in batch])[:-1])
        return scores

    # -- weights -----------------------------------------------------------------------------------------

    def update_weights(
        self, state: Mapping[str, Tensor] | None, version: int, *, recompute: bool = True
    ) -> None:
        """Take `state`, or when None what the decoder given at first now holds, as policy `version`.

        `state` has the decoder's own names and is loaded into it. May be called between two steps (also from
        `on_progress`): every token says which version sampled it.

        Args:
            recompute: compute again what samples in flight have so far, so that they go on exactly as if they
                began anew with the new weights and these tokens. Otherwise they go on at once, on keys and
                values that the old weights left; log-probs are then of that mixture.

        Raises:
            RequestError: when names or shapes are not the decoder's; nothing has changed then.
        """
        if state is not None:
            check_state(state, self._source)
            self._source.load_state_dict(state)
        with self._source.in_memory():
            self._runner.load_weights(self._source)
            self.checksum = checksum(self._source.state_dict())
        self.version = version
        self._scheduler.new_weights(version, recompute=recompute)

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Let requests name a LoRA adapter; one that had the name before goes on for those that have begun.

        Raises:
            RequestError: when it does not fit the decoder, or the runner cannot apply adapters.
        """
        if not isinstance(self._runner, AdaptingRunner):
            raise RequestError(f"{type(self._runner).__name__} cannot apply adapters", where=name)
        with self._source.in_memory():
            adapter.check(self._source)
            self._runner.load_adapters([*self._adapters, adapter], self._source)
        self._adapters.append(adapter)
        self._adapter_numbers[name] = len(self._adapters) - 1

    def _adapter_number(self, name: str | None, where: str) -> int:
        if name is None:
            return -1
        if name not in self._adapter_numbers:
            raise RequestError(f"no adapter {name!r}", where=where, remedy="add it first")
        return self._adapter_numbers[name]

    # -- a step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        """Schedule, run, sample, commit."""
        try:
            step = self._scheduler.schedule()
            if step is None:
                return
            logits = self._runner.run(step.batch)
            masks = self._outputs.masks(step.rows)
            drawn = self._sampler.draw(logits, step.rows, step.logits_of, masks)
            sources, targets = self._scheduler.commit(step, drawn.token_ids, drawn.logprobs, self.version)
            if sources.size:
                self._runner.copy_blocks(sources, targets)
            finite = np.isfinite(drawn.logprobs)
            if not finite.all():
                self._outputs.failures |= dict.fromkeys(step.rows[~finite].tolist(), self._not_finite())
            for row in self._outputs.process(step.rows, drawn, self.version):
                self._scheduler.release(row, record=True)
            if self._outputs.failures:
                self._drop_failed()
            if not finite.all():
                # Keys and values that are not finite would spoil whoever is given these blocks next.
                self._scheduler.new_weights(self.version, recompute=True)
                self._runner.clear()
        except BaseException:
            self._reset()
            raise

    def _drop_failed(self) -> None:
        """Give up each request that one of its samples failed."""
        failures, self._outputs.failures = self._outputs.failures, {}
        for row, failure in failures.items():
            entry = self._sequences.entries[row]
            if entry is not None:  # not dropped for another of its samples
                self._outputs.fail(entry, row, self._scheduler.rows_of(entry), failure)
                self._scheduler.remove(entry)

    def _not_finite(self) -> WorkFailedError:
        return WorkFailedError(
            "the model's probabilities are not finite",
            where=f"sampling, policy version {self.version}",
            remedy="the weights diverged: lower the learning rate, or start from an earlier checkpoint",
        )

    def _reset(self) -> None:
        self._runner.clear()
        self._open()

    def restart(self) -> None:
        """Begin anew after a failure: nothing in flight, nothing cached, and one token sampled as a proof.

        Raises:
            Exception: the failure, when it persists.
        """
        self._reset()
        self.sample([Prompt([0], (0, 0, 0))], 1, SamplingParams(max_tokens=1, temperature=0))
