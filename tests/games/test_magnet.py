"""Exact policy gradients of tabular softmax policies in Kuhn poker, with and without a magnet."""

from typing import Any

import numpy as np
import pyspiel
import pytest

GAME = pyspiel.load_game("kuhn_poker")


class Tabular:
    """Logits float64[states, 2] of both players, in a game with two actions in every state."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self._tree = self._build(GAME.new_initial_state())
        self.logits = np.zeros((len(self.rows), 2))

    def _build(self, state: Any) -> tuple[Any, ...]:
        if state.is_terminal():
            return ("end", np.array(state.returns()))
        if state.is_chance_node():
            return ("chance", [(p, self._build(state.child(a))) for a, p in state.chance_outcomes()])
        row = self.rows.setdefault(state.information_state_string(), len(self.rows))
        children = [self._build(state.child(action)) for action in state.legal_actions()]
        return (state.current_player(), children, row)

    @property
    def policy(self) -> np.ndarray:
        raised = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)

    def gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each player's policy gradient float64[states, 2], reach float64[states], and the values[2]."""
        policy, gradient = self.policy, np.zeros_like(self.logits)
        reached = np.zeros(len(self.rows))

        def visit(node: tuple[Any, ...], reach: float) -> np.ndarray:
            if node[0] == "end":
                return node[1]
            if node[0] == "chance":
                return sum((p * visit(child, reach * p) for p, child in node[1]), np.zeros(2))
            player, children, row = node
            values = [visit(child, reach * p) for p, child in zip(policy[row], children, strict=True)]
            value = sum((p * v for p, v in zip(policy[row], values, strict=True)), np.zeros(2))
            gradient[row] += reach * policy[row] * [child[player] - value[player] for child in values]
            reached[row] += reach
            return value

        return gradient, reached, visit(self._tree, 1.0)

    def exploitability(self) -> float:
        table = {name: list(enumerate(map(float, self.policy[row]))) for name, row in self.rows.items()}
        return float(pyspiel.nash_conv(GAME, pyspiel.TabularPolicy(table))) / 2

    def train(self, steps: int, *, kl: float, every: int = 0, lr: float = 3.0) -> None:
        """Ascend the return minus `kl` times KL(policy, magnet); the magnet moves every `every` steps."""
        for step in range(steps):
            policy = self.policy
            if step == 0 or (every and step % every == 0):
                magnet = policy
            ratio = np.log(policy / magnet)
            pull = policy * (ratio - (policy * ratio).sum(axis=1, keepdims=True))
            gradient, reached, _ = self.gradients()
            self.logits += lr * (gradient - kl * reached[:, None] * pull)


def equilibrium() -> Tabular:
    """Kuhn's equilibrium with alpha 0.2, mixed with 2% of chance so that all logits are finite."""
    bets = {
        "0": 0.2, "1": 0.0, "2": 0.6, "0pb": 0.0, "1pb": 0.2 + 1 / 3, "2pb": 1.0,
        "0p": 1 / 3, "1p": 0.0, "2p": 1.0, "0b": 0.0, "1b": 1 / 3, "2b": 1.0,
    }  # fmt: skip
    policy = Tabular()
    for name, bet in bets.items():
        mixed = 0.98 * bet + 0.01
        policy.logits[policy.rows[name]] = np.log([1 - mixed, mixed])
    return policy


def test_moving_magnet_converges_to_the_equilibrium() -> None:
    played = Tabular()
    began = played.exploitability()
    played.train(256, kl=0.2, every=32)
    assert began == pytest.approx(11 / 24) and played.exploitability() < 0.01
    assert played.gradients()[2] == pytest.approx([-1 / 18, 1 / 18], abs=0.003)


def test_training_without_magnet_stays_away_from_the_equilibrium() -> None:
    played, values = Tabular(), []
    for _ in range(8):
        played.train(32, kl=0)
        values.append(played.exploitability())
    assert min(values) > 0.05


def test_fixed_magnet_converges_to_another_point() -> None:
    """The regularized game shares the equilibrium of the game only if the magnet is an equilibrium."""
    played = Tabular()
    played.train(256, kl=0.2)
    assert 0.03 < played.exploitability() < 0.06


def test_magnet_keeps_an_equilibrium_that_plain_training_leaves() -> None:
    alone, pulled = equilibrium(), equilibrium()
    began = alone.exploitability()
    alone.train(256, kl=0)
    pulled.train(256, kl=0.2, every=32)
    assert alone.exploitability() > 3 * began and pulled.exploitability() < began
