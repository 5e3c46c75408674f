"""Sums the rewards, terms and metrics of an episode."""

from dataclasses import dataclass, field

from perilune.environments.core.protocol import Observation, Score


@dataclass(slots=True)
class EpisodeTotals:
    """Rewards by player, terms and metrics of an episode so far."""

    players: int
    rewards: list[float] = field(init=False)
    terms: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rewards = [0.0] * self.players

    def add(self, observation: Observation) -> None:
        """Add the result of one step.

        Raises:
            ValueError: if the number of rewards is not the number of players.
        """
        if observation.rewards and len(observation.rewards) != self.players:
            raise ValueError(f"{len(observation.rewards)} rewards for {self.players} players")
        for player, reward in enumerate(observation.rewards):
            self.rewards[player] += reward
        for name, value in observation.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        self.metrics |= observation.metrics

    def score(self, player: int = 0) -> Score:
        """Return the score of one player."""
        return Score(self.rewards[player], dict(self.terms), dict(self.metrics))
