"""Episodes scored by a reward model, with the verifier's verdict kept beside as the gold figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.environments.rewards import GOLD, VERIFIER
from perilune.errors import RequestError
from perilune.learn.reward_model import score
from perilune.models.reward_model import RewardModel, load_reward_model
from perilune.models.tokenizer import Tokenizer
from perilune.tasks.rollouts import Groups


@dataclass(frozen=True)
class LearnedReward:
    """The reward of an episode: `learned` + `verifier_weight` * `verifier`, both among its reward terms."""

    model: RewardModel
    verifier_weight: float
    token_budget: int

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        device: torch.device,
        tokenizer: Tokenizer,
        verifier_weight: float,
        token_budget: int,
    ) -> LearnedReward | None:
        """The reward model that the stage consumes; None when it consumes none.

        Raises:
            RequestError: when it reads other tokens than the policy writes.
        """
        if not workspace.has_input("reward_model"):
            return None
        model, its_tokenizer = load_reward_model(workspace.input("reward_model"), device)
        if not its_tokenizer.has_tokens_of(tokenizer):
            raise RequestError(
                "the reward model reads other tokens than the policy writes",
                where="reward_model",
                remedy="train it on a checkpoint of the same model family",
            )
        return cls(model, verifier_weight, token_budget)

    def rescore(self, groups: Groups) -> Groups:
        """The groups with the model's rewards. An episode whose verifier failed stays a failure."""
        judged = [one for group in groups for one in group if one.reward is not None]
        scores = score(self.model, judged, self.token_budget)
        found = {one.episode_id: float(learned) for one, learned in zip(judged, scores, strict=True)}
        return [tuple(self._rescored(one, found.get(one.episode_id)) for one in group) for group in groups]

    def _rescored(self, episode: Episode, learned: float | None) -> Episode:
        verdict = episode.reward
        if verdict is None or learned is None:
            return episode
        return replace(
            episode,
            reward=learned + self.verifier_weight * verdict,
            reward_terms={VERIFIER: verdict, **episode.reward_terms, "learned": learned},
            metrics={GOLD: verdict, **episode.metrics},
        )


def kl_from_start(
    episodes: Sequence[Episode], start_logprobs: Sequence[np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> float:
    """KL(policy || start) in nats an episode: mean over episodes of the sum over tokens of k3.

    k3 = exp(-x) - 1 + x with x = log-prob of the policy less that of the start; unbiased and never negative.
    """
    sums = []
    for one, start in zip(episodes, start_logprobs, strict=True):
        x = np.clip((one.logprobs.astype(np.float64) - start)[one.loss_mask], -20, 20)
        sums.append(float(np.sum(np.expm1(-x) + x)))
    return sum(sums) / len(sums)
