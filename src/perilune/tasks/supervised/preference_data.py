"""Preference pairs as pairs of episodes, split by task, in an order that seed and step alone decide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perilune.data.episode import Episode
from perilune.data.preferences import FILE, PreferenceRecord, read_preferences
from perilune.errors import RequestError
from perilune.learn.batch import Pair
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.supervised.demonstrations import places_of


@dataclass(frozen=True)
class PreferenceData:
    """Tokenised pairs: `train` to learn from, `validation` to judge by, no task in both."""

    train: Sequence[Pair]
    validation: Sequence[Pair]
    seed: int

    @classmethod
    def load(
        cls, paths: Sequence[Path], tokenizer: Tokenizer, seed: int, longest: int, validation: float
    ) -> PreferenceData:
        """Read the pairs of all `paths`.

        Both answers are whole and end with the same token: neither is ever cut to fit.

        Args:
            longest: tokens that prompt and answer may have.
            validation: share of tasks held out.

        Raises:
            RequestError: for a broken row (file and line), an answer that does not fit, or when nothing is
                left to learn from.
        """
        train: list[Pair] = []
        held: list[Pair] = []
        for path in paths:
            for line, record in enumerate(read_preferences(path), start=1):
                where = f"{path / FILE if path.is_dir() else path}:{line}"
                pair = _pair(record, tokenizer, seed, where, longest)
                (held if _is_held_out(record.task_id, validation) else train).append(pair)
        if not train:
            raise RequestError("no pair is left to learn from", where=str(paths[0]), remedy="make more pairs")
        return cls(train, held, seed)

    def batch(self, step: int, size: int) -> list[Pair]:
        """The pairs of optimizer step `step` (from 0)."""
        return [self.train[place] for place in places_of(self.seed, step, size, len(self.train))]


def _is_held_out(task_id: str, share: float) -> bool:
    mixed = hashlib.sha256(f"validation:{task_id}".encode()).digest()
    return int.from_bytes(mixed[:8], "big") < share * 2**64


def _pair(record: PreferenceRecord, tokenizer: Tokenizer, seed: int, where: str, longest: int) -> Pair:
    try:
        prompt = np.asarray(tokenizer.encode_prompt(record.prompt), np.int32)
        better, worse = (
            np.asarray(tokenizer.encode_completion(side[0]["content"]), np.int32)
            for side in (record.chosen, record.rejected)
        )
    except RequestError as error:
        raise RequestError(error.what, where=where, remedy=error.remedy) from None
    most = len(prompt) + max(len(better), len(worse))
    if most > longest:
        raise RequestError(
            f"a pair of {most} tokens; the model takes {longest}",
            where=where,
            remedy="leave it out: cutting one side would teach the cut",
        )
    episode = Episode(
        episode_id=f"{record.digest}/chosen",
        group_id=record.digest,
        task_id=record.task_id,
        environment=record.environment,
        seed=seed,
        messages=(*record.prompt, *record.chosen),
        prompt_ids=prompt,
        token_ids=better,
        loss_mask=np.ones(len(better), np.bool_),
        logprobs=np.zeros(len(better), np.float32),
        policy_version=np.full(len(better), -1, np.int32),
        finish_reason="stop",
        reward=record.chosen_score,
    )
    other = replace(
        episode,
        episode_id=f"{record.digest}/rejected",
        messages=(*record.prompt, *record.rejected),
        token_ids=worse,
        loss_mask=np.ones(len(worse), np.bool_),
        logprobs=np.zeros(len(worse), np.float32),
        policy_version=np.full(len(worse), -1, np.int32),
        reward=record.rejected_score,
    )
    return episode, other
