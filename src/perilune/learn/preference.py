"""Preference losses: DPO and IPO, and the figures that show when they go wrong.

With r = sum_t (log-prob - reference log-prob) of a completion of L tokens,

    DPO       -log sigmoid(beta (r_chosen - r_rejected))         Rafailov et al., arXiv 2305.18290, eq. 7
    DPO_norm  the same with r / L, which removes the influence of length
    IPO       (r_chosen / L_chosen - r_rejected / L_rejected - 1 / (2 beta))^2

IPO (Azar et al., arXiv 2310.12036, eq. 17) uses means per token and the name beta for tau, as TRL does.

These losses constrain only the difference, so the log-probs of both answers can fall while the loss falls
(likelihood displacement, arXiv 2410.08847). Two terms prevent this: `nll` adds the cross-entropy of the
chosen answer per token, and `dpop` subtracts dpop * max(0, -r_chosen) from r_chosen (DPOP, arXiv 2402.13228,
eq. 3).

B is the number of pairs, M that of learned tokens. A pair is two episodes of one prompt, the chosen one
first. Their `logprobs` are those of the frozen reference, which are computed once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.learn.batch import PackedBatch, Pair, pack_pairs, scatter_to_sampled
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.trainer import predicting_states, target_logprobs, token_logprobs
from perilune.models.decoder import Decoder

PreferenceLoss = Literal["dpo", "dpo_norm", "ipo"]

COLLAPSE_SHIFT = -0.05  # nats per token that chosen answers may lose while margins grow


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Sums over each completion, all float[B]: log-probs of policy and reference, and lengths in tokens."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    length_chosen: Tensor
    length_rejected: Tensor

    @property
    def chosen_shift(self) -> Tensor:
        """r of the chosen completions, in nats."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_shift(self) -> Tensor:
        """r of the rejected completions, in nats."""
        return self.rejected - self.reference_rejected


