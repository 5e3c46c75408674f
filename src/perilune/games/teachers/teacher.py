"""Game teachers: the protocol, drawing a move, and the teachers that need no solution of the game."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.games.open_spiel_match import Match, load_pyspiel, sample_action

UCT_EXPLORATION = 2.0
SEARCH_MEMORY_MB = 16


class GameTeacher(Protocol):
    """Plays one OpenSpiel game.

    Attributes:
        name: the name in a recipe, such as "cfr".
    """

    name: str

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return the probabilities of legal actions, given what `player` knows in `state`. They sum to 1.

        Args:
            state: a pyspiel state in which `player` moves.
            seed: for random draws. The same state and seed give the same probabilities.
        """


class Move(NamedTuple):
    """An action and its probability."""

    action: int
    probability: float


def choose_move(teacher: GameTeacher, match: Match, rng: KeyedRandom, *, greedy: bool = False) -> Move:
    """Draw the teacher's move for the player to move. The turn alone determines the random number.

    Args:
        greedy: take the most probable move (the first of several) instead of drawing one.
    """
    point = rng.uniform(*match.turn)
    policy = teacher.probabilities(match.state, match.player, int(point * (1 << 31)))
    actions = tuple(sorted(policy))
    if greedy:
        action = max(actions, key=lambda action: policy[action])
    else:
        action = sample_action(actions, tuple(policy[action] for action in actions), point)
    return Move(action, float(policy[action]))


class UniformTeacher:
    """Plays random legal moves: the baseline for every teacher."""

    name = "random"

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return equal probabilities for all legal actions."""
        legal = state.legal_actions(player)
        return dict.fromkeys(legal, 1.0 / len(legal))


class EpsilonTeacher:
    """Plays a random legal move with probability `epsilon`, otherwise the teacher's: an imperfect player."""

    def __init__(self, teacher: GameTeacher, epsilon: float) -> None:
        self.name = teacher.name
        self._teacher, self._epsilon = teacher, epsilon

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return the teacher's probabilities, mixed with equal probabilities for all legal actions."""
        own, legal = self._teacher.probabilities(state, player, seed), state.legal_actions(player)
        chance = self._epsilon / len(legal)
        return {action: (1 - self._epsilon) * own.get(action, 0.0) + chance for action in legal}


class SearchTeacher:
    """OpenSpiel's tree search with random rollouts (UCT; Kocsis and Szepesvari 2006).

    Each move has a new tree. Position and seed determine the move.

    Args:
        simulations: simulations per move, each with one rollout.
    """

    name = "mcts"

    def __init__(self, simulations: int) -> None:
        self._simulations = simulations

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        spiel = load_pyspiel()
        rollouts = spiel.RandomRolloutEvaluator(1, seed)
        bot = spiel.MCTSBot(
            state.get_game(),
            rollouts,
            UCT_EXPLORATION,
            self._simulations,
            SEARCH_MEMORY_MB,
            True,
            seed,
            False,
        )
        return {int(bot.step(state)): 1.0}


class GinRummyTeacher:
    """OpenSpiel's simple bot for gin rummy, which follows heuristic rules.

    It takes the upcard if it makes a meld, discards the card that leaves the least deadwood, and knocks as
    soon as possible. It beats random play. It is not an equilibrium; none is known for a game with about
    10^171 histories.
    """

    name = "rules"

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return probability 1 for the move of the rules.

        After a knock, the bot plans the melds that it lays down and keeps its plan. So this repeats its
        decisions since the knock, and the move depends only on what the player has seen.
        """
        spiel = load_pyspiel()
        game = state.get_game()
        bot = spiel.make_simple_gin_rummy_bot(game.get_parameters(), player)
        history = [int(action) for action in state.history()]
        knock = int(spiel.gin_rummy.KNOCK_ACTION)
        if knock in history:
            earlier = game.new_initial_state()
            for index, action in enumerate(history):
                if index >= history.index(knock) and earlier.current_player() == player:
                    bot.step(earlier)
                earlier.apply_action(action)
        return {int(bot.step(state)): 1.0}
