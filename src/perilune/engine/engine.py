"""The engine: continues prompts in a batch, exactly and reproducibly.

`sample` keeps up to `slots` samples in flight. The prompt of a group is computed once and shared by its
samples; a finished sample gives its slot to the next one that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.cache import Decode, KVCache, Memory, Prefill
from perilune.engine.random import uniforms
from perilune.engine.sampling import Completion, Prompt, SamplingParams, draw
from perilune.errors import RequestError, WorkFailedError
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder
from perilune.models.logprobs import chosen, log_distribution

_ROWS = 16
_DRAWS_AHEAD = 64  # random numbers are made for this many positions of a sample at a time
_REFILL_SHARE = 8  # free slots are refilled once they are 1/8 of all, so that prompts are computed in batches


class Engine:
    """Samples from, and scores with, one decoder.

    Args:
        decoder: what to sample with, on its device and in its dtype. The engine works on a copy of its
            weights, taken now and at every `update_weights`, so that training it does not change a version.
        slots: most samples in flight at once.
        score_tokens: most tokens of one scoring batch.
    """

    def __init__(self, decoder: Decoder, *, slots: int = 256, score_tokens: int = 16384) -> None:
        self._source = decoder
        self._decoder = decoder.frozen()
        self._slots = slots
        self._memory: Memory | None = None
        self._score_tokens = score_tokens
        self.version = 0

    def update_weights(self, state: Mapping[str, Tensor] | None, version: int) -> None:
        """Take `state`, or when None what the decoder given at first now holds, as policy `version`.

        `state` has the decoder's own names and is loaded into it. May be called from `on_progress`: samples
        in flight then go on with the new weights, and say so token by token.
        """
        if state is not None:
            self._source.load_state_dict(state)
        self._decoder = self._source.frozen()
        self.version = version

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `n` times; `result[i][j]` is sample j of prompt i.

        `on_progress(finished, total)` is called after every token of the batch, with counts of samples.

        Raises:
            RequestError: on an empty prompt, a token outside the vocabulary, or more tokens than the
                model has positions for.
            WorkFailedError: when the model gives no finite probabilities.
        """
        self._check(prompts, params)
        weight = self._decoder.model.embed_tokens.weight
        memory = self._memory or Memory(weight.device, weight.dtype)
        self._memory = None  # kept only when all goes well: what a failure leaves may not be finite
        cache = KVCache(self._decoder.config, min(self._slots, len(prompts) * n), memory)
        batch = _Batch(prompts, n, params, cache)
        while batch.unfinished:
            batch.admit(self._decoder, self.version)
            batch.draw()
            batch.decode(self._decoder, self.version)
            if on_progress is not None:
                on_progress(batch.finished, len(prompts) * n)
        batch.cache.release()
        self._memory = memory
        return batch.completions()

    @torch.inference_mode()
    def score(
        self,
        prompt_ids: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[NDArray[np.float32]]:
        """Log-probs float32[T] of each `token_ids[i]` after `prompt_ids[i]`, by one packed forward."""
        scores: list[NDArray[np.float32]] = []
        pairs = list(zip(prompt_ids, token_ids, strict=True))
        for index, (prompt, answer) in enumerate(pairs):
            self._check_tokens(prompt, len(answer), f"prompt {index}")
        while len(scores) < len(pairs):
            batch: list[tuple[Sequence[int], Sequence[int]]] = []
            tokens = 0
            for prompt, answer in pairs[len(scores) :]:
                tokens += len(prompt) + len(answer)
                if batch and tokens > self._score_tokens:
                    break
                batch.append((prompt, answer))
            scores += self._score_packed(batch, temperature)
        return scores

    def _score_packed(
        self, batch: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
    ) -> list[NDArray[np.float32]]:
        sequences = [[*prompt, *answer] for prompt, answer in batch]
        lengths = [len(answer) for _, answer in batch]
        tokens, positions, cu_seqlens = pack(sequences, self._decoder.model.embed_tokens.weight.device)
        hidden = self._decoder(tokens, positions, PackedAttention(cu_seqlens))
        before = torch.cat([
            torch.arange(end - length, end) - 1
            for end, length in zip(cu_seqlens[1:].tolist(), lengths, strict=True)
        ]).to(tokens.device)  # fmt: skip
        logprobs = log_distribution(self._decoder.logits(hidden[before]), temperature)
        picked = chosen(logprobs, tokens[before + 1]).cpu().numpy()
        return np.split(picked, np.cumsum(lengths)[:-1])

    def _check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        for index, prompt in enumerate(prompts):
            where = f"prompt {index}"
            self._check_tokens(prompt.token_ids, params.max_tokens, where)
            if not (0 <= prompt.key[0] < 2**64 and all(0 <= word < 2**32 for word in prompt.key[1:])):
                raise RequestError(f"key {prompt.key} does not fit 64, 32 and 32 bits", where=where)

    def _check_tokens(self, prompt: Sequence[int], more: int, where: str) -> None:
        config = self._source.config
        if not len(prompt):
            raise RequestError("has no tokens", where=where)
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise RequestError(f"has a token outside 0..{config.vocab_size - 1}", where=where)
        if len(prompt) + more > config.max_position_embeddings:
            raise RequestError(
                f"has {len(prompt)} tokens, and with {more} more passes the model's "
                f"{config.max_position_embeddings} positions",
                where=where,
                remedy="shorten the prompt, or ask for fewer tokens",
            )


class _Batch:
    """One call of `Engine.sample`: of all samples, B are active, in the slots 0 .. B - 1."""

    def __init__(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, cache: KVCache) -> None:
        total = len(prompts) * n
        self.prompts, self.n, self.params, self.cache = prompts, n, params, cache
        self.slots, self.device = cache.slots, cache.keys.device
        self.keys = np.array([(*p.key, j) for p in prompts for j in range(n)], dtype=np.uint64)
        self.prompt_lengths = np.repeat([len(prompt.token_ids) for prompt in prompts], n)
        self.token_ids = np.zeros((total, params.max_tokens), dtype=np.int32)
        self.logprobs = np.zeros((total, params.max_tokens), dtype=np.float32)
        self.versions = np.zeros((total, params.max_tokens), dtype=np.int32)
        self.lengths = np.zeros(total, dtype=np.int64)  # tokens sampled so far
        self.stopped = np.zeros(total, dtype=np.bool_)
        self.stops = np.isin(np.arange(cache.config.vocab_size), params.stop_token_ids)
        self.uniforms = np.zeros((total, _DRAWS_AHEAD))
        self.waiting = deque(range(total))
        self.active = np.zeros(0, dtype=np.int64)  # the sample in each slot
        self.logits: Tensor | None = None  # float[B, V], of the next token of each active sample
        self.version = np.zeros(0, dtype=np.int32)  # of the weights that computed each row of the logits

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or len(self.active) > 0

    @property
    def finished(self) -> int:
        return len(self.lengths) - len(self.waiting) - len(self.active)

    def admit(self, decoder: Decoder, version: int) -> None:
        """Give free slots to waiting samples; the prompts they share are computed once."""
        free = self.slots - len(self.active)
        if not self.waiting or free < max(1, self.slots // _REFILL_SHARE):
            return
        new = np.array([self.waiting.popleft() for _ in range(min(free, len(self.waiting)))])
        which, prompt_of_slot = np.unique(new // self.n, return_inverse=True)
        tokens, positions, cu_seqlens = pack([self.prompts[i].token_ids for i in which], self.device)
        self.cache.reserve(int(cu_seqlens.diff().max()), len(self.active))
        attention = Prefill(self.cache, cu_seqlens, torch.from_numpy(prompt_of_slot), len(self.active))
        hidden = decoder(tokens, positions, attention)
        logits = decoder.logits(hidden[cu_seqlens[1:] - 1])[prompt_of_slot]
        self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        self.active = np.concatenate([self.active, new])
        self.version = np.concatenate([self.version, np.full(len(new), version, dtype=np.int32)])

    def draw(self) -> None:
        """Sample the next token of every active sample, and let go of those that are done."""
        rows, at = self.active, self.lengths[self.active]
        assert self.logits is not None
        logprobs = log_distribution(self.logits, self.params.temperature)
        picked = logprobs.argmax(-1) if self.params.temperature == 0 else draw(logprobs, self._uniform(at))
        picked_logprobs = chosen(logprobs, picked).cpu().numpy()
        if not np.isfinite(picked_logprobs).all():
            raise WorkFailedError(
                "the model's probabilities are not finite",
                where=f"sampling, policy version {self.version.max()}",
                remedy="the weights diverged: lower the learning rate, or start from an earlier checkpoint",
            )
        tokens = picked.cpu().numpy()
        self.token_ids[rows, at] = tokens
        self.logprobs[rows, at] = picked_logprobs
        self.versions[rows, at] = self.version
        self.lengths[rows] = at + 1
        stopped = self.stops[tokens]
        self.stopped[rows] = stopped
        self._keep(~stopped & (at + 1 < self.params.max_tokens))

    def decode(self, decoder: Decoder, version: int) -> None:
        """Feed every active sample its last token; what comes out are the logits of the next one."""
        rows = self.active
        self.version = np.full(len(rows), version, dtype=np.int32)
        if not len(rows):
            self.logits = None
            return
        at = self.lengths[rows] - 1
        # Free slots compute along up to a multiple of 16: a new number of rows costs oneDNN a new kernel.
        count = min(-(-len(rows) // _ROWS) * _ROWS, self.slots)
        tokens, stands = np.zeros((2, count), dtype=np.int64)
        tokens[: len(rows)] = self.token_ids[rows, at]
        stands[: len(rows)] = self.prompt_lengths[rows] + at
        longest = int(stands.max()) + 1
        self.cache.reserve(longest, len(rows))
        positions = torch.from_numpy(stands).to(self.device)
        attention = Decode(self.cache, positions, longest)
        hidden = decoder(torch.from_numpy(tokens).to(self.device), positions, attention)
        self.logits = decoder.logits(hidden)[: len(rows)]

    def completions(self) -> list[list[Completion]]:
        samples = [
            Completion(
                self.token_ids[row, :length].copy(),
                self.logprobs[row, :length].copy(),
                self.versions[row, :length].copy(),
                "stop" if self.stopped[row] else "length",
            )
            for row, length in enumerate(self.lengths)
        ]
        return [samples[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]

    def _uniform(self, at: NDArray[np.int64]) -> Tensor:
        """float64[B] for the tokens at `at`; computed _DRAWS_AHEAD positions at a time."""
        column = at % _DRAWS_AHEAD
        due = column == 0
        if due.any():
            ahead = at[due, None] + np.arange(_DRAWS_AHEAD)
            self.uniforms[self.active[due]] = uniforms(self.keys[self.active[due]], ahead)
        return torch.from_numpy(self.uniforms[self.active, column]).to(self.device)

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the other active samples; the last ones move into the slots that become free."""
        count = int(kept.sum())
        holes, movers = np.flatnonzero(~kept[:count]), count + np.flatnonzero(kept[count:])
        if len(movers):
            length = int((self.prompt_lengths + self.lengths)[self.active[movers]].max())
            self.cache.move(torch.from_numpy(movers), torch.from_numpy(holes), length)
            self.active[holes] = self.active[movers]
        self.active = self.active[:count]


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lay sequences end to end: int64[N] tokens, int64[N] positions, int64[S + 1] bounds."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return tokens.to(device), positions.to(device), bounds.to(device)
