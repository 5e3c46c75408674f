"""Traces as episodes to train on; the order depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.data.records import TraceRecord, read_records, records_file
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_turns


@dataclass(frozen=True)
class Demonstrations:
    """Tokenised traces. Each epoch is a new permutation, and the batch of a step needs no stored state."""

    episodes: Sequence[Episode]
    seed: int

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer, seed: int, longest: int) -> Demonstrations:
        """Read trace records.

        Raises:
            RequestError: naming file and line, for a malformed row, a row longer than `longest` tokens or one
                with a character that the vocabulary lacks; when there are no rows.
        """
        records = read_records(path)
        if not records:
            raise RequestError("there are no traces to train on", where=str(path))
        episodes = []
        for line, record in enumerate(records, start=1):
            where = f"{records_file(path)}:{line}"
            one = _episode(record, tokenizer, seed, where)
            length = len(one.prompt_ids) + len(one.token_ids)
            if length > longest:
                raise RequestError(
                    f"the trace has {length} tokens, and the model has {longest} positions",
                    where=where,
                    remedy="remove the trace, or use a model with more positions",
                )
            episodes.append(one)
        return cls(episodes, seed)

    def __len__(self) -> int:
        return len(self.episodes)

    def batch(self, step: int, size: int) -> list[Episode]:
        """The traces of optimizer step `step` (from 0)."""
        return [self.episodes[index] for index in batch_indices(self.seed, step, size, len(self.episodes))]


def batch_indices(seed: int, step: int, size: int, total: int) -> list[int]:
    """The indices among `total` rows of the batch of step `step`; each epoch is a new permutation."""
    epochs, within = np.divmod(np.arange(step * size, (step + 1) * size), total)
    orders = {
        epoch: np.random.default_rng([seed, int(epoch)]).permutation(total) for epoch in np.unique(epochs)
    }
    return [int(orders[epoch][index]) for epoch, index in zip(epochs, within, strict=True)]


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
        reward=record.score,
        **unsampled_tokens(token_ids) | {"loss_mask": np.asarray(loss_mask, dtype=np.bool_)},
    )
