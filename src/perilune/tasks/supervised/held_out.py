"""Figures of the examples that a stage holds out of its data, by number, for evaluations while training."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from perilune.data.episode import Episode
from perilune.learn.batch import PackedBatch, Pair, pack_each, pack_pairs
from perilune.learn.preference import PairLogprobs, pair_logprobs
from perilune.learn.trainer import token_logprobs
from perilune.models.decoder import Decoder

Values = dict[str, dict[str, float]]


def episode_values(decoder: Decoder, episodes: Sequence[Episode], token_budget: int) -> Values:
    """Return `loss`: the mean cross-entropy of each episode's learned tokens in nats."""
    numbers = {episode.episode_id: str(number) for number, episode in enumerate(episodes)}
    losses: dict[str, float] = {}
    for batch, logprobs in _scored(decoder, pack_each(episodes, token_budget)):
        counts = torch.bincount(batch.episode_of)
        sums = torch.bincount(batch.episode_of, weights=-logprobs.double())
        names = [numbers[name] for name in batch.episode_ids]
        losses |= zip(names, (sums / counts).tolist(), strict=True)
    return {"loss": losses}


def pair_values(
    decoder: Decoder,
    pairs: Sequence[Pair],
    loss: Callable[[PairLogprobs], tuple[Tensor, Tensor]],
    token_budget: int,
) -> Values:
    """Return `loss` and `accuracy` (margin above 0) of each pair, whose `logprobs` are the reference's.

    Args:
        loss: losses and margins float[B], as `preference_loss`.
    """
    numbers = {chosen.episode_id: str(number) for number, (chosen, _) in enumerate(pairs)}
    values: Values = {"loss": {}, "accuracy": {}}
    for batch, logprobs in _scored(decoder, pack_pairs(pairs, token_budget)):
        losses, margins = loss(pair_logprobs(batch, logprobs))
        names = [numbers[name] for name in batch.episode_ids[::2]]
        values["loss"] |= zip(names, losses.double().tolist(), strict=True)
        values["accuracy"] |= zip(names, (margins > 0).double().tolist(), strict=True)
    return values


def _scored(decoder: Decoder, batches: Sequence[PackedBatch]) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Yield the batches with the log-probs of their learned tokens, on the CPU."""
    for batch in batches:
        logprobs = token_logprobs(decoder, batch)
        yield batch.to(torch.device("cpu")), logprobs.cpu()
