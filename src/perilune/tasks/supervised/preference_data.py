"""Preference pairs as pairs of episodes, split by task; the order depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.data.records import is_validation
from perilune.data.sources import read_rows
from perilune.learn.batch import Pair
from perilune.tasks.supervised.demonstrations import batch_indices
from perilune.tasks.supervised.tokens import RowReader, Tokens, uneven_split


@dataclass(frozen=True)
class PreferenceData:
    """Tokenized pairs for training and for validation; no task is in both."""

    train: Sequence[Pair]
    validation: Sequence[Pair]
    seed: int

    @classmethod
    def load(cls, paths: Sequence[Path], reader: RowReader, seed: int, validation: float) -> PreferenceData:
        """Read the pairs of all `paths`. Answers are never truncated, and all end with the same token.

        Args:
            validation: share of held-out tasks.

        Raises:
            RequestError: naming file and line, for a malformed row or an answer that does not fit; when no
                training pair is left.
        """
        train: list[Pair] = []
        held_out: list[Pair] = []
        for path in paths:
            for row, pair, better, worse in reader.comparisons(read_rows(path)):
                ids = (pair.task_id, row.place)
                scores = pair.scores or (None, None)
                chosen = _episode((*ids, "chosen"), seed, better, scores[0])
                rejected = _episode((*ids, "rejected"), seed, worse, scores[1])
                (held_out if is_validation(pair.task_id, validation) else train).append((chosen, rejected))
        if not train and not held_out:
            raise reader.no_rows(paths[0])
        if not train:
            raise uneven_split(len(held_out), len(held_out), validation, str(paths[0]))
        return cls(train, held_out, seed)

    def batch(self, step: int, size: int) -> list[Pair]:
        """Return the pairs of optimizer step `step` (from 0)."""
        return [self.train[index] for index in batch_indices(self.seed, step, size, len(self.train))]


def _episode(ids: tuple[str, str, str], seed: int, tokens: Tokens, score: float | None) -> Episode:
    task_id, location, side = ids
    return Episode(
        episode_id=f"{location}/{side}",
        group_id=location,
        task_id=task_id,
        environment="",
        seed=seed,
        messages=(),
        prompt_ids=np.asarray(tokens.prompt_ids, np.int32),
        reward=score,
        **unsampled_tokens(tokens.token_ids) | {"loss_mask": np.asarray(tokens.loss_mask, np.bool_)},
    )
