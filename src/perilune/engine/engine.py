"""The engine samples with continuous batching, exactly and reproducibly.

In one step, the scheduler chooses tokens, the runner computes logits, the sampler draws, and the scheduler
records the result. The rest of this module adds and removes requests and updates weights.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.adapters import NamedAdapters
from perilune.engine.blocks import BLOCK, blocks_for
from perilune.engine.constraints import Constraint
from perilune.engine.drafting import make_draft, make_draft_runner
from perilune.engine.embedding import Pooling, compute_embeddings
from perilune.engine.limits import EngineLimits, check_state_dict, default_cache_tokens
from perilune.engine.offload import OffloadCounters, OffloadSettings, OffloadStore
from perilune.engine.outputs import Collection, OutputProcessor
from perilune.engine.pools import BlockPools
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams, TopLogprobs
from perilune.engine.routes import RouteStore
from perilune.engine.runner import (
    AdapterRunner,
    HiddenStateRunner,
    Runner,
    SleepingRunner,
    TorchRunner,
    offloadable_cache,
    record_routes_of,
    sleeping_error,
)
from perilune.engine.sampler import DrawnTokens, Sampler
from perilune.engine.scheduler import Scheduler
from perilune.engine.scoring import (
    MAX_LOGITS,
    PromptLogprobs,
    ScoringPair,
    StepLimits,
    make_steps,
    split_batches,
    top_tokens,
)
from perilune.engine.select_runner import fastest_runner, is_split_invariant
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.engine.speculation import PromptLookup, Proposer, Speculation, SpeculationSettings
from perilune.engine.step import Counters, Proposal, Step
from perilune.errors import RequestError, WorkFailedError
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.checksum import checksum
from perilune.models.checkpoints.stored import StoredDecoder
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import DEFAULT_TOKEN_BUDGET, window_blocks
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import TransformersModel

_log = logging.getLogger(__name__)


class Engine:
    """Samples from one decoder, and computes log-probs of given tokens.

    Not thread-safe.

    Args:
        decoder: the model, on its device and in its dtype. The engine copies the weights now and in every
            `update_weights`, so training does not change the weights of a version. A `TransformersModel` is
            not copied.
        slots: maximum number of samples in flight.
        cache_tokens: size of the KV cache in tokens of all samples, rounded up to whole blocks. By default
            enough for `slots` samples of maximum length, but at most 4 GiB.
        token_budget: maximum number of tokens computed in one step, at least 2 * `slots`. Longer prompts are
            split into chunks.
        score_tokens: maximum number of tokens of one scoring batch.
        tokenizer: required for stop texts and for the text of deltas.
        runner: creates the runner from the decoder and the number of blocks for each of its
            `distinct_windows`. If this function has an attribute `block_size`, a block holds that many tokens
            instead of 16.

    Attributes:
        version: policy version of the weights.
        checksum: checksum of the weights of the last `update_weights`; "" before the first.
        counters: counts since the engine was created.
    """

    def __init__(
        self,
        decoder: Decoder | TransformersModel,
        *,
        slots: int = 256,
        cache_tokens: int | None = None,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
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
        self._start_empty()

    def _start_empty(self) -> None:
        """Start with no requests and an empty cache."""
        windows = self._config.distinct_windows
        self._sequences = Sequences(self._slots, self._config.vocab_size, len(windows), self._block_size)
        self._pools = BlockPools(self._num_blocks, windows, store=self._offload, block_size=self._block_size)
        self._scheduler = Scheduler(self._sequences, self._pools, self._token_budget, self.counters)
        self._scheduler.version = self.version
        self._scheduler.speculation = self._make_speculation()
        self._sampler = Sampler(self._sequences)
        self._outputs = OutputProcessor(self._sequences, self._tokenizer, self._routes)

    def _enqueue(
        self, request: Request, collection: Collection | None = None, *, stream: bool = False
    ) -> Entry:
        adapter = self._adapters.find_number(request.adapter, "request")
        entry = Entry(self._next_id, request, np.array(request.token_ids, dtype=np.int32), request.n, adapter)
        self._next_id += 1
        self._outputs.register(entry, collection, stream=stream)
        self._scheduler.add(entry)
        return entry

    def limit_tokens(self, count: int) -> None:
        """Sample only ids below `count`. Published models often have more embedding rows than tokens."""
        self._token_count = count

    def record_routes(self) -> None:
        """Return with each sample the experts that computed its tokens. Call it before the first request.

        Raises:
            RequestError: for a dense model, or a runner that cannot record.
        """
        self._routes = record_routes_of(self._runner)
        self._start_empty()

    def offload(self, settings: OffloadSettings) -> None:
        """Offload blocks that the prefix cache evicts. Call it before the first request.

        Raises:
            RequestError: for a runner whose cache cannot be read.
        """
        self._offload = OffloadStore(settings, offloadable_cache(self._runner))
        self._start_empty()

    def speculate(self, settings: SpeculationSettings) -> None:
        """Turn on speculative decoding. Call it before the first request.

        All samples stay the same, bit for bit.

        Raises:
            RequestError: for a runner whose logits depend on the division of a sequence into steps, for
                linear attention, or for a draft that does not fit the model.
        """
        if self._has_linear_attention:
            raise RequestError(
                "the model has linear attention, whose state cannot drop a rejected token",
                where="speculation",
                remedy="turn speculation off for this model",
            )
        if not self.speculates_exactly:
            raise RequestError(
                f"with {type(self._runner).__name__}, the logits of a token depend on the number of tokens in"
                " the step, so speculation would change samples",
                where="speculation",
                remedy="turn speculation off, or sample on a CPU from a model that Perilune computes itself",
            )
        self._draft = self._make_draft(settings)
        self._speculation = settings
        self._start_empty()

    @property
    def speculates_exactly(self) -> bool:
        """True if `speculate` is possible: not with linear attention, whose state cannot be rolled back."""
        return not self._has_linear_attention and is_split_invariant(self._runner)

    @property
    def _has_linear_attention(self) -> bool:
        return getattr(self._config, "delta", None) is not None

    def _make_draft(self, settings: SpeculationSettings | None) -> Runner | None:
        if settings is None or settings.method != "draft":
            return None
        num_blocks = max(self._num_blocks)
        return make_draft_runner(settings.draft, self._runner, self._source, num_blocks, self.positions)

    def _make_speculation(self) -> Speculation | None:
        settings = self._speculation
        if settings is None:
            return None
        proposer: Proposer = PromptLookup(self._sequences, settings.match)
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
        if request.inputs is not None and not getattr(self._runner, "takes_inputs", False):
            raise RequestError(
                f"{type(self._runner).__name__} cannot take input embeddings",
                where="request",
                remedy="give Engine runner=TorchRunner",
            )
        return self._enqueue(request, stream=stream).id

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

        Return its unfinished samples in order, with the finish reason "aborted". `step` returns no further
        deltas of the request. For an unknown or finished request the result is empty.
        """
        entry = self._outputs.entries.get(request_id)
        if entry is None:
            return []
        rows = sorted(self._scheduler.rows_of(entry), key=self._sequences.sample.__getitem__)
        partial = [self._outputs.make_completion(row, "aborted") for row in rows]
        self._scheduler.remove(entry)
        self._outputs.drop(entry, rows)
        return partial

    def sampled_so_far(self, request_id: int) -> dict[int, Completion]:
        """Return the started, unfinished samples of a request so far, by index. Sampling continues."""
        entry = self._outputs.entries.get(request_id)
        rows = [] if entry is None else self._scheduler.rows_of(entry)
        return {int(self._sequences.sample[row]): self._outputs.partial_completion(row) for row in rows}

    def stream(self, request: Request) -> Iterator[Delta]:
        """Yield the deltas of `request`. Leaving the loop early aborts the request.

        Other requests in flight advance too. The next `step` returns their deltas.
        """
        request_id = self.add(request)
        try:
            while request_id in self._outputs.entries:
                deltas = self.step()
                self._outputs.pending = [delta for delta in deltas if delta.request_id != request_id]
                for delta in (delta for delta in deltas if delta.request_id == request_id):
                    if delta.failure is not None:
                        raise delta.failure
                    yield delta
        finally:
            self.abort(request_id)

    @property
    def unfinished(self) -> bool:
        """True if `step` has work to do or deltas to return."""
        return self._scheduler.unfinished or bool(self._outputs.pending)

    @property
    def positions(self) -> int:
        """Maximum number of tokens of prompt and sample together, limited by the model and the cache."""
        return self._limits.max_sequence_tokens

    @property
    def waiting(self) -> int:
        """Number of requests with samples that have not started."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Number of samples that have started and not ended."""
        return sum(entry is not None for entry in self._sequences.entries)

    @property
    def cache_tokens(self) -> int:
        """Capacity of the cache in tokens, in the layers without a window."""
        return self._limits.cache_tokens

    @property
    def cache_use(self) -> float:
        """Share of the cache that samples in flight use; that of the fullest pool if there are several."""
        return self._pools.used_share

    @property
    def offloaded(self) -> OffloadCounters:
        """Counts of offloaded and loaded blocks; all 0 without offloading."""
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
            Request(prompt.token_ids, params, prompt.key, n, prompt.position, constraint=constraint)
            for prompt in prompts
        ]
        for index, request in enumerate(requests):
            self._limits.check(request, f"prompt {index}")
        collection = Collection(len(requests) * n)
        total = collection.unfinished
        if total:
            for request in requests:
                self._enqueue(request, collection)
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
        """Return log-probs float32[T] of each `token_ids[i]` after `prompt_ids[i]`.

        They equal the log-probs of `sample`. Scoring needs free blocks and may preempt samples in flight,
        which does not change these samples.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the model or
                the cache can hold.
        """
        pairs = []
        for index, (prompt, answer) in enumerate(zip(prompt_ids, token_ids, strict=True)):
            self._limits.check_tokens(prompt, len(answer), f"prompt {index}")
            self._limits.check_tokens([*prompt[:1], *answer], 0, f"answer {index}")
            tokens = np.array([*prompt, *answer], dtype=np.int64)
            pairs.append(ScoringPair(tokens, len(answer), self._block_size))
        number = self._adapters.find_number(adapter, "score")
        return [logprobs for batch in self._score_pairs(pairs, temperature, number) for logprobs, _ in batch]

    def prompt_logprobs(
        self, token_ids: Sequence[Sequence[int]], top: int = 0, adapter: str | None = None
    ) -> Iterator[list[PromptLogprobs]]:
        """Yield log-probs float32[T - 1] of texts of T tokens, and the `top` most likely tokens by position.

        The first token has no log-prob. Each iteration computes a bounded number of tokens and yields the
        results that are complete. `step` may be called between iterations, and does not depend on them.

        Raises:
            RequestError: as `score`.
        """
        pairs = []
        for index, text in enumerate(token_ids):
            self._limits.check_tokens(text, 0, f"prompt {index}")
            pairs.append(ScoringPair(np.array(text, dtype=np.int64), len(text) - 1, self._block_size))
        number = self._adapters.find_number(adapter, "prompt_logprobs")
        with self._adapters.pin(number):
            yield from self._score_pairs(pairs, 1.0, number, top)

    def _score_pairs(
        self, pairs: Sequence[ScoringPair], temperature: float, adapter: int, top: int = 0
    ) -> Iterator[list[PromptLogprobs]]:
        rows = max(1, MAX_LOGITS // self._config.vocab_size)
        limits = StepLimits(self._score_tokens, min(self._num_blocks) - 1, rows, self._token_budget)
        for batch in split_batches(pairs, limits):
            blocks = self._scheduler.allocate_temporarily(sum(pair.blocks for pair in batch))
            logprobs, likely = [], TopLogprobs()
            try:
                for step, targets in make_steps(batch, blocks, adapter, limits):
                    logits = self._runner.run(step)
                    target_ids = torch.from_numpy(targets).to(logits.device)
                    logprobs.append(token_logprobs(logits, target_ids, temperature)[0].cpu().numpy())
                    likely += top_tokens(logits, top) if top else ()
            finally:
                self._pools.free_temporary(blocks)
            joined = np.concatenate(logprobs)
            bounds = itertools.accumulate((pair.answer_tokens for pair in batch), initial=0)
            yield [(joined[start:end], likely[start:end]) for start, end in itertools.pairwise(bounds)]

    def prepare_embeddings(self) -> None:
        """Prepare a runner for `embed`. This may copy the weights once more.

        Raises:
            RequestError: when the runner computes no hidden states.
        """
        self._torch_runner()

    def embed(
        self, token_ids: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None = None
    ) -> Iterator[list[NDArray[np.float32]]]:
        """Yield the embeddings float32[d] of texts: pooled hidden states of the last layer, of unit length.

        Each iteration computes a bounded number of tokens and yields the embeddings that are complete. `step`
        may be called between iterations, and does not depend on them.

        Raises:
            RequestError: on an empty text, a token outside the vocabulary, more tokens than the model or the
                cache can hold, or when the runner computes no hidden states.
        """
        for index, text in enumerate(token_ids):
            self._limits.check_tokens(text, 0, f"text {index}")
        number = self._adapters.find_number(adapter, "embed")
        with self._adapters.pin(number):
            yield from compute_embeddings(self._torch_runner, token_ids, pooling, number)

    @torch.inference_mode(False)  # may copy weights, which `update_weights` overwrites later
    def _torch_runner(self) -> TorchRunner:
        if not isinstance(self._runner, HiddenStateRunner):
            raise RequestError(
                f"{type(self._runner).__name__} computes no hidden states",
                remedy="use a model that Perilune computes itself, and an engine that is awake",
            )
        return self._runner.as_torch_runner(self._source)

    # -- weights -----------------------------------------------------------------------------------------

    def update_weights(
        self, state: Mapping[str, Tensor] | None, version: int, *, recompute: bool = True
    ) -> None:
        """Load `state` into the decoder, and sample from it as policy `version`.

        May be called between two steps, also from `on_progress`: each token records the version that sampled
        it.

        Args:
            state: the new weights; None for the current weights of the decoder.
            recompute: recompute the keys and values of samples in flight, which then continue exactly as if
                they had started with the new weights and their tokens so far. Otherwise the new weights read
                the keys and values of the old weights, and the log-probs are those of this mixture.

        Raises:
            RequestError: when names or shapes differ from the decoder's. Nothing has changed then.
        """
        if state is not None:
            check_state_dict(state, self._source)
            self._source.load_state_dict(state)
        with self._source.in_memory():
            self._runner.load_weights(self._source)
            if self._draft is not None and self._speculation is not None and self._speculation.draft is None:
                self._draft.load_weights(self._source)
            self.checksum = checksum(self._source.state_dict())
        self.version = version
        self._scheduler.switch_weights(version, recompute=recompute)

    def prepare_adapters(self) -> None:
        """Prepare a runner for adapters. This may copy the weights once more.

        Raises:
            RequestError: when the runner cannot apply adapters.
        """
        if not isinstance(self._runner, AdapterRunner):
            raise RequestError(
                f"{type(self._runner).__name__} cannot apply adapters",
                where="adapter",
                remedy="use a model that Perilune computes itself, without OpenVINO",
            )
        in_use = (entry.adapter for entry in self._outputs.entries.values())
        self._runner.load_adapters(self._adapters.drop_unused(in_use), self._source)

    def check_adapter(self, adapter: Adapter) -> None:
        """Check that an adapter fits the decoder. Another thread may call this while the engine samples.

        Raises:
            RequestError: when the adapter does not fit, or has matrices for experts. An expert computes only
                the rows that the router sends to it, so adapters cannot be selected by row of the step.
        """
        expert = next((name for name in adapter.pairs if ".experts." in name), None)
        if expert is not None:
            raise RequestError(
                "an adapter with matrices for experts cannot be applied to single requests",
                where=f"adapter, {expert}",
                remedy="merge the adapter into the model, or train one that leaves the experts out",
            )
        # The adapter's checksum of its base was computed in float32.
        base = self._source.widened() if isinstance(self._source, StoredDecoder) else self._source
        with base.in_memory():
            adapter.check(base)

    def add_adapter(self, name: str, adapter: Adapter, *, checked: bool = False) -> None:
        """Add a LoRA adapter that requests can select by `name`, or replace the adapter of this name.

        Requests that were added earlier keep the old adapter.

        Args:
            checked: whether `check_adapter` has accepted the adapter.

        Raises:
            RequestError: when the adapter does not fit the decoder, or the runner cannot apply adapters.
        """
        if not checked:
            self.check_adapter(adapter)
        self.prepare_adapters()
        self._adapters.add(name, adapter)
        self.prepare_adapters()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that use it keep it until they end.

        Raises:
            RequestError: when no adapter has this name.
        """
        self._adapters.find_number(name, "remove_adapter")
        self._adapters.remove(name)
        self.prepare_adapters()

    # -- memory ------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Empty the prefix cache; with `recompute`, also recompute the cached tokens of samples in flight."""
        self._scheduler.switch_weights(self.version, recompute=recompute)

    def sleep(self) -> None:
        """Free the cache and the runner's copy of the weights, until `wake_up`.

        A sleeping engine accepts requests, but `step` raises an error. After `wake_up`, samples in flight are
        recomputed, with the weights of the last `update_weights`.

        Raises:
            RequestError: when the engine records routes, because it would lose them.
        """
        if self._routes is not None:
            raise RequestError(
                "an engine that records routes cannot sleep", remedy="turn off sleep or routing replay"
            )
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
            self._offload.replace_cache(offloadable_cache(self._runner))
        self._draft = self._make_draft(self._speculation)
        self._scheduler.speculation = self._make_speculation()

    # -- a step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        """Schedule, run, sample and commit one step."""
        if isinstance(self._runner, SleepingRunner):
            raise sleeping_error()
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

    def _draw(self, logits: Tensor, rows: Rows, logits_of: NDArray[np.int64] | None) -> DrawnTokens:
        return self._sampler.draw(logits, rows, logits_of, self._outputs.make_masks(rows))

    def _deliver(self, rows: Rows, drawn: DrawnTokens) -> bool:
        """Add the drawn tokens to the outputs of their requests; return whether all log-probs are finite."""
        finite = np.isfinite(drawn.logprobs)
        if not finite.all():
            self._outputs.failures |= dict.fromkeys(rows[~finite].tolist(), self._not_finite_error())
        for row in self._outputs.process(rows, drawn, self.version):
            self._scheduler.release(row, cache_blocks=True)
        if self._outputs.failures:
            self._drop_failed()
        if not finite.all():
            self._clear_cache()
        return bool(finite.all())

    def _clear_cache(self) -> None:
        """Zero the cache, because non-finite values would spoil the next samples in their blocks."""
        self._scheduler.switch_weights(self.version, recompute=True)
        self._runner.clear()

    def _stop_speculating(self) -> None:
        """Turn speculation off and clear the cache, because draft tokens may have spoiled other results."""
        _log.warning("speculation is off: the model's results are not finite, perhaps for a draft token")
        self._scheduler.speculation = None
        self._clear_cache()

    def _verify(self, proposals: Sequence[Proposal], logits: Tensor) -> None:
        """Draw the next token after each accepted draft token."""
        assert self._scheduler.speculation is not None
        check_draft = self._scheduler.speculation.check_draft
        for accepted in itertools.count():
            proposals = [proposal for proposal in proposals if check_draft(proposal, accepted)]
            if not proposals:
                return
            rows = np.array([proposal.row for proposal in proposals])
            logits_of = np.array([proposal.logits + accepted + 1 for proposal in proposals])
            drawn = self._draw(logits, rows, logits_of)
            self._scheduler.append(rows, drawn.token_ids, drawn.logprobs, self.version)
            if not self._deliver(rows, drawn):
                return

    def _run(self, step: Step) -> Tensor:
        """Compute the logits of a step; -inf for ids that are not tokens."""
        logits = self._timed_run(step)
        if self._token_count is not None:
            logits[:, self._token_count :] = -torch.inf
        return logits

    def _timed_run(self, step: Step) -> Tensor:
        if self._offload is None:
            return self._runner.run(step.batch)
        began = self._offload.seconds()
        logits = self._runner.run(step.batch)
        prefills = sum(count for _, count in step.chunks)
        decodes = len(step.batch.token_ids) - prefills
        self._offload.record_compute_time(prefills, decodes, self._offload.seconds() - began)
        return logits

    def _drop_failed(self) -> None:
        """Report the errors in `failures`, and drop the requests that they belong to."""
        failures, self._outputs.failures = self._outputs.failures, {}
        for row, failure in failures.items():
            entry = self._sequences.entries[row]
            if entry is not None:  # not yet dropped for another sample
                self._outputs.fail(entry, row, self._scheduler.rows_of(entry), failure)
                self._scheduler.remove(entry)

    def _not_finite_error(self) -> WorkFailedError:
        return WorkFailedError(
            "the model's probabilities are not finite",
            where=f"sampling, policy version {self.version}",
            remedy="training diverged: lower the learning rate, or start from an earlier checkpoint",
        )

    def _reset(self) -> None:
        self._runner.clear()
        if self._draft is not None:
            self._draft.clear()
        self._start_empty()

    def restart(self) -> None:
        """Restart after a failure with no requests and an empty cache, and sample one token as a test.

        Raises:
            Exception: the failure, if it persists.
        """
        self._reset()
        self.sample([Prompt([0], (0, 0, 0))], 1, SamplingParams(max_tokens=1, temperature=0))
