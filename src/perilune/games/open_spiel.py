"""Games of OpenSpiel, in words, against oneself or a teacher.

https://github.com/google-deepmind/open_spiel (Apache-2.0); Lanctot et al. 2019, arXiv:1908.09453.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Observation, Split, Task
from perilune.environments.core.registry import did_you_mean
from perilune.errors import RequestError
from perilune.games.open_spiel_match import Match, is_simultaneous, pyspiel
from perilune.games.open_spiel_text import game_text, move_text
from perilune.games.teachers import BEST, GAME_TEACHERS, choose, make_game_teacher

HELD_OUT_PARTS = 10  # one tenth of all deals is held out

Choice = Generator[Observation, str, int | None]


class OpenSpielSpec(BaseModel):
    """The environment section of a recipe, for `id: open_spiel`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["open_spiel"] = Field("open_spiel", description="which environment this is")
    game: str = Field(description="OpenSpiel's name of a game, e.g. tic_tac_toe")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's own, e.g. {num_cards: 4}"
    )
    opponent: Literal["self", "random", "mcts", "cfr", "mccfr", "minimax", "rules"] = Field(
        "self", description="who has the other seats: the policy, or a teacher that can play the game"
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
    family_field = "game"
    cut_off = ""  # no game has such a move: not to end one's move is no way out

    def __init__(self, spec: OpenSpielSpec) -> None:
        self.spec = spec
        self.id = f"open_spiel/{spec.game}"
        self.game = game = _loaded(spec)
        self._text = game_text(game)
        self._opponent = (
            None
            if spec.opponent == "self"
            else make_game_teacher(
                spec.opponent, game, simulations=spec.simulations, where="environment.opponent"
            )
        )
        self.players = game.num_players() if self._opponent is None else 1
        self.max_turns = int(game.max_game_length()) * (self.players if is_simultaneous(game) else 1)

    @staticmethod
    def families() -> tuple[str, ...]:
        """Names of the games that can be told, sorted."""
        return tuple(sorted(kind.short_name for kind in pyspiel().registered_games() if _is_told(kind)))

    @staticmethod
    def notes() -> dict[str, dict[str, str]]:
        """The teacher of each game, for who asks about the environment."""
        return {"teachers": {game: f"{name}: {GAME_TEACHERS[name]}" for game, name in BEST.items()}}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Deals without end; where the game deals nothing, further games against other luck."""
        prompt = ({"role": "user", "content": self._text.rules},)
        for number in range(sys.maxsize):
            task_id = hashlib.sha256(f"{self.id}/{seed}/{number}".encode()).hexdigest()[:32]
            if (int(task_id[:8], 16) % HELD_OUT_PARTS == 0) == (split == "heldout"):
                yield Task(task_id, prompt, {"seat": int(task_id[8:16], 16) % self.game.num_players()})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """The game to its end, or to the first illegal move."""
        match = Match(self.game, rng)
        while not match.over:
            action = self.opponent_move(match, task, rng)
            if action is None:
                action = yield from self._choice(match)
            if action is None:
                yield self._illegal(match.player, task)
                return
            match.take(action)
        yield self._over(match.returns, task)

    def opponent_move(self, match: Match, task: Task, rng: KeyedRandom) -> int | None:
        """The move of a seat that the environment plays; None where the policy is asked."""
        if self._opponent is None or match.player == task.data["seat"]:
            return None
        return choose(self._opponent, match, rng).action

    def _choice(self, match: Match) -> Choice:
        """The action of the player who is asked; None for an illegal one."""
        told, moves = self.told(match.state, match.player)
        said = yield ask(told, player=match.player if self._opponent is None else 0, legal=tuple(moves))
        return moves.get(said.strip())

    def told(self, state: Any, player: int) -> tuple[str, dict[str, int]]:
        """What the player to move is told of a state of pyspiel; and the legal moves, as it writes them."""
        moves = {move_text(state, player, action): action for action in state.legal_actions(player)}
        between = " | " if any(" " in move for move in moves) else " "
        listed = f"moves {between.join(moves)}\n" if self.spec.list_moves else ""
        return f"{self._text.view(state, player)}\n{listed}", moves

    def _illegal(self, player: int, task: Task) -> Observation:
        if self.spec.illegal_move == "ends":
            return end_episode(metrics={"illegal": 1.0})
        lost, others = self.game.min_utility(), self.game.num_players() - 1
        returns = [-lost / others if others else 0.0] * (others + 1)
        returns[player] = lost
        return self._over(returns, task, illegal=1.0)

    def _over(self, returns: list[float], task: Task, illegal: float = 0.0) -> Observation:
        if self._opponent is None:
            return end_episode(*returns, metrics={"illegal": illegal})
        mine = returns[task.data["seat"]]
        figures = {"illegal": illegal, "won": float(mine > 0), "drawn": float(mine == 0)}
        return end_episode(mine, metrics=figures)


def _loaded(spec: OpenSpielSpec) -> Any:
    spiel = pyspiel()
    if spec.game not in spiel.registered_names():
        raise RequestError(
            f"OpenSpiel has no game '{spec.game}'",
            where="environment.game",
            remedy=did_you_mean(spec.game, spiel.registered_names()),
        )
    kind = next(one for one in spiel.registered_games() if one.short_name == spec.game)
    if not _is_told(kind):
        raise RequestError(f"'{spec.game}' cannot be told in words", where="environment.game")
    try:
        return spiel.load_game(spec.game, dict(spec.config))
    except spiel.SpielError as error:
        raise RequestError(f"'{spec.game}': {error}", where="environment.config") from None


def _is_told(kind: Any) -> bool:
    """Whether a game can say what a player sees."""
    told = kind.provides_observation_string or kind.provides_information_state_string
    return bool(told) and kind.dynamics != pyspiel().GameType.Dynamics.MEAN_FIELD
