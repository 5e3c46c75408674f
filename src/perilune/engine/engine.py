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

from perilune.data.episode import FinishReason
from perilune.engine.adapters import Adapter
from perilune.engine.blocks import BLOCK, BlockPool, blocks_for
from perilune.engine.constraints import Constraint, ConstraintState
from perilune.engine.following import Followed, needs_following
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams
from perilune.engine.runner import AdaptingRunner, Runner
from perilune.engine.runners import fastest_runner
from perilune.engine.sampler import Drawn, Sampler
from perilune.engine.scheduler import Counters, Scheduler, Step, StepBatch
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.errors import RequestError, WorkFailedError
from perilune.models.checksum import checksum
from perilune.models.config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import card_of
from perilune.models.tokenizer import Tokenizer
from perilune.models.transformers_model import ModelShape, TransformersModel

CACHE_BYTES = 4 << 30
"""Room for keys and values when nothing else is said; on a CPU only what is used is taken."""

_SCORED_LOGITS = 1 << 26  # most logits held while scoring


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
        runner: makes what computes the steps, from the decoder and a number of blocks.

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
        token_budget: int = 4096,
        score_tokens: int = 16384,
        tokenizer: Tokenizer | None = None,
        runner: Callable[[Any, int], Runner] = fastest_runner,
    ) -> None:
        self._source: Any = decoder
        self._config = decoder.config
        self._slots, self._token_budget, self._score_tokens = (
            slots,
            max(token_budget, 2 * slots),
            score_tokens,
        )
        self._tokenizer = tokenizer
        self._num_blocks = 1 + blocks_for(cache_tokens or default_cache_tokens(decoder.config, slots))
        self._runner = runner(decoder, self._num_blocks)
        self.version = 0
        self.checksum = ""
        self.counters = Counters()
        self._adapters: list[Adapter] = []
        self._adapter_numbers: dict[str, int] = {}
        self._next_id = 0
        self._open()

    def _open(self) -> None:
        """Begin with nothing in flight and nothing cached."""
        self._sequences = Sequences(self._slots, self._config.vocab_size)
        self._pool = BlockPool(self._num_blocks)
        self._scheduler = Scheduler(
            self._sequences, self._pool, self._token_budget, self.counters, _window_of_all(self._config)
        )
        self._scheduler.version = self.version
        self._sampler = Sampler(self._sequences)
        self._entries: dict[int, Entry] = {}
        self._collections: dict[int, _Collection] = {}  # of requests whose samples are collected by `sample`
        self._following: dict[int, bool] = {}  # of requests whose samples are followed: whether as a stream
        self._followed: dict[int, Followed] = {}  # by row
        self._undelivered: list[Delta] = []

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request, *, stream: bool = True) -> int:
        """Let `request` wait for its turn, and return its id. Its samples come out of `step`.

        Args:
            stream: in pieces, a delta a token; otherwise each sample in one delta when it has ended.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, more tokens than the model has
                positions for or the cache has room for, an unknown adapter, or stop texts without tokenizer.
        """
        self._check(request, "request")
        return self._enter(request, stream=stream).id

    def step(self) -> list[Delta]:
        """Feed, and draw from, all samples in flight as far as there is room.

        Returns what they have gained. The last delta of a sample has a `finish_reason`.

        Raises:
            WorkFailedError: when the model gives no finite probabilities. Everything in flight is gone then.
        """
        self._advance()
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def abort(self, request_id: int) -> list[Completion]:
        """Drop a request at whatever point it is; its blocks are free at once.

        Returns what its unfinished samples had so far, in order, with the finish reason "aborted". No further
        deltas of it come out of `step`. An unknown or finished request is no error: nothing is returned.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return []
        rows = sorted(self._scheduler.rows_of(entry), key=self._sequences.sample.__getitem__)
        partial = [self._completion(row, "aborted") for row in rows]
        self._scheduler.remove(entry)
        for row in rows:
            self._followed.pop(row, None)
        self._collections.pop(request_id, None)
        self._following.pop(request_id, None)
        self._undelivered = [delta for delta in self._undelivered if delta.request_id != request_id]
        return partial

    def stream(self, request: Request) -> Iterator[Delta]:
        """Deltas of `request` alone, as they come. Leaving the loop early aborts it.

        Other requests in flight advance too; their deltas come out of the next `step`.
        """
        request_id = self.add(request)
        try:
            while request_id in self._entries:
                deltas = self.step()
                self._undelivered = [one for one in deltas if one.request_id != request_id]
                yield from (one for one in deltas if one.request_id == request_id)
        finally:
            self.abort(request_id)

    @property
    def unfinished(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self._scheduler.unfinished or bool(self._undelivered)

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
        """Share of the cache that samples in flight hold."""
        return self._pool.used / (self._pool.count - 1)

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
            self._check(request, f"prompt {index}")
        collection = _Collection(len(requests) * n)
        total = collection.unfinished
        if total:
            for request in requests:
                self._enter(request, collection)
        try:
            while collection.unfinished:
                self._advance()
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
        pairs = [
            (np.asarray(prompt, dtype=np.int64), np.asarray(answer, dtype=np.int64))
            for prompt, answer in zip(prompt_ids, token_ids, strict=True)
        ]
        for index, (prompt, answer) in enumerate(pairs):
            self._check_tokens(prompt, len(answer), f"prompt {index}")
        number = self._adapter_number(adapter, "score")
        scores: list[NDArray[np.float32]] = []
        most_logits = max(1, _SCORED_LOGITS // self._config.vocab_size)
        while len(scores) < len(pairs):
            batch: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
            tokens = blocks = logits = 0
            for prompt, answer in pairs[len(scores) :]:
                tokens += len(prompt) + len(answer)
                blocks += blocks_for(len(prompt) + len(answer))
                logits += len(answer)
                over = tokens > self._score_tokens or logits > most_logits or blocks >= self._num_blocks
                if batch and over:
                    break
                batch.append((prompt, answer))
            scores += self._score_packed(batch, temperature, number)
        return scores

    def _score_packed(
        self, pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], temperature: float, adapter: int
    ) -> list[NDArray[np.float32]]:
        tokens = np.concatenate([part for pair in pairs for part in pair])
        answers = np.array([len(answer) for _, answer in pairs])
        lengths = answers + [len(prompt) for prompt, _ in pairs]
        ends = np.cumsum(lengths)
        counts = -(-lengths // BLOCK)
        tables = np.zeros((len(pairs), int(counts.max())), dtype=np.int32)
        blocks = self._scheduler.lend(int(counts.sum()))
        tables[np.arange(tables.shape[1]) < counts[:, None]] = blocks
        before = np.concatenate(
            [np.arange(end - count, end) - 1 for end, count in zip(ends, answers, strict=True)]
        )
        batch = StepBatch(
            token_ids=tokens,
            positions=np.concatenate([np.arange(length) for length in lengths]),
            cu_seqlens=np.array([0, *ends]),
            decodes=0,
            block_tables=tables,
            logit_rows=before,
            adapters=None if adapter < 0 else np.full(len(pairs), adapter, dtype=np.int32),
        )
        try:
            logits = self._runner.run(batch)
        finally:
            self._pool.release(blocks)
        targets = torch.from_numpy(tokens[before + 1]).to(logits.device)
        logprobs, _ = token_logprobs(logits, targets, temperature)
        return np.split(logprobs.cpu().numpy(), np.cumsum(answers)[:-1])

    # -- weights -----------------------------------------------------------------------------------------

    def update_weights(
        self, state: Mapping[str, Tensor] | None, version: int, *, recompute: bool = True
    ) -> None:
        """Take `state`, or when None what the decoder given at first now holds, as policy `version`.

        `state` has the decoder's own names and is loaded into it; from another process it comes by
        `SharedWeights.read`. May be called between two steps (also from `on_progress`): every token says
        which version sampled it.

        Args:
            recompute: compute again what samples in flight have so far, so that they go on exactly as if they
                began anew with the new weights and these tokens. Otherwise they go on at once, on keys and
                values that the old weights left; log-probs are then of that mixture.

        Raises:
            RequestError: when names or shapes are not the decoder's; nothing has changed then.
        """
        if state is not None:
            _check_state(state, self._source)
            self._source.load_state_dict(state)
        self._runner.take_weights(self._source)
        self.checksum = checksum(self._source.state_dict())
        self.version = version
        self._scheduler.new_weights(version, recompute=recompute)

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Let requests name a LoRA adapter; one that had the name before goes on for those that have begun.

        Raises:
            RequestError: when it does not fit the decoder, or the runner cannot apply adapters.
        """
        adapter.check(self._source)
        if not isinstance(self._runner, AdaptingRunner):
            raise RequestError(f"{type(self._runner).__name__} cannot apply adapters", where=name)
        self._runner.take_adapters([*self._adapters, adapter], self._source)
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
        step = self._scheduler.schedule()
        if step is None:
            return
        try:
            logits = self._runner.run(step.batch)
            drawn = self._draw(logits, step)
            sources, targets = self._scheduler.commit(step, drawn.token_ids, drawn.logprobs, self.version)
            if len(sources):
                self._runner.copy_blocks(sources, targets)
            self._take_note(step.rows, drawn)
        except BaseException:
            self._runner.clear()
            self._open()
            raise

    def _draw(self, logits: Tensor, step: Step) -> Drawn:
        drawn = self._sampler.draw(logits, step.rows, step.logits_of, self._constraints(step.rows))
        if not np.isfinite(drawn.logprobs).all():
            raise WorkFailedError(
                "the model's probabilities are not finite",
                where=f"sampling, policy version {self.version}",
                remedy="the weights diverged: lower the learning rate, or start from an earlier checkpoint",
            )
        return drawn

    def _constraints(self, rows: Rows) -> dict[int, ConstraintState]:
        """By row. Samples that are followed are so from before their first token."""
        if not self._following:
            return {}
        for row in rows.tolist():
            entry = self._sequences.entries[row]
            if row not in self._followed and entry is not None and entry.id in self._following:
                self._followed[row] = Followed.begin(entry.request, self._tokenizer)
        return {row: its.constraint for row, its in self._followed.items() if its.constraint is not None}

    def _take_note(self, rows: Rows, drawn: Drawn) -> None:
        """Let go of samples that have ended, and tell what those that are followed have gained."""
        stopped = self._sequences.stopped(rows)
        ended = stopped | (self._sequences.length[rows] >= self._sequences.limit[rows])
        if self._followed:
            for index, row in enumerate(rows.tolist()):
                if row in self._followed:
                    self._follow(row, index, drawn, stopped, ended)
        if ended.any():
            for row, is_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
                self._finish(row, self._reason(row, is_stop))

    def _follow(
        self, row: int, index: int, drawn: Drawn, stopped: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> None:
        """Take the new token of a sample into account, and deliver it where deltas are wanted."""
        its, sequences = self._followed[row], self._sequences
        token = int(drawn.token_ids[index])
        may_stop = bool(sequences.length[row] >= sequences.min_length[row])
        if its.take(token, is_stop=bool(stopped[index]), may_stop=may_stop):
            stopped[index] = ended[index] = True
        if its.raw_logprobs is not None:
            its.raw_logprobs.append(drawn.raw_logprobs[index])
        if its.top_logprobs is not None:
            its.top_logprobs.append(drawn.top_logprobs[index])
        entry = sequences.entries[row]
        assert entry is not None
        if not self._following[entry.id]:
            return
        last = bool(ended[index])
        if last and its.text is not None:
            its.text.finish()
        self._undelivered.append(
            Delta(
                entry.id,
                int(sequences.sample[row]),
                [token],
                [float(drawn.logprobs[index])],
                [self.version],
                "" if its.text is None else its.text.take(last=last),
                self._reason(row, bool(stopped[index])) if last else None,
                None if its.raw_logprobs is None else its.raw_logprobs[-1:],
                None if its.top_logprobs is None else its.top_logprobs[-1:],
                int(sequences.cached[row]),
            )
        )

    def _reason(self, row: int, is_stop: bool) -> FinishReason:
        """Why the sample ends: one whose constraint lets nothing follow is given up, and is no answer."""
        its = self._followed.get(row)
        if its is not None and its.constraint is not None and its.constraint.failed:
            return "aborted"
        return "stop" if is_stop else "length"

    def _finish(self, row: int, reason: FinishReason) -> None:
        """Let a sample go that has ended."""
        entry = self._sequences.entries[row]
        assert entry is not None
        collection = self._collections.get(entry.id)
        if collection is not None:
            collection.samples[entry.id][int(self._sequences.sample[row])] = self._completion(row, reason)
            collection.unfinished -= 1
        elif not self._following.get(entry.id):
            self._undelivered.append(self._whole(row, entry, self._completion(row, reason)))
        self._scheduler.release(row, record=collection is None)
        self._followed.pop(row, None)
        entry.unfinished -= 1
        if not entry.unfinished:
            del self._entries[entry.id]
            self._following.pop(entry.id, None)
            self._collections.pop(entry.id, None)

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        """What a sample has so far."""
        sequences, its = self._sequences, self._followed.get(row)
        sampled = slice(int(sequences.prompt_length[row]), int(sequences.length[row]))
        text = raw = top = None
        if its is not None:
            raw = None if its.raw_logprobs is None else np.array(its.raw_logprobs, dtype=np.float32)
            top = its.top_logprobs
            if its.text is not None:
                its.text.finish()
                text = its.text.text
        return Completion(
            sequences.tokens[row, sampled].copy(),
            sequences.logprobs[row, sampled].copy(),
            sequences.versions[row, sampled].copy(),
            reason,
            text,
            raw,
            top,
        )

    def _whole(self, row: int, entry: Entry, one: Completion) -> Delta:
        """A sample in one delta."""
        text = one.text
        if text is None and self._tokenizer is not None:
            tokens = one.token_ids.tolist()
            text = self._tokenizer.decode(tokens[: len(tokens) - (one.finish_reason == "stop")])
        return Delta(
            entry.id,
            int(self._sequences.sample[row]),
            one.token_ids.tolist(),
            one.logprobs.tolist(),
            one.policy_version.tolist(),
            text or "",
            one.finish_reason,
            None if one.raw_logprobs is None else one.raw_logprobs.tolist(),
            one.top_logprobs,
            int(self._sequences.cached[row]),
        )

    # -- coming in ---------------------------------------------------------------------------------------

    def _enter(
        self, request: Request, collection: _Collection | None = None, *, stream: bool = False
    ) -> Entry:
        adapter = self._adapter_number(request.adapter, "request")
        entry = Entry(self._next_id, request, np.array(request.token_ids, dtype=np.int32), request.n, adapter)
        self._next_id += 1
        self._entries[entry.id] = entry
        if collection is not None:
            self._collections[entry.id] = collection
            collection.samples[entry.id] = {}
        if stream or needs_following(request):
            self._following[entry.id] = stream
        self._scheduler.add(entry)
        return entry

    def _check(self, request: Request, where: str) -> None:
        params, key = request.params, request.key
        self._check_tokens(request.token_ids, params.max_tokens, where)
        last = request.first_sample + request.n - 1
        if not (0 <= key[0] < 2**64 and all(0 <= word < 2**32 for word in (*key[1:], max(last, 0)))):
            raise RequestError(f"key {key} does not fit 64, 32 and 32 bits", where=where)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop texts need a tokenizer", where=where, remedy="give Engine a tokenizer")
        self._adapter_number(request.adapter, where)
        if params.min_tokens and request.constraint is not None:
            raise RequestError(
                "min_tokens and a constraint may ask for opposites", where=where, remedy="use one"
            )
        outside = [token for token in params.logit_bias if not 0 <= token < self._config.vocab_size]
        if outside:
            raise RequestError(
                f"logit_bias names token {outside[0]}", where=where, remedy="use the model's ids"
            )

    def _check_tokens(self, prompt: Sequence[int] | NDArray[np.int64], more: int, where: str) -> None:
        config, total = self._config, len(prompt) + more
        if not len(prompt):
            raise RequestError("has no tokens", where=where)
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise RequestError(f"has a token outside 0..{config.vocab_size - 1}", where=where)
        if total > config.max_position_embeddings:
            raise RequestError(
                f"has {len(prompt)} tokens, and with {more} more passes the model's "
                f"{config.max_position_embeddings} positions",
                where=where,
                remedy="shorten the prompt, or ask for fewer tokens",
            )
        if blocks_for(total) >= self._num_blocks:
            raise RequestError(
                f"has {len(prompt)} tokens, and with {more} more passes the cache's "
                f"{(self._num_blocks - 1) * BLOCK}",
                where=where,
                remedy="shorten the prompt, ask for fewer tokens, or give the engine more cache_tokens",
            )


class _Collection:
    """Samples that `Engine.sample` waits for.

    Attributes:
        unfinished: how many are missing.
        samples: by request, then by index.
    """

    def __init__(self, total: int) -> None:
        self.unfinished = total
        self.samples: dict[int, dict[int, Completion]] = {}


def _window_of_all(config: DecoderConfig | ModelShape) -> int | None:
    """How many tokens a query sees, when every layer has a window."""
    if isinstance(config, ModelShape) or None in config.windows:
        return None
    return config.sliding_window


def _check_state(state: Mapping[str, Tensor], decoder: Decoder) -> None:
    own = decoder.state_dict()
    if missing := sorted(own.keys() ^ state.keys()):
        raise RequestError(f"{missing[0]} is on one side only", where="new weights")
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)}, not {list(tensor.shape)}"
            raise RequestError(f"{name} is {shapes}", where="new weights")


def default_cache_tokens(config: DecoderConfig | ModelShape, slots: int) -> int:
    """Tokens for `slots` of the longest samples, or as many as have room in `CACHE_BYTES`."""
    if isinstance(config, ModelShape):
        token_bytes = config.cache_bytes(1, torch.float32.itemsize)
    else:
        token_bytes = card_of(config).cache_bytes(1, torch.float32.itemsize, windows=False)
    return max(BLOCK, min(slots * config.max_position_embeddings, CACHE_BYTES // token_bytes))
