"""Rewards from a reward model; the verifier's score is kept as the gold score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perilune.data.episode import Episode
from perilune.environments.core.rewards import GOLD_METRIC, VERIFIER_TERM
from perilune.errors import RequestError
from perilune.learn.reward_model import score
from perilune.models.reward_model import RewardModel, load_reward_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import Groups


@dataclass(frozen=True)
class LearnedReward:
    """The reward is `learned` + `verifier_weight` * `verifier`; both are reward terms of the episode."""

    model: RewardModel
    verifier_weight: float
    token_budget: int

    @classmethod
    def load(
        cls, path: Path, device: torch.device, tokenizer: Tokenizer, verifier_weight: float, token_budget: int
    ) -> LearnedReward:
        """Load the reward model at `path`.

        Raises:
            RequestError: when its vocabulary differs from that of `tokenizer`, the policy's.
        """
        model, own_tokenizer = load_reward_model(path, device)
        if not own_tokenizer.has_same_tokens(tokenizer):
            raise RequestError(
                "the reward model and the policy have different vocabularies",
                where="reward_model",
                remedy="train it on a checkpoint of the same model family",
            )
        return cls(model, verifier_weight, token_budget)

    def rescore(self, groups: Groups) -> Groups:
        """Return the groups with the model's rewards. Failed episodes stay failed."""
        scored = [episode for group in groups for episode in group if episode.reward is not None]
        scores = score(self.model, scored, self.token_budget)
        learned = {episode.episode_id: float(value) for episode, value in zip(scored, scores, strict=True)}
        return [
            tuple(self._rescore_episode(episode, learned.get(episode.episode_id)) for episode in group)
            for group in groups
        ]

    def _rescore_episode(self, episode: Episode, learned: float | None) -> Episode:
        verdict = episode.reward
        if verdict is None or learned is None:
            return episode
        return replace(
            episode,
            reward=learned + self.verifier_weight * verdict,
            reward_terms={VERIFIER_TERM: verdict, **episode.reward_terms, "learned": learned},
            metrics={GOLD_METRIC: verdict, **episode.metrics},
        )
