"""Games of OpenSpiel, in words, against oneself, chance or search.

https://github.com/google-deepmind/open_spiel (Apache-2.0); Lanctot et al. 2019, arXiv:1908.09453.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.chance import Chance
from perilune.environments.multi_turn import MultiTurn, Play, ask, over
from perilune.environments.open_spiel_text import game_text, move_text
from perilune.environments.protocol import Observation, Split, Task
from perilune.environments.registry import did_you_mean
from perilune.errors import RequestError

HELD_OUT_PARTS = 10  # one tenth of all deals is held out
UCT = 2.0  # exploration of the search
MEMORY_MB = 16  # of one search

Choice = Generator[Observation, str, int | None]


class OpenSpielSpec(BaseModel):
    """The environment section of a recipe, for `id: open_spiel`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["open_spiel"] = Field("open_spiel", description="which environment this is")
    game: str = Field(description="OpenSpiel's name of a game, e.g. tic_tac_toe")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's own, e.g. {num_cards: 4}"
    )
    opponent: Literal["self", "random", "mcts"] = Field(
        "self", description="who has the other seats: the policy, chance, or OpenSpiel's tree search"
    )
    simulations: int = Field(50, ge=2, le=10_000, description="of a move of the search")
    illegal_move: Literal["loses", "ends"] = Field(
        "loses",
        description="who makes one loses as much as the game can cost; or the game ends without rewards",
    )
    list_moves: bool = Field(True, description="whether a player is shown the legal moves")


class OpenSpielEnvironment(MultiTurn):
    """One game; rewards are its returns, at the end. Against an opponent, the policy's seat changes by task.

    Raises:
        RequestError: when OpenSpiel is not installed, or has no such game, or it cannot be told or searched.
    """

    Spec = OpenSpielSpec

    def __init__(self, spec: OpenSpielSpec) -> None:
        self.spec = spec
        self.id = f"open_spiel/{spec.game}"
        self._game = game = _loaded(spec)
        self._text = game_text(game)
        self.players = game.num_players() if spec.opponent == "self" else 1
        at_once = game.get_type().dynamics == _pyspiel().GameType.Dynamics.SIMULTANEOUS
        self.max_turns = int(game.max_game_length()) * (self.players if at_once else 1)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Deals without end; where the game deals nothing, further games against other luck."""
        prompt = ({"role": "user", "content": self._text.rules},)
        for number in range(sys.maxsize):
            task_id = hashlib.sha256(f"{self.id}/{seed}/{number}".encode()).hexdigest()[:32]
            if (int(task_id[:8], 16) % HELD_OUT_PARTS == 0) == (split == "heldout"):
                yield Task(task_id, prompt, {"seat": int(task_id[8:16], 16) % self._game.num_players()})

    def play(self, task: Task, chance: Chance) -> Play:
        """The game to its end, or to the first illegal move."""
        state = self._game.new_initial_state()
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(_drawn(state, chance))
                continue
            at_once = state.is_simultaneous_node()
            chosen = []
            for player in range(state.num_players()) if at_once else (state.current_player(),):
                action = yield from self._choice(state, player, task, chance)
                if action is None:
                    yield self._illegal(player, task)
                    return
                chosen.append(action)
            state.apply_actions(chosen) if at_once else state.apply_action(*chosen)
        yield self._over(state.returns(), task)

    def _choice(self, state: Any, player: int, task: Task, chance: Chance) -> Choice:
        """The action of `player`; None for an illegal one."""
        legal = state.legal_actions(player)
        name = ("move", player, len(state.full_history()))
        if self.spec.opponent == "random" and player != task.data["seat"]:
            return int(chance.choice(legal, *name))
        if self.spec.opponent == "mcts" and player != task.data["seat"]:
            return _searched(state, self.spec.simulations, chance.integer(1 << 31, *name))
        told, moves = self.told(state, player)
        said = yield ask(told, player=player if self.spec.opponent == "self" else 0, legal=tuple(moves))
        return moves.get(said.strip())

    def told(self, state: Any, player: int) -> tuple[str, dict[str, int]]:
        """What the player to move is told of a state of pyspiel; and the legal moves, as it writes them."""
        moves = {move_text(state, player, action): action for action in state.legal_actions(player)}
        between = " | " if any(" " in move for move in moves) else " "
        listed = f"moves {between.join(moves)}\n" if self.spec.list_moves else ""
        return f"{self._text.view(state, player)}\n{listed}", moves

    def _illegal(self, player: int, task: Task) -> Observation:
        if self.spec.illegal_move == "ends":
            return over(metrics={"illegal": 1.0})
        lost, others = self._game.min_utility(), self._game.num_players() - 1
        returns = [-lost / others if others else 0.0] * (others + 1)
        returns[player] = lost
        return self._over(returns, task, illegal=1.0)

    def _over(self, returns: list[float], task: Task, illegal: float = 0.0) -> Observation:
        if self.spec.opponent == "self":
            return over(*returns, metrics={"illegal": illegal})
        mine = returns[task.data["seat"]]
        figures = {"illegal": illegal, "won": float(mine > 0), "drawn": float(mine == 0)}
        return over(mine, metrics=figures)


def _drawn(state: Any, chance: Chance) -> int:
    """An outcome of a chance node, by its probabilities."""
    actions, probabilities = zip(*state.chance_outcomes(), strict=True)
    point = chance.uniform("chance", len(state.full_history())) * math.fsum(probabilities)
    return int(actions[min(bisect.bisect(list(accumulate(probabilities)), point), len(actions) - 1)])


def _searched(state: Any, simulations: int, seed: int) -> int:
    """The move of a search that begins anew, so that it follows from the position and `seed` alone."""
    pyspiel = _pyspiel()
    rollouts = pyspiel.RandomRolloutEvaluator(1, seed)
    bot = pyspiel.MCTSBot(state.get_game(), rollouts, UCT, simulations, MEMORY_MB, True, seed, False)
    return int(bot.step(state))


def _loaded(spec: OpenSpielSpec) -> Any:
    pyspiel = _pyspiel()
    if spec.game not in pyspiel.registered_names():
        raise RequestError(
            f"OpenSpiel has no game '{spec.game}'",
            where="environment.game",
            remedy=did_you_mean(spec.game, pyspiel.registered_names()),
        )
    kinds = pyspiel.GameType
    kind = next(one for one in pyspiel.registered_games() if one.short_name == spec.game)
    told = kind.provides_observation_string or kind.provides_information_state_string
    if kind.dynamics == kinds.Dynamics.MEAN_FIELD or not told:
        raise RequestError(f"'{spec.game}' cannot be told in words", where="environment.game")
    try:
        game = pyspiel.load_game(spec.game, dict(spec.config))
    except pyspiel.SpielError as error:
        raise RequestError(f"'{spec.game}': {error}", where="environment.config") from None
    searchable = kind.information == kinds.Information.PERFECT_INFORMATION
    if spec.opponent == "mcts" and not (searchable and kind.dynamics == kinds.Dynamics.SEQUENTIAL):
        raise RequestError(
            f"the search sees all cards, and moves one at a time: no opponent for '{spec.game}'",
            where="environment.opponent",
            remedy="opponent: random",
        )
    return game


def _pyspiel() -> Any:
    try:
        return import_module("pyspiel")
    except ImportError:
        raise RequestError(
            "OpenSpiel is not installed", where="environment.id", remedy="pip install 'perilune[games]'"
        ) from None
