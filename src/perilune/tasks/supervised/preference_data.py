"""Preference pairs as pairs of episodes, split by task; the order depends only on the seed and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.data.preferences import FILE, PreferenceRecord, read_preferences
from perilune.errors import RequestError
from perilune.learn.batch import Pair
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.supervised.demonstrations import batch_indices


@dataclass(frozen=True)
class PreferenceData:
    """Tokenised pairs for training and for validation; no task is in both."""

    train: Sequence[Pair]
    validation: Sequence[Pair]
    seed: int

    @classmethod
    def load(
        cls, paths: Sequence[Path], tokenizer: Tokenizer, seed: int, longest: int, validation: float
    ) -> PreferenceData:
        """Read the pairs of all `paths`. Answers are never truncated, and all end with the same token.

        Args:
            longest: most tokens of prompt and answer.
            validation: share of held-out tasks.

        Raises:
            RequestError: naming file and line, for a malformed row or an answer that does not fit; when no
                training pair is left.
        """
        train: list[Pair] = []
        held: list[Pair] = []
        for path in paths:
            for line, record in enumerate(read_preferences(path), start=1):
                where = f"{path / FILE if path.is_dir() else path}:{line}"
                pair = _pair(record, tokenizer, seed, where, longest)
                (held if _is_held_out(record.task_id, validation) else train).append(pair)
        if not train:
            raise RequestError("no pair is left to train on", where=str(paths[0]), remedy="make more pairs")
        return cls(train, held, seed)

    def batch(self, step: int, size: int) -> list[Pair]:
        """The pairs of optimizer step `step` (from 0)."""
        return [self.train[index] for index in batch_indices(self.seed, step, size, len(self.train))]


def _is_held_out(task_id: str, share: float) -> bool:
    digest = hashlib.sha256(f"validation:{task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _pair(record: PreferenceRecord, tokenizer: Tokenizer, seed: int, where: str, longest: int) -> Pair:
    try:
        prompt = np.asarray(tokenizer.encode_prompt(record.prompt), np.int32)
        better, worse = (
            tokenizer.encode_completion(side[0]["content"]) for side in (record.chosen, record.rejected)
        )
    except RequestError as error:
        raise RequestError(error.what, where=where, remedy=error.remedy) from None
    most = len(prompt) + max(len(better), len(worse))
    if most > longest:
        raise RequestError(
            f"the pair has {most} tokens, and the model has {longest} positions",
            where=where,
            remedy="remove the pair: truncating one answer would teach truncation",
        )
    episode = Episode(
        episode_id=f"{record.digest}/chosen",
        group_id=record.digest,
        task_id=record.task_id,
        environment=record.environment,
        seed=seed,
        messages=(*record.prompt, *record.chosen),
        prompt_ids=prompt,
        reward=record.chosen_score,
        **unsampled_tokens(better),
    )
    other = replace(
        episode,
        episode_id=f"{record.digest}/rejected",
        messages=(*record.prompt, *record.rejected),
        reward=record.rejected_score,
        **unsampled_tokens(worse),
    )
    return episode, other
