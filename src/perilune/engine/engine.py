"""The engine samples with continuous batching, exactly and reproducibly.

In one step, the scheduler chooses tokens, the runner computes logits, the sampler draws, and the scheduler
records the result. The rest of this module adds and removes requests and updates weights.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.adapters import NamedAdapters
from perilune.engine.blocks import BLOCK, blocks_for
from perilune.engine.constraints import Constraint
from perilune.engine.drafting import DraftPlace, draft_runner, make_draft
from perilune.engine.embedding import Pooling, embeddings
from perilune.engine.limits import EngineLimits, check_state, default_cache_tokens
from perilune.engine.offload import OffloadCounters, OffloadSettings, OffloadStore
from perilune.engine.outputs import Collection, OutputProcessor
from perilune.engine.pools import BlockPools
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams, TopLogprobs
from perilune.engine.routes import RouteStore
from perilune.engine.runner import (
    AdaptingRunner,
    HiddenRunner,
    Runner,
    SleepingRunner,
    TorchRunner,
    block_contents,
    sleeping,
    start_recording,
)
from perilune.engine.sampler import Drawn, Sampler
from perilune.engine.scheduler import Scheduler
from perilune.engine.scoring import (
    MOST_LOGITS,
    Bounds,
    Pair,
    PromptLogprobs,
    in_batches,
    lay_out,
    most_likely,
)
from perilune.engine.select_runner import fastest_runner, splits_exactly
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.engine.speculation import Lookup, Proposer, Speculation, SpeculationSettings
from perilune.engine.step import Counters, Proposal, Step
from perilune.errors import RequestError, WorkFailedError
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import TOKEN_BUDGET, window_blocks
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import TransformersModel

_log = logging.getLogger(__name__)


class Engine:
    """Samples from one decoder, and scores with it.

    Not thread-safe.

    Args:
        decoder: the model, on its device and in its dtype. The engine copies its weights now and at every
            `update_weights`, so training does not change a version. A `TransformersModel` is not copied.
        slots: most samples in flight at once.
        cache_tokens: size of the KV cache in tokens of all samples, rounded up to whole blocks. By default
            enough for `slots` samples of the longest kind, at most 4 GiB.
        token_budget: most tokens computed in one step; longer prompts are split into chunks.
        score_tokens: most tokens of one scoring batch.
        tokenizer: required for stop texts and for the text of deltas.
        runner: creates the runner from the decoder and the number of blocks for each of its
            `distinct_windows`. Its attribute `block_size` is the number of tokens per block, 16 if missing.

    Attributes:
        version: policy version of the weights.
        checksum: checksum of the weights of the last `update_weights`; empty before.
        counters: counts since the engine was created.
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
        self._slots, self._score_tokens = slots, score_tokens
        self._block_size = block_size = int(getattr(runner, "block_size", BLOCK))
        self._token_budget = max(token_budget, 2 * slots)
        self._tokenizer = tokenizer
        self._token_count: int | None = None
        num_blocks = 1 + blocks_for(cache_tokens or default_cache_tokens(decoder.config, slots), block_size)
        self._num_blocks = tuple(
            window_blocks(window, num_blocks, slots=slots, token_budget=self._token_budget, size=block_size)
            for window in decoder.config.distinct_windows
        )
        self._make_runner = runner
        self._runner: Runner = runner(decoder, self._num_blocks)
        self._routes: RouteStore | None = None
        self._offload: OffloadStore | None = None
        self._speculation: SpeculationSettings | None = None
        self._draft: Runner | None = None
        self._limits = EngineLimits(
            decoder.config.vocab_size,
            decoder.config.max_position_embeddings,
            num_blocks,
            tokenizer is not None,
            block_size,
        )
        self.version = 0
        self.checksum = ""
        self.counters = Counters()
        self._adapters = NamedAdapters()
        self._next_id = 0
        self._open()

    def _open(self) -> None:
        """Start with no requests and an empty cache."""
        windows = self._config.distinct_windows
        self._sequences = Sequences(self._slots, self._config.vocab_size, len(windows), self._block_size)
        self._pools = BlockPools(self._num_blocks, windows, store=self._offload, block_size=self._block_size)
        self._scheduler = Scheduler(self._sequences, self._pools, self._token_budget, self.counters)
        self._scheduler.version = self.version
        self._scheduler.speculation = self._speculate()
        self._sampler = Sampler(self._sequences)
        self._outputs = OutputProcessor(self._sequences, self._tokenizer, self._routes)

    def _enter(
        self, request: Request, collection: Collection | None = None, *, stream: bool = False
    ) -> Entry:
        adapter = self._adapters.number(request.adapter, "request")
        entry = Entry(self._next_id, request, np.array(request.token_ids, dtype=np.int32), request.n, adapter)
        self._next_id += 1
        self._outputs.register(entry, collection, stream=stream)
        self._scheduler.add(entry)
        return entry

    def limit_tokens(self, count: int) -> None:
        """Sample only ids below `count`: embeddings of published models often have more rows than tokens."""
        self._token_count = count

    def record_routes(self) -> None:
        """Return the routes of a mixture of experts with each sample; to be called before the first one.

        Raises:
            RequestError: for a dense model, or a runner that cannot record.
        """
        self._routes = start_recording(self._runner)
        self._open()

    def offload(self, settings: OffloadSettings) -> None:
        """Keep the blocks that the prefix cache evicts; to be called before the first request.

        Raises:
            RequestError: for a runner whose cache cannot be read.
        """
        self._offload = OffloadStore(settings, block_contents(self._runner))
        self._open()

    def speculate(self, settings: SpeculationSettings) -> None:
        """Propose tokens and verify several in one step. Call it before the first request.

        The samples stay the same, bit for bit.

        Raises:
            RequestError: for a runner whose logits depend on the division of a sequence into steps, for
                linear attention, or for a draft that does not fit the model.
        """
        if self._has_states:
            raise RequestError(
                "the model has linear attention, whose state cannot drop a rejected token",
                where="speculation",
                remedy="turn it off for this model",
            )
        if not self.speculates_exactly:
            raise RequestError(
                f"with {type(self._runner).__name__}, the logits of a token depend on the number of tokens in"
                " the step, so speculation would change samples",
                where="speculation",
                remedy="turn it off, or sample on a CPU from a model that Perilune computes itself",
            )
        self._speculation = settings
        self._draft = self._make_draft()
        self._open()

    @property
    def speculates_exactly(self) -> bool:
        """Whether `speculate` is possible: not with linear attention, whose states cannot be rolled back."""
        return not self._has_states and splits_exactly(self._runner)

    @property
    def _has_states(self) -> bool:
        """Whether the model has linear attention."""
        return getattr(self._config, "delta", None) is not None

    def _make_draft(self) -> Runner | None:
        settings = self._speculation
        if settings is None or settings.method != "draft":
            return None
        place = DraftPlace(self._runner, self._source, max(self._num_blocks), self.positions)
        return draft_runner(settings.draft, place)

    def _speculate(self) -> Speculation | None:
        settings = self._speculation
        if settings is None:
            return None
        proposer: Proposer = Lookup(self._sequences, settings.match)
        if self._draft is not None:
            proposer = make_draft(self._sequences, self._draft, self._source, settings.draft)
        return Speculation(self._sequences, settings, proposer, self.counters)

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request, *, stream: bool = True) -> int:
        """Queue `request` and return its id. `step` returns its samples.

        Args:
            stream: return one delta per token; otherwise one delta per sample when it has ended.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, more tokens than the model or
                the cache can hold, an unknown adapter, or stop texts without a tokenizer.
        """
        self._limits.check(request, "request")
        if request.inputs is not None and not isinstance(self._runner, TorchRunner):
            raise RequestError(
                f"{type(self._runner).__name__} cannot take input embeddings",
                where="request",
                remedy="give Engine runner=TorchRunner",
            )
        return self._enter(request, stream=stream).id

    def step(self) -> list[Delta]:
        """Compute one step of all samples in flight and return their new tokens.

        The last delta of a sample has a `finish_reason`. A request that fails, for example because its
        probabilities are not finite, ends with a delta that has a `failure`; other requests continue. An
        error of the whole step is raised and drops all requests.
        """
        self._advance()
        deltas, self._outputs.pending = self._outputs.pending, []
        return deltas

    def abort(self, request_id: int) -> list[Completion]:
        """Stop a request and free its blocks.

        Returns its unfinished samples in order, with the finish reason "aborted". `step` returns no further
        deltas of the request. For an unknown or finished request the result is empty.
        """
        entry = self._outputs.entries.get(request_id)
        if entry is None:
            return []
        rows = sorted(self._scheduler.rows_of(entry), key=self._sequences.sample.__getitem__)
        partial = [self._outputs.completion(row, "aborted") for row in rows]
        self._scheduler.remove(entry)
        self._outputs.drop(entry, rows)
        return partial

    def sampled_so_far(self, request_id: int) -> dict[int, Completion]:
        """The unfinished samples of a request that have started, by index. They continue."""
        entry = self._outputs.entries.get(request_id)
        rows = [] if entry is None else self._scheduler.rows_of(entry)
        return {int(self._sequences.sample[row]): self._outputs.so_far(row) for row in rows}

    def stream(self, request: Request) -> Iterator[Delta]:
        """Yield the deltas of `request`. Leaving the loop early aborts the request.

        Other requests in flight advance too. The next `step` returns their deltas.
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
        """Whether `step` has work to do or deltas to return."""
        return self._scheduler.unfinished or bool(self._outputs.pending)

    @property
    def positions(self) -> int:
        """Most tokens of prompt and sample together that the model and the cache can hold."""
        return self._limits.longest

    @property
    def waiting(self) -> int:
        """Requests with samples that have not started."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Samples that have started and not ended."""
        return sum(entry is not None for entry in self._sequences.entries)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds, in the layers that see all of them."""
        return self._limits.cache_tokens

    @property
    def cache_use(self) -> float:
        """Share of the cache that samples in flight use; with several window sizes, of the fullest pool."""
        return self._pools.use

    @property
    def offloaded(self) -> OffloadCounters:
        """What was offloaded and loaded; all 0 without offloading."""
        return OffloadCounters() if self._offload is None else self._offload.counters

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

        `on_progress(finished, total)` is called after every step with counts of samples. Samples that finish
        with "stop" match the `constraint`.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the model or
                the cache can hold.
            WorkFailedError: when the model's probabilities are not finite.
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
        """Log-probs float32[T] of each `token_ids[i]` after `prompt_ids[i]`, with the named adapter if given.

        They equal those of `sample`. Scoring uses free blocks; samples in flight may be preempted, which does
        not change them.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the model or
                the cache can hold.
        """
        pairs = []
        for index, (prompt, answer) in enumerate(zip(prompt_ids, token_ids, strict=True)):
            self._limits.check_tokens(prompt, len(answer), f"prompt {index}")
            self._limits.check_tokens([*prompt[:1], *answer], 0, f"answer {index}")
            pairs.append(Pair(np.array([*prompt, *answer], dtype=np.int64), len(answer), self._block_size))
        number = self._adapters.number(adapter, "score")
        return [one for batch in self._scored(pairs, temperature, number) for one, _ in batch]

    def prompt_logprobs(
        self, token_ids: Sequence[Sequence[int]], top: int = 0, adapter: str | None = None
    ) -> Iterator[list[PromptLogprobs]]:
        """Log-probs float32[T - 1] of texts of T tokens, and the `top` most likely tokens of each place.

        The first token has none. Each step of the iterator computes a bounded number of tokens and returns
        the texts that are complete. `step` may be called in between, and does not depend on it.

        Raises:
            RequestError: as `score`.
        """
        pairs = []
        for index, text in enumerate(token_ids):
            self._limits.check_tokens(text, 0, f"prompt {index}")
            pairs.append(Pair(np.array(text, dtype=np.int64), len(text) - 1, self._block_size))
        number = self._adapters.number(adapter, "score")
        with self._adapters.pinned(number):
            yield from self._scored(pairs, 1.0, number, top)

    def _scored(
        self, pairs: Sequence[Pair], temperature: float, adapter: int, top: int = 0
    ) -> Iterator[list[PromptLogprobs]]:
        rows = max(1, MOST_LOGITS // self._config.vocab_size)
        bounds = Bounds(self._score_tokens, min(self._num_blocks) - 1, rows, self._token_budget)
        for batch in in_batches(pairs, bounds):
            blocks = self._scheduler.allocate_temporarily(sum(pair.blocks for pair in batch))
            logprobs, likely = [], TopLogprobs()
            try:
                for step, targets in lay_out(batch, blocks, adapter, bounds):
                    logits = self._runner.run(step)
                    of_targets = torch.from_numpy(targets).to(logits.device)
                    logprobs.append(token_logprobs(logits, of_targets, temperature)[0].cpu().numpy())
                    likely += most_likely(logits, top) if top else ()
            finally:
                self._pools.free_temporary(blocks)
            together = np.concatenate(logprobs)
            places = itertools.pairwise(itertools.accumulate((pair.answer for pair in batch), initial=0))
            yield [(together[start:end], likely[start:end]) for start, end in places]

    def prepare_embeddings(self) -> None:
        """Prepare a runner for `embed`. This may copy the weights once more.

        Raises:
            RequestError: when the runner computes no hidden states.
        """
        self._in_torch()

    def embed(
        self, token_ids: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None = None
    ) -> Iterator[list[NDArray[np.float32]]]:
        """The embeddings float32[d] of texts, of length 1: hidden states of the last layer, pooled.

        Each step of the iterator computes a bounded number of tokens and returns the embeddings that are
        complete. `step` may be called in between, and does not depend on it.

        Raises:
            RequestError: on an empty text, a token outside the vocabulary, more tokens than the model or the
                cache can hold, or when the runner computes no hidden states.
        """
        for index, text in enumerate(token_ids):
            self._limits.check_tokens(text, 0, f"text {index}")
        number = self._adapters.number(adapter, "embed")
        with self._adapters.pinned(number):
            yield from embeddings(self._in_torch, token_ids, pooling, number)

    def _in_torch(self) -> TorchRunner:
        if not isinstance(self._runner, HiddenRunner):
            raise RequestError(
                f"{type(self._runner).__name__} computes no hidden states",
                remedy="use a model that Perilune computes itself, and an engine that is awake",
            )
        return self._runner.in_torch(self._source)

    # -- weights -----------------------------------------------------------------------------------------

    def update_weights(
        self, state: Mapping[str, Tensor] | None, version: int, *, recompute: bool = True
    ) -> None:
        """Use new weights as policy `version`: `state`, or the current weights of the decoder if None.

        `state` is loaded into the decoder. May be called between two steps, also from `on_progress`: each
        token records the version that sampled it.

        Args:
            recompute: recompute the keys and values of samples in flight, which then continue exactly as if
                they had started with the new weights and their tokens so far. Otherwise they continue at once
                on the old keys and values, and log-probs are those of the mixture.

        Raises:
            RequestError: when names or shapes differ from the decoder's. Nothing has changed then.
        """
        if state is not None:
            check_state(state, self._source)
            self._source.load_state_dict(state)
        with self._source.in_memory():
            self._runner.load_weights(self._source)
            if self._draft is not None and self._speculation is not None and self._speculation.draft is None:
                self._draft.load_weights(self._source)
            self.checksum = checksum(self._source.state_dict())
        self.version = version
        self._scheduler.new_weights(version, recompute=recompute)

    def prepare_adapters(self) -> None:
        """Prepare a runner for adapters. This may copy the weights once more.

        Raises:
            RequestError: when the runner cannot apply adapters.
        """
        if not isinstance(self._runner, AdaptingRunner):
            raise RequestError(f"{type(self._runner).__name__} cannot apply adapters", where="adapter")
        entries = self._outputs.entries.values()
        self._runner.load_adapters(self._adapters.loaded(entry.adapter for entry in entries), self._source)

    def check_adapter(self, adapter: Adapter) -> None:
        """Check that an adapter fits the decoder. Another thread may do this while the engine samples.

        Raises:
            RequestError: when it does not fit, or adapts experts, whose rows are not those of the step.
        """
        expert = next((name for name in adapter.pairs if ".experts." in name), None)
        if expert is not None:
            raise RequestError(
                "adapters of experts cannot be applied to single requests",
                where=f"adapter, {expert}",
                remedy="merge the adapter into the model, or train one without experts' maps",
            )
        with self._source.in_memory():
            adapter.check(self._source)

    def add_adapter(self, name: str, adapter: Adapter, *, checked: bool = False) -> None:
        """Add a LoRA adapter that requests can name, or replace the one of this name.

        Requests that were added before keep the older adapter.

        Args:
            checked: whether `check_adapter` has accepted it.

        Raises:
            RequestError: when the adapter does not fit the decoder, or the runner cannot apply adapters.
        """
        if not checked:
            self.check_adapter(adapter)
        self.prepare_adapters()
        self._adapters.add(name, adapter)
        self.prepare_adapters()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Its requests keep it; its memory is freed at the next change after the last one.

        Raises:
            RequestError: when there is none of this name.
        """
        self._adapters.number(name, "remove_adapter")
        self._adapters.remove(name)
        self.prepare_adapters()

    # -- memory ------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Empty the prefix cache; `recompute` also recomputes the keys and values of samples in flight."""
        self._scheduler.new_weights(self.version, recompute=recompute)

    def sleep(self) -> None:
        """Free the cache and the runner's copy of the weights, until `wake_up`.

        Meanwhile requests can be added but no step computed. Samples in flight are recomputed afterwards.
        `update_weights` takes effect when the engine wakes up.

        Raises:
            RequestError: when the engine records routes, which it would lose.
        """
        if self._routes is not None:
            raise RequestError("an engine that records routes cannot sleep")
        self.reset_prefix_cache(recompute=True)
        self._runner = SleepingRunner()
        self._draft = self._scheduler.speculation = None

    def wake_up(self) -> None:
        """Allocate the cache again and copy the decoder's weights, unless the engine is awake."""
        if not isinstance(self._runner, SleepingRunner):
            return
        self._runner = self._make_runner(self._source, self._num_blocks)
        if self._adapters:
            self.prepare_adapters()
        if self._offload is not None:
            self._offload.attach(block_contents(self._runner))
        self._draft = self._make_draft()
        self._scheduler.speculation = self._speculate()

    # -- a step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        """Schedule, run, sample and commit one step."""
        if isinstance(self._runner, SleepingRunner):
            raise sleeping()
        try:
            step = self._scheduler.schedule()
            if step is None:
                return
            logits = self._run(step)
            if step.proposals and not logits[:, 0].isfinite().all():
                self._stop_speculating()
                return
            drawn = self._draw(logits, step.rows, step.logits_of)
            sources, targets = self._scheduler.commit(step, drawn.token_ids, drawn.logprobs, self.version)
            if sources.size:
                self._runner.copy_blocks(sources, targets)
            if self._deliver(step.rows, drawn) and step.proposals:
                self._verify(step.proposals, logits)
        except BaseException:
            self._reset()
            raise

    def _draw(self, logits: Tensor, rows: Rows, logits_of: NDArray[np.int64] | None) -> Drawn:
        return self._sampler.draw(logits, rows, logits_of, self._outputs.masks(rows))

    def _deliver(self, rows: Rows, drawn: Drawn) -> bool:
        """Return the drawn tokens to the callers; whether all of them are finite."""
        finite = np.isfinite(drawn.logprobs)
        if not finite.all():
            self._outputs.failures |= dict.fromkeys(rows[~finite].tolist(), self._not_finite())
        for row in self._outputs.process(rows, drawn, self.version):
            self._scheduler.release(row, record=True)
        if self._outputs.failures:
            self._drop_failed()
        if not finite.all():
            self._clear()
        return bool(finite.all())

    def _clear(self) -> None:
        """Zero the cache: values that are not finite would spoil the next samples in their blocks."""
        self._scheduler.new_weights(self.version, recompute=True)
        self._runner.clear()

    def _stop_speculating(self) -> None:
        """Repeat the step without draft tokens: a result that is not finite may have spoiled the others."""
        _log.warning("speculation is off: the model's results are not finite, perhaps for a draft token")
        self._scheduler.speculation = None
        self._clear()

    def _verify(self, proposals: Sequence[Proposal], logits: Tensor) -> None:
        """Draw the next token after each accepted draft token."""
        assert self._scheduler.speculation is not None
        accepts = self._scheduler.speculation.accepts
        for at in itertools.count():
            proposals = [proposal for proposal in proposals if accepts(proposal, at)]
            if not proposals:
                return
            rows = np.array([proposal.row for proposal in proposals])
            logits_of = np.array([proposal.logits + at + 1 for proposal in proposals])
            drawn = self._draw(logits, rows, logits_of)
            self._scheduler.append(rows, drawn.token_ids, drawn.logprobs, self.version)
            if not self._deliver(rows, drawn):
                return

    def _run(self, step: Step) -> Tensor:
        """The logits of a step, -inf for ids that are no tokens."""
        logits = self._timed_run(step)
        if self._token_count is not None:
            logits[:, self._token_count :] = -torch.inf
        return logits

    def _timed_run(self, step: Step) -> Tensor:
        if self._offload is None:
            return self._runner.run(step.batch)
        began = perf_counter()
        logits = self._runner.run(step.batch)
        fed = sum(count for _, count in step.chunks)
        self._offload.computed(fed, len(step.batch.token_ids) - fed, perf_counter() - began)
        return logits

    def _drop_failed(self) -> None:
        """Drop the requests of failed samples."""
        failures, self._outputs.failures = self._outputs.failures, {}
        for row, failure in failures.items():
            entry = self._sequences.entries[row]
            if entry is not None:  # not yet dropped for another sample
                self._outputs.fail(entry, row, self._scheduler.rows_of(entry), failure)
                self._scheduler.remove(entry)

    def _not_finite(self) -> WorkFailedError:
        return WorkFailedError(
            "the model's probabilities are not finite",
            where=f"sampling, policy version {self.version}",
            remedy="training diverged: lower the learning rate, or start from an earlier checkpoint",
        )

    def _reset(self) -> None:
        self._runner.clear()
        if self._draft is not None:
            self._draft.clear()
        self._open()

    def restart(self) -> None:
        """Restart after a failure with no requests and an empty cache, and sample one token as a test.

        Raises:
            Exception: the failure, if it persists.
        """
        self._reset()
        self.sample([Prompt([0], (0, 0, 0))], 1, SamplingParams(max_tokens=1, temperature=0))