def preference_loss(
    pairs: PairLogprobs, kind: PreferenceLoss, beta: float, *, nll: float = 0.0, dpop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return losses float[B] and margins float[B].

    The margin is the argument of DPO's sigmoid, or for IPO the difference of the means of r per token, both
    without `dpop`.
    """
    chosen, rejected = pairs.chosen_shift, pairs.rejected_shift
    if kind in ("ipo", "dpo_norm"):
        chosen, rejected = chosen / pairs.length_chosen, rejected / pairs.length_rejected
    difference = chosen - rejected
    limited = difference - dpop * (-chosen).clamp(min=0)
    loss = (limited - 1 / (2 * beta)) ** 2 if kind == "ipo" else -F.logsigmoid(beta * limited)
    cross_entropy = -pairs.chosen / pairs.length_chosen
    return loss + nll * cross_entropy, difference if kind == "ipo" else beta * difference


def is_collapsing(chosen_shift_per_token: float, margin: float) -> bool:
    """Return whether chosen answers become less likely although the margin grows.

    Args:
        chosen_shift_per_token: mean of (log-prob - reference log-prob) / L over chosen answers, in nats.
        margin: mean margin, 0 at the start.
    """
    return chosen_shift_per_token < COLLAPSE_SHIFT and margin > 0


def pair_logprobs(batch: PackedBatch, logprobs: Tensor) -> PairLogprobs:
    """Sum log-probs float[M] over the completions of a batch of `pack_pairs`."""
    count = len(batch.prefix_of) - int((batch.prefix_of < 0).sum())

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_add(0, batch.episode_of, values)

    now, reference = sums(logprobs), sums(batch.old_logprobs.to(logprobs.dtype))
    lengths = sums(torch.ones_like(logprobs.detach()))
    return PairLogprobs(now[::2], now[1::2], reference[::2], reference[1::2], lengths[::2], lengths[1::2])


@dataclass
class PreferenceObjective:
    """The loss of one step of `count` pairs, for `Learner.forward_backward_custom`, with its figures.

    Attributes:
        decoder: the learner's `trained`, or any decoder to evaluate without learning.
        ranks: the learner's ranks. Each rank sees a share of the pairs; figures are over all pairs.
    """

    decoder: Decoder
    kind: PreferenceLoss
    beta: float
    count: int
    nll: float = 0.0
    dpop: float = 0.0
    ranks: Ranks = SINGLE_RANK

    def __post_init__(self) -> None:
        self._seen: list[Tensor] = []

    def __call__(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the batch's share of the mean over the step's pairs."""
        logprobs, _ = target_logprobs(self.decoder, batch, hidden)
        pairs = pair_logprobs(batch, logprobs)
        losses, margins = preference_loss(pairs, self.kind, self.beta, nll=self.nll, dpop=self.dpop)
        shifts, lengths = (
            (pairs.chosen_shift, pairs.rejected_shift),
            (pairs.length_chosen, pairs.length_rejected),
        )
        self._seen.append(torch.stack([margins, *shifts, *lengths, pairs.chosen]).detach().double().cpu())
        return losses.sum() / self.count, {}

    @property
    def largest_shift(self) -> float:
        """Largest |r| / L of an answer so far, in nats per token; 0 if policy and reference are equal."""
        _, chosen, rejected, length_chosen, length_rejected, _ = self._gathered()
        return float(np.abs(np.concatenate([chosen / length_chosen, rejected / length_rejected])).max())

    def figures(self) -> dict[str, float]:
        """Return the `pair_figures` of the pairs so far."""
        return pair_figures(self._gathered(), self.beta)

    def _gathered(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return the pairs' figures as float64[6, B], in the order of the pairs."""
        parts = self.ranks.all_gather_arrays("pairs", [part.numpy() for part in self._seen])
        return np.concatenate(parts, axis=1)


def pair_figures(seen: np.ndarray[tuple[int, int], np.dtype[np.float64]], beta: float) -> dict[str, float]:
    """Compute means over pairs.

    Args:
        seen: float64[6, B]: margin, r chosen, r rejected, L chosen, L rejected, log-prob chosen.

    Returns:
        accuracy (margin > 0), margin; reward_chosen, reward_rejected (beta r); chosen_shift (nats per token),
        chosen_below (share of pairs whose chosen answer is less likely than under the reference), chosen_nll
        (nats per token); length_correlation of L_chosen - L_rejected with the margin, if both vary; collapse,
        0 or 1.
    """
    margin, chosen, rejected, length_chosen, length_rejected, logprob = seen
    shift = float((chosen / length_chosen).mean())
    figures = {
        "accuracy": float((margin > 0).mean()),
        "margin": float(margin.mean()),
        "reward_chosen": beta * float(chosen.mean()),
        "reward_rejected": beta * float(rejected.mean()),
        "chosen_shift": shift,
        "chosen_below": float((chosen < 0).mean()),
        "chosen_nll": float((-logprob / length_chosen).mean()),
    }
    with_length = correlation(length_chosen - length_rejected, margin)
    if with_length is not None:
        figures["length_correlation"] = with_length
    figures["collapse"] = float(is_collapsing(shift, figures["margin"]))
    return figures


@torch.no_grad()
def evaluate_pairs(
    objective: PreferenceObjective, pairs: Sequence[Pair], token_budget: int
) -> dict[str, float]:
    """Return loss and figures of held-out pairs, without learning."""
    device = next(objective.decoder.parameters()).device
    losses = [
        float(objective(batch, predicting_states(objective.decoder, batch))[0])
        for batch in (batch.to(device) for batch in pack_pairs(pairs, token_budget))
    ]
    return {"loss": math.fsum(losses), **objective.figures()}


def add_reference_to_pairs(
    pairs: Sequence[Pair], reference: Decoder, token_budget: int, ranks: Ranks = SINGLE_RANK
) -> list[Pair]:
    """Return the pairs with the log-probs of a frozen `reference` in their `logprobs`.

    Each rank computes a share of the micro-batches, and all ranks receive all log-probs.
    """
    batches = pack_pairs(pairs, token_budget)
    own = [token_logprobs(reference, batch).cpu().numpy() for batch in ranks.shard(batches)]
    logprobs = ranks.all_gather_arrays("reference log-probs", own)
    parts = [
        part
        for batch, values in zip(batches, logprobs, strict=True)
        for _, part in batch.split_by_episode(torch.from_numpy(values))
    ]
    episodes = [episode for pair in pairs for episode in pair]
    scored = [
        replace(episode, logprobs=scatter_to_sampled(episode, part))
        for episode, part in zip(episodes, parts, strict=True)
    ]
    return list(zip(scored[::2], scored[1::2], strict=True))


def correlation(
    a: np.ndarray[tuple[int], np.dtype[np.float64]], b: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float | None:
    """Return Pearson's correlation, or None if one of the two does not vary."""
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(math.fsum(a * a) * math.fsum(b * b))
    return math.fsum(a * b) / scale if scale > 1e-12 else None
