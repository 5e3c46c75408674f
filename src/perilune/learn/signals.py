"""Figures a token that take a forward pass: what algorithms and corrections ask to know before they weigh.

All are of the policy as it is when a step begins, and carry no gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.learn.algorithms.base import Group, Signal, Signals, StepContext
from perilune.learn.algorithms.sft import SFT
from perilune.learn.batch import PackedBatch, pack, round_up
from perilune.learn.critic import Critic
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.trainer import predicting_states, target_logprobs
from perilune.models.decoder import Decoder

ROWS = 1024  # distributions of two policies that are held at a time


@torch.no_grad()
def observe(
    names: Collection[Signal],
    groups: Sequence[Group],
    decoder: Decoder,
    *,
    token_budget: int,
    temperature: float = 1.0,
    reference: Decoder | None = None,
    critic: Critic | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Signals:
    """The named signals of all judged episodes; nothing is computed when `names` is empty.

    Of several processes each computes some, and all are given all.

    Raises:
        RequestError: when a signal needs a reference or a critic and there is none.
        ValueError: when two episodes have the same id.
    """
    if not names:
        return {}
    if reference is None and {"deviation", "uncertainty", "reference_logprobs"} & set(names):
        raise RequestError("the distance to a reference policy without one")
    if critic is None and {"values", "values_after"} & set(names):
        raise RequestError("values without a critic")
    if "values_after" in names:
        cut = [[_one_more(one) for one in group if one.truncated and one.loss_mask.any()] for group in groups]
        options: dict[str, Any] = {"token_budget": token_budget, "critic": critic, "ranks": ranks}
        later = observe({"values"}, cut, decoder, **options)["values"]
        rest = observe(
            {*names} - {"values_after"}, groups, decoder,
            temperature=temperature, reference=reference, **options,
        )  # fmt: skip
        return {**rest, "values_after": {key: values[-1:] for key, values in later.items()}}
    found: dict[Signal, dict[str, np.ndarray]] = {name: {} for name in names}
    by_id = {episode.episode_id: episode for group in groups for episode in group}
    if len(by_id) < sum(map(len, groups)):
        raise ValueError("two episodes of a step have the same id")
    everything = SFT().weight_groups(groups, StepContext(max_tokens=0))
    device = next(decoder.parameters()).device
    batches = pack(everything, token_budget, temperature=temperature)
    own = [
        torch.stack([*_tokens(list(found), batch.to(device), decoder, reference, critic).values()])
        .cpu()
        .numpy()
        for batch in ranks.shard(batches)
    ]
    for batch, rows in zip(batches, ranks.all_gather_arrays("signals", own), strict=True):
        ends = torch.bincount(batch.episode_of).cumsum(0).tolist()
        for name, values in zip(found, rows, strict=True):
            for key, part in zip(batch.episode_ids, np.split(values, ends[:-1]), strict=True):
                mask = by_id[key].loss_mask
                found[name][key] = np.zeros(len(mask), np.float32)
                found[name][key][mask] = part
    return found


def _one_more(one: Episode) -> Episode:
    """An episode with one more token, whichever: the state before it is the one that was cut off."""
    return replace(
        one,
        token_ids=np.append(one.token_ids, one.token_ids[-1]),
        loss_mask=np.append(one.loss_mask, True),
        logprobs=np.append(one.logprobs, np.float32(0)),
        policy_version=np.append(one.policy_version, one.policy_version[-1]),
        step_rewards=None,
    )


def _tokens(
    names: Collection[Signal],
    batch: PackedBatch,
    decoder: Decoder,
    reference: Decoder | None,
    critic: Critic | None,
) -> Mapping[Signal, Tensor]:
    """float32[M] of each signal."""
    states = predicting_states(decoder, batch)
    found: dict[Signal, Tensor] = {}
    if "logprobs" in names:
        found["logprobs"] = target_logprobs(decoder, batch, states)[0]
    if critic is not None and "values" in names:
        found["values"] = critic(states)
    if reference is not None and {"deviation", "uncertainty", "reference_logprobs"} & set(names):
        theirs = predicting_states(reference, batch)
        if "reference_logprobs" in names:
            found["reference_logprobs"] = target_logprobs(reference, batch, theirs)[0]
        if {"deviation", "uncertainty"} & set(names):
            learned = len(states)
            parts = list(_compare(decoder, states, reference, theirs, batch.temperature))
            whole = (torch.cat(part)[:learned] for part in zip(*parts, strict=True))
            found["deviation"], found["uncertainty"] = whole
    return {name: found[name] for name in names}


def _compare(
    decoder: Decoder, states: Tensor, reference: Decoder, theirs: Tensor, temperature: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Deviation and uncertainty of some rows at a time, for two distributions over the vocabulary are large.

    There are as many rows as `round_up` says.
    """
    missing = round_up(len(states)) - len(states)
    states, theirs = (F.pad(one, (0, 0, 0, missing)) for one in (states, theirs))
    for mine, other in zip(torch.split(states, ROWS), torch.split(theirs, ROWS), strict=True):
        yield deviation_and_uncertainty(
            decoder.logits(mine).float() / temperature, reference.logits(other).float() / temperature
        )


def deviation_and_uncertainty(logits: Tensor, reference_logits: Tensor) -> tuple[Tensor, Tensor]:
    """float[M] each, in [0, 1]: 1 - sum sqrt(p q), the squared Hellinger distance, and H(p) / log V."""
    p, q = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    deviation = (1 - ((p + q) / 2).exp().sum(-1)).clamp(0, 1)
    entropy = -(p.exp() * p).sum(-1)
    return deviation, (entropy / np.log(logits.shape[-1])).clamp(0, 1)
