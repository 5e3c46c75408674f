"""Signals: numbers per token that algorithms and off-policy corrections need from forward passes.

All signals use the weights at the beginning of the step and carry no gradient.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.data.episode import Episode
from perilune.data.routes import with_missing_row
from perilune.errors import RequestError
from perilune.learn.algorithms.base import Group, Signal, Signals, StepContext
from perilune.learn.algorithms.sft import SFT
from perilune.learn.batch import PackedBatch, pack, round_up_rows, scatter_to_sampled
from perilune.learn.critic import Critic
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.trainer import predicting_states, target_logprobs
from perilune.models.decoder import Decoder

CHUNK_ROWS = 1024  # rows that are compared at once, each with two distributions over the vocabulary


@dataclass(frozen=True, slots=True)
class SignalModels:
    """The models that signals are computed with.

    Attributes:
        decoder: the policy.
        reference: the frozen reference policy, for deviation, uncertainty and reference_logprobs.
        critic: the critic, for values and values_after.
    """

    decoder: Decoder
    reference: Decoder | None = None
    critic: Critic | None = None


@torch.no_grad()
def compute_signals(
    names: Collection[Signal],
    groups: Sequence[Group],
    models: SignalModels,
    *,
    token_budget: int,
    temperature: float = 1.0,
    ranks: Ranks = SINGLE_RANK,
) -> Signals:
    """Compute the named signals of all episodes that did not fail; an empty `names` computes nothing.

    Each rank computes a share of the micro-batches, and all ranks receive all signals.

    Raises:
        RequestError: when a signal needs a reference or a critic and there is none.
        ValueError: when two episodes have the same id.
    """
    if not names:
        return {}
    if models.reference is None and {"deviation", "uncertainty", "reference_logprobs"} & set(names):
        raise RequestError("signals that compare with the reference need a reference policy")
    if models.critic is None and {"values", "values_after"} & set(names):
        raise RequestError("the signals values and values_after need a critic")
    if "values_after" in names:
        cut = [[_extend(e) for e in group if e.truncated and e.loss_mask.any()] for group in groups]
        later = compute_signals({"values"}, cut, models, token_budget=token_budget, ranks=ranks)["values"]
        rest = compute_signals(
            {*names} - {"values_after"},
            groups,
            models,
            token_budget=token_budget,
            temperature=temperature,
            ranks=ranks,
        )
        return {**rest, "values_after": {key: values[-1:] for key, values in later.items()}}
    signals: dict[Signal, dict[str, np.ndarray]] = {name: {} for name in names}
    by_id = {episode.episode_id: episode for group in groups for episode in group}
    if len(by_id) < sum(map(len, groups)):
        raise ValueError("two episodes of a step have the same id")
    everything = SFT().weight_groups(groups, StepContext(max_tokens=0))
    device = next(models.decoder.parameters()).device
    batches = pack(everything, token_budget, temperature=temperature)
    own = [
        torch.stack([*_token_signals(list(signals), batch.to(device), models).values()]).cpu().numpy()
        for batch in ranks.shard(batches)
    ]
    for batch, rows in zip(batches, ranks.all_gather_arrays("signals", own), strict=True):
        for by_episode, values in zip(signals.values(), rows, strict=True):
            for key, part in batch.split_by_episode(torch.from_numpy(values)):
                by_episode[key] = scatter_to_sampled(by_id[key], part)
    return signals


def _extend(episode: Episode) -> Episode:
    """Append an arbitrary token, so that the episode's last state gets a value."""
    routes = episode.routed_experts
    return replace(
        episode,
        token_ids=np.append(episode.token_ids, episode.token_ids[-1]),
        loss_mask=np.append(episode.loss_mask, True),
        logprobs=np.append(episode.logprobs, np.float32(0)),
        policy_version=np.append(episode.policy_version, episode.policy_version[-1]),
        step_rewards=None,
        routed_experts=None if routes is None else with_missing_row(routes),
        top_ids=None,
        top_logprobs=None,
    )


def _token_signals(
    names: Collection[Signal], batch: PackedBatch, models: SignalModels
) -> Mapping[Signal, Tensor]:
    """Compute each signal, float32[M]."""
    decoder, reference, critic = models.decoder, models.reference, models.critic
    states = predicting_states(decoder, batch)
    signals: dict[Signal, Tensor] = {}
    if "logprobs" in names:
        signals["logprobs"] = target_logprobs(decoder, batch, states)[0]
    if critic is not None and "values" in names:
        signals["values"] = critic(states)
    if reference is not None and {"deviation", "uncertainty", "reference_logprobs"} & set(names):
        reference_states = predicting_states(reference, replace(batch, routes=None))
        if "reference_logprobs" in names:
            signals["reference_logprobs"] = target_logprobs(reference, batch, reference_states)[0]
        if {"deviation", "uncertainty"} & set(names):
            learned = len(states)
            parts = list(_compare(decoder, states, reference, reference_states, batch.temperature))
            whole = (torch.cat(part)[:learned] for part in zip(*parts, strict=True))
            signals["deviation"], signals["uncertainty"] = whole
    return {name: signals[name] for name in names}


def _compare(
    decoder: Decoder, states: Tensor, reference: Decoder, theirs: Tensor, temperature: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute deviation and uncertainty in chunks of `CHUNK_ROWS`, to limit memory."""
    missing = round_up_rows(len(states)) - len(states)
    states, theirs = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (states, theirs))
    for chunk, other in zip(torch.split(states, CHUNK_ROWS), torch.split(theirs, CHUNK_ROWS), strict=True):
        yield deviation_and_uncertainty(
            decoder.logits(chunk).float() / temperature, reference.logits(other).float() / temperature
        )


def deviation_and_uncertainty(logits: Tensor, reference_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return float[M] each, in [0, 1]: 1 - sum sqrt(p q) (squared Hellinger distance) and H(p) / log V."""
    p, q = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    deviation = (1 - ((p + q) / 2).exp().sum(-1)).clamp(0, 1)
    entropy = -(p.exp() * p).sum(-1)
    return deviation, (entropy / np.log(logits.shape[-1])).clamp(0, 1)
