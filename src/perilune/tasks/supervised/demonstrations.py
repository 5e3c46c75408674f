"""Traces as episodes to imitate, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perilune.data.episode import Episode
from perilune.data.records import TraceRecord, read_records, records_file
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_turns


@dataclass(frozen=True)
class Demonstrations:
    """Tokenised traces. Each epoch is a fresh permutation; a step's batch is computed, not remembered."""

    episodes: Sequence[Episode]
    seed: int

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer, seed: int, longest: int) -> Demonstrations:
        """Read trace records.

        Raises:
            RequestError: for a broken row (file and line), no rows, or one longer than the model takes or
                with a character that its vocabulary lacks.
        """
        records = read_records(path)
        if not records:
            raise RequestError("there are no traces to learn from", where=str(path))
        episodes = []
        for line, record in enumerate(records, start=1):
            where = f"{records_file(path)}:{line}"
            one = _episode(record, tokenizer, seed, where)
            length = len(one.prompt_ids) + len(one.token_ids)
            if length > longest:
                raise RequestError(
                    f"a trace of {length} tokens; the model takes {longest}",
                    where=where,
                    remedy="leave it out, or take a model with more positions",
                )
            episodes.append(one)
        return cls(episodes, seed)

    def __len__(self) -> int:
        return len(self.episodes)

    def batch(self, step: int, size: int) -> list[Episode]:
        """The traces of optimizer step `step` (from 0)."""
        return [self.episodes[place] for place in places_of(self.seed, step, size, len(self.episodes))]


def places_of(seed: int, step: int, size: int, total: int) -> list[int]:
    """Which of `total` rows make the batch of step `step`: each epoch is a fresh permutation."""
    epochs, within = np.divmod(np.arange(step * size, (step + 1) * size), total)
    orders = {
        epoch: np.random.default_rng([seed, int(epoch)]).permutation(total) for epoch in np.unique(epochs)
    }
    return [int(orders[epoch][place]) for epoch, place in zip(epochs, within, strict=True)]


def _episode(record: TraceRecord, tokenizer: Tokenizer, seed: int, where: str) -> Episode:
    try:
        prompt_ids, token_ids, loss_mask = encode_turns(tokenizer, record.messages)
    except RequestError as error:
        raise RequestError(error.what, where=where, remedy=error.remedy) from None
    return Episode(
        episode_id=record.digest,
        group_id=record.digest,
        task_id=record.task_id,
        environment=record.environment,
        seed=seed,
        messages=tuple(record.messages),
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.asarray(loss_mask, dtype=np.bool_),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        policy_version=np.full(len(token_ids), -1, dtype=np.int32),
        finish_reason="stop",
        reward=record.score,
    )
