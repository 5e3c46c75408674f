"""Rows to imitate as episodes to train on; the order depends only on the seed and the step."""

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.data.examples import Conversation
from perilune.data.records import is_validation
from perilune.data.sources import read_rows
from perilune.tasks.supervised.tokens import RowReader, split_name, uneven_split


class Demonstrations:
    """Tokenized rows, at 5 bytes per token. Each epoch is a new permutation, and the batch of a step needs no
    stored state.

    Args:
        reader: reads the rows, and counts them.
        validation: share of the prompts whose rows are held out.
        with_messages: whether episodes have the messages of their rows.

    Raises:
        RequestError: as `RowReader.demonstrations`, and when there are no rows to train on, or none to hold
            out.

    Attributes:
        held_out: rows that are in no batch.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        reader: RowReader,
        seed: int,
        *,
        validation: float = 0.0,
        with_messages: bool = False,
    ) -> None:
        self.seed = seed
        ids, mask, ends, prompts = array("i"), bytearray(), array("q", [0]), array("i")
        self._places: list[str] = []
        self._messages: list[tuple[Mapping[str, Any], ...]] = []
        held_out: list[int] = []
        path = Path()
        for path in paths:
            for row, example, tokens in reader.demonstrations(read_rows(path)):
                if is_validation(split_name(example, tokens), validation):
                    held_out.append(len(self._places))
                ids.extend(tokens.prompt_ids)
                ids.extend(tokens.token_ids)
                mask += bytes(len(tokens.prompt_ids)) + bytes(tokens.loss_mask)
                ends.append(len(ids))
                prompts.append(len(tokens.prompt_ids))
                self._places.append(row.place)
                if with_messages and isinstance(example, Conversation):
                    self._messages.append((*example.opening, *example.turns))
        if not self._places:
            raise reader.no_rows(path)
        self._ids, self._mask = np.frombuffer(ids, np.int32), np.frombuffer(mask, np.bool_)
        self._ends, self._prompts = ends, prompts
        self._trained = sorted({*range(len(ends) - 1)} - {*held_out})
        if not self._trained or (validation and not held_out):
            raise uneven_split(len(self._places), len(held_out), validation, str(path))
        self.held_out = [self.episode(index) for index in held_out]

    def __len__(self) -> int:
        return len(self._trained)

    def batch(self, step: int, size: int) -> list[Episode]:
        """Return the episodes of optimizer step `step` (from 0)."""
        indices = batch_indices(self.seed, step, size, len(self))
        return [self.episode(self._trained[index]) for index in indices]

    def episode(self, index: int) -> Episode:
        """Return one row as an episode that no policy sampled; its id is its place in the file."""
        start, end = self._ends[index], self._ends[index + 1]
        first = start + self._prompts[index]
        location = self._places[index]
        return Episode(
            episode_id=location,
            group_id=location,
            task_id=location,
            environment="",
            seed=self.seed,
            messages=self._messages[index] if self._messages else (),
            prompt_ids=self._ids[start:first],
            **unsampled_tokens(self._ids[first:end]) | {"loss_mask": self._mask[first:end]},
        )


def batch_indices(seed: int, step: int, size: int, total: int) -> list[int]:
    """Return the indices among `total` rows of the batch of step `step`; each epoch is a new permutation."""
    epochs, within = np.divmod(np.arange(step * size, (step + 1) * size), total)
    orders = {
        epoch: np.random.default_rng([seed, int(epoch)]).permutation(total) for epoch in np.unique(epochs)
    }
    return [int(orders[epoch][index]) for epoch, index in zip(epochs, within, strict=True)]
