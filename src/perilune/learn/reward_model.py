"""Training and using a reward model, which scores the better answer of each pair higher.

The loss is Bradley-Terry: -log sigmoid(s_chosen - s_rejected), with s the score at the answer's last token.
It does not depend on a constant added to all scores of a prompt. `centre` pulls the mean score to 0
(Eisenstein et al., arXiv 2312.09244), so that scores of different prompts can be compared.
"""

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
    """Compute the loss of each pair, float[B], from scores float[B]."""
    return -F.logsigmoid(chosen - rejected) + centre * (chosen + rejected) ** 2


def append_scored_token(episode: Episode) -> Episode:
    """Append an arbitrary token as the only learned one, so that a reward model scores the episode's end.

    Packing feeds all tokens except the last, and the reward model scores the state that predicts the learned
    token. With the appended token, this is the state at the end of the answer.
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
        top_ids=None,
        top_logprobs=None,
    )


@dataclass
class RewardObjective:
    """The loss of one step of `count` pairs, for `Learner.forward_backward_custom`, with the scores.

    Attributes:
        ranks: the learner's ranks. Each rank scores a share of the pairs; figures are over all pairs.
    """

    model: RewardModel
    count: int
    centre: float = 0.0
    ranks: Ranks = SINGLE_RANK

    def __post_init__(self) -> None:
        self._scores: list[Tensor] = []

    def __call__(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the batch's share of the mean over the step's pairs."""
        scores = self.model.rewards(hidden).view(-1, 2)
        self._scores.append(scores.detach())
        return bradley_terry(scores[:, 0], scores[:, 1], self.centre).sum() / self.count, {}

    def figures(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Return the `score_figures` of the pairs so far."""
        own = [scores.double().cpu().numpy() for scores in self._scores]
        return score_figures(np.concatenate(self.ranks.all_gather_arrays("scores", own)), pairs)


def score_figures(scores: NDArray[np.float64], pairs: Sequence[Pair]) -> dict[str, float]:
    """Compute figures of scores float64[B, 2] (chosen, rejected).

    Returns:
        accuracy; mean margin and mean score; length_correlation between the differences in length and in
        score, if both vary: a reward model that prefers long answers makes the policy write them.
    """
    margin = scores[:, 0] - scores[:, 1]
    longer = np.array([len(chosen.token_ids) - len(rejected.token_ids) for chosen, rejected in pairs], float)
    figures = {
        "accuracy": float((margin > 0).mean()),
        "margin": float(margin.mean()),
        "score": float(scores.mean()),
    }
    with_length = correlation(longer, margin)
    return figures if with_length is None else figures | {"length_correlation": with_length}


@torch.no_grad()
def score_pairs(model: RewardModel, pairs: Sequence[Pair], token_budget: int) -> NDArray[np.float64]:
    """Return scores float64[B, 2] of (chosen, rejected)."""
    return score(model, [episode for pair in pairs for episode in pair], token_budget).reshape(-1, 2)


@torch.no_grad()
def score(model: RewardModel, episodes: Sequence[Episode], token_budget: int) -> NDArray[np.float64]:
    """Return scores float64[episodes]; an empty answer is scored at the end of its prompt."""
    device = next(model.parameters()).device
    scores: list[float] = []
    for batch in pack_each([append_scored_token(episode) for episode in episodes], token_budget):
        scores += model.rewards(predicting_states(model, batch.to(device))).double().tolist()
    return np.array(scores)


def append_scored_tokens(pairs: Sequence[Pair]) -> list[Pair]:
    """Apply `append_scored_token` to both episodes of each pair."""
    return [(append_scored_token(chosen), append_scored_token(rejected)) for chosen, rejected in pairs]
