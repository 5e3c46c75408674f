"""Training and using a reward model: the better answer of each pair should score higher.

Bradley-Terry: -log sigmoid(s_chosen - s_rejected), s the score at the answer's last token. Scores are free up
to a constant for each prompt; `centre` pulls their mean to 0 (Eisenstein et al., arXiv 2312.09244), so that
scores of different prompts can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.episode import Episode
from perilune.learn.batch import PackedBatch, Pair, pack_each
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.preference import correlation
from perilune.learn.trainer import predicting_states
from perilune.models.reward_model import RewardModel


def bradley_terry(chosen: Tensor, rejected: Tensor, centre: float = 0.0) -> Tensor:
    """Loss of each pair, float[B], of scores float[B]."""
    return -F.logsigmoid(chosen - rejected) + centre * (chosen + rejected) ** 2


def read_at_end(episode: Episode) -> Episode:
    """The episode as a reward model reads it: the one learned position is after its last token.

    Packing feeds all tokens but the last, and hands out the state that would predict the last one; behind a
    token that stands for nothing this is the state at the answer's end.
    """
    ids = episode.token_ids
    length = len(ids) + 1
    return replace(
        episode,
        token_ids=np.append(ids, ids[-1:] if len(ids) else episode.prompt_ids[-1:]).astype(np.int32),
        loss_mask=np.arange(length) == length - 1,
        logprobs=np.zeros(length, np.float32),
        policy_version=np.zeros(length, np.int32),
        step_rewards=None,
        routed_experts=None,
    )


@dataclass
class RewardObjective:
    """The loss of one step of `count` pairs, for `Learner.forward_backward_custom`; remembers its scores.

    Attributes:
        model: the learner's `trained`.
        ranks: the learner's: each scores some of the pairs, and figures are of all.
    """

    model: RewardModel
    count: int
    centre: float = 0.0
    ranks: Ranks = SINGLE_RANK

    def __post_init__(self) -> None:
        self._scores: list[Tensor] = []

    def __call__(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The batch's share of the mean over the step's pairs."""
        scores = self.model.rewards(hidden).view(-1, 2)
        self._scores.append(scores.detach())
        return bradley_terry(scores[:, 0], scores[:, 1], self.centre).sum() / self.count, {}

    def figures(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """`score_figures` of the pairs seen so far."""
        own = [scores.double().cpu().numpy() for scores in self._scores]
        return score_figures(np.concatenate(self.ranks.all_gather_arrays("scores", own)), pairs)


def score_figures(scores: NDArray[np.float64], pairs: Sequence[Pair]) -> dict[str, float]:
    """How well scores float64[B, 2] (chosen, rejected) tell the pairs apart, and whether length would do.

    Returns:
        accuracy; margin, and score (means); length_correlation of the difference in length with that in
        score, when both vary: a reward model that likes long answers will make them.
    """
    margin = scores[:, 0] - scores[:, 1]
    longer = np.array([len(chosen.token_ids) - len(rejected.token_ids) for chosen, rejected in pairs], float)
    figures = {
        "accuracy": float((margin > 0).mean()),
        "margin": float(margin.mean()),
        "score": float(scores.mean()),
    }
    found = correlation(longer, margin)
    return figures if found is None else figures | {"length_correlation": found}


@torch.no_grad()
def score_pairs(model: RewardModel, pairs: Sequence[Pair], token_budget: int) -> NDArray[np.float64]:
    """Scores float64[B, 2] of (chosen, rejected)."""
    return score(model, [one for pair in pairs for one in pair], token_budget).reshape(-1, 2)


@torch.no_grad()
def score(model: RewardModel, episodes: Sequence[Episode], token_budget: int) -> NDArray[np.float64]:
    """Scores float64[episodes], in the order given; an empty answer is scored at its prompt's end."""
    device = next(model.parameters()).device
    found: list[float] = []
    pending = [read_at_end(one) for one in episodes]
    for batch in pack_each(pending, token_budget):
        moved = batch.to(device)
        found += model.rewards(predicting_states(model, moved)).double().tolist()
    return np.array(found)


def as_read(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs as a reward model reads them."""
    return [(read_at_end(chosen), read_at_end(rejected)) for chosen, rejected in pairs]
