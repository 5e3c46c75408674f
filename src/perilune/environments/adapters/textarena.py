"""Games of TextArena, for one player or several.

https://github.com/LeonGuertler/TextArena (MIT); Guertler et al. 2025, arXiv:2504.11442.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import Message, Observation, Split, Task
from perilune.environments.core.registry import did_you_mean
from perilune.errors import RequestError

HELD_OUT_PARTS = 10  # one tenth of all games is held out
MOST_PLAYERS = 6  # to look for, where the recipe does not say how many play
_DEFAULT = re.compile(r".*-v\d+")  # what follows are variants: another size, another view

# TextArena depends on python-chess, which is under the GPL: nobody should get it without asking for it.
REMEDY = "pip install 'perilune[textarena-gpl]', which brings python-chess under the GPL, version 3 or later"


class TextArenaSpec(BaseModel):
    """The environment section of a recipe, for `id: textarena`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["textarena"] = Field("textarena", description="which environment this is")
    game: str = Field(description="TextArena's name of a game, e.g. TicTacToe-v0")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's own settings, e.g. {max_rounds: 3}"
    )
    players: int | None = Field(None, ge=1, le=16, description="how many; null: the fewest the game takes")
    turns: int = Field(100, ge=1, le=1000, description="most moves of an episode, of all players together")


class TextArenaEnvironment(MultiTurn):
    """One game; rewards are the game's own, by player, when it is over.

    Raises:
        RequestError: when TextArena is not installed, has no such game, or a setting or the number of players
            is none of the game's, or the game needs what is not there (word lists, a model as a judge).
    """

    Spec = TextArenaSpec
    family_field = "game"
    cut_off = ""  # is no move of any game: not to end one's move is no way out

    def __init__(self, spec: TextArenaSpec) -> None:
        self.spec = spec
        self.id = f"textarena/{spec.game}"
        self.max_turns = spec.turns
        self._game = _made(spec)
        self.players = self._fewest_players() if spec.players is None else self._checked(spec.players)

    @staticmethod
    def families() -> tuple[str, ...]:
        """Names of games, without their variants, sorted."""
        return tuple(sorted(name for name in _registry() if _DEFAULT.fullmatch(name)))

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Games without end."""
        prompt = ({"role": "user", "content": "A game. Answer with your move alone, as its rules say."},)
        for number in range(sys.maxsize):
            task_id = hashlib.sha256(f"{self.id}/{seed}/{number}".encode()).hexdigest()[:32]
            if (int(task_id[:8], 16) % HELD_OUT_PARTS == 0) == (split == "heldout"):
                yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Moves until the game is over; what players see of it is TextArena's own words."""
        seed = rng.integer(1 << 31, "reset")
        drawn = _global_random(seed)
        game = copy.deepcopy(self._game)
        with drawn.installed():
            game.reset(num_players=self.players, seed=seed)
            done, (player, seen) = bool(game.state.done), game.get_observation()
        while not done:
            said = yield Observation(self._told(seen, player), player)
            with drawn.installed():
                done, _ = game.step(said)
                player, seen = (player, ()) if done else game.get_observation()
        yield self._over(*game.close())

    def _told(self, seen: Any, player: int) -> tuple[Message, ...]:
        """What the game and the others said, in one message; a player's own moves are not told again."""
        lines = []
        for speaker, text, kind in seen:
            moved = getattr(kind, "name", kind) == "PLAYER_ACTION"  # some games for one do not say who
            if speaker != player and not (moved and self.players == 1):
                lines.append(f"[Player {speaker}] {text}" if speaker >= 0 else str(text))
        return ({"role": "user", "content": "\n".join(lines) + "\n"},) if lines else ()

    def _over(self, rewards: Any, info: Any) -> Observation:
        illegal = any(info[player].get("invalid_move") for player in range(self.players))
        by_player = tuple(float((rewards or {}).get(player, 0.0)) for player in range(self.players))
        return Observation(rewards=by_player, metrics={"illegal": float(illegal)}, done=True)

    def _fewest_players(self) -> int:
        refused: Exception | None = None
        for players in range(1, MOST_PLAYERS + 1):
            try:
                kind = self._begun(players)
            except Exception as error:  # games say in ways of their own that so many cannot play
                refused = error
                continue
            if players > 1 or kind == "SinglePlayerState":  # few games for several refuse a lone player
                return players
        raise RequestError(f"'{self.spec.game}' does not begin: {refused}", where="environment.game")

    def _checked(self, players: int) -> int:
        try:
            self._begun(players)
        except Exception as error:
            raise RequestError(
                f"'{self.spec.game}' does not begin with {players} players: {error}",
                where="environment.players",
            ) from None
        return players

    def _begun(self, players: int) -> str:
        """What kind of state a game of so many begins with."""
        game = copy.deepcopy(self._game)
        with _global_random(0).installed(), contextlib.redirect_stdout(io.StringIO()):
            game.reset(num_players=players, seed=0)
        return type(game.state).__name__


def _made(spec: TextArenaSpec) -> Any:
    names = _registry()
    if spec.game not in names:
        raise RequestError(
            f"TextArena has no game '{spec.game}'",
            where="environment.game",
            remedy=did_you_mean(spec.game, names),
        )
    try:
        with _global_random(0).installed(), contextlib.redirect_stdout(io.StringIO()):
            game = import_module("textarena").make(spec.game, **spec.config)
    except TypeError as error:
        raise RequestError(f"'{spec.game}': {error}", where="environment.config") from None
    except Exception as error:  # word lists that NLTK would have to download, a model to ask, ...
        said = next((line.strip() for line in str(error).splitlines() if line.strip(" *")), "")
        raise RequestError(f"'{spec.game}' cannot be made here: {said}", where="environment.game") from None
    while hasattr(game, "env"):  # its wrappers tell the whole game again at each move; ours sees what is new
        game = game.env
    return game


def _registry() -> dict[str, Any]:
    try:
        registration = import_module("textarena.envs.registration")
        import_module("textarena")
    except ImportError:
        raise RequestError("TextArena is not installed", where="environment.id", remedy=REMEDY) from None
    names: dict[str, Any] = registration.ENV_REGISTRY
    return names


def _global_random(seed: int) -> Any:
    from perilune.environments.adapters.global_random import GlobalRandom

    return GlobalRandom(seed)
