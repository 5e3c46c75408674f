"""TextArena's games, for one or several players.

https://github.com/LeonGuertler/TextArena (MIT); Guertler et al. 2025, arXiv:2504.11442.
"""

import contextlib
import copy
import io
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perilune.environments.adapters.global_random import GlobalRandom
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import Message, Observation, Split, Task
from perilune.environments.core.splits import generate_task_ids
from perilune.errors import RequestError, did_you_mean
from perilune.frozen import Frozen

MAX_PLAYERS = 6  # tried if the recipe does not set the number of players
# Calls in textarena/envs/__init__.py. Variants, such as another board size, add a suffix to the version.
_DEFAULT_VARIANT = re.compile(r'^register\w*\(\s*id="([^"]*-v\d+)"', re.MULTILINE)

# TextArena depends on python-chess, which is under the GPL. Users must opt in to it.
REMEDY = "pip install 'perilune[textarena-gpl]', which brings python-chess under the GPL, version 3 or later"


class TextArenaSpec(Frozen):
    """The environment section of a recipe, for `id: textarena`."""

    id: Literal["textarena"] = Field("textarena", description="id of the environment")
    game: str = Field(description="TextArena's name of the game, e.g. TicTacToe-v0")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's settings, e.g. {max_rounds: 3}"
    )
    players: int | None = Field(None, ge=1, le=16, description="number of players; null: the game's minimum")
    turns: int = Field(100, ge=1, le=1000, description="maximum moves of an episode, of all players together")


class TextArenaEnvironment(MultiTurn):
    """One TextArena game. Rewards are the game's own, by player, at the end.

    Raises:
        RequestError: if TextArena is not installed, the game, a setting or the number of players is invalid,
            or the game needs resources that are missing (word lists, a judge model).
    """

    Spec = TextArenaSpec
    family_field = "game"
    cut_off = ""  # illegal in every game, so exceeding the token limit gains nothing

    def __init__(self, spec: TextArenaSpec) -> None:
        self.spec = spec
        self.id = f"textarena/{spec.game}"
        self.max_turns = spec.turns
        self._game = _make_game(spec)
        self.players = (
            self._find_min_players() if spec.players is None else self._require_player_count(spec.players)
        )

    @staticmethod
    def families() -> tuple[str, ...]:
        """Return the names of the games without their variants, sorted.

        They are read from TextArena's source, because importing it takes seconds (NLTK, SciPy).
        """
        spec = find_spec("textarena")
        if spec is None or spec.origin is None:
            raise _not_installed()
        text = Path(spec.origin).with_name("envs").joinpath("__init__.py").read_text(encoding="utf-8")
        return tuple(sorted(_DEFAULT_VARIANT.findall(text)))

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield tasks without end; each has its own random seed."""
        prompt = ({"role": "user", "content": "A game. Answer with your move alone, as its rules say."},)
        for task_id in generate_task_ids(self.id, split, seed):
            yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Play until the game is over. Observations are TextArena's own texts."""
        seed = rng.integer(1 << 31, "reset")
        random_state = GlobalRandom(seed)
        game = copy.deepcopy(self._game)
        with random_state.install():
            game.reset(num_players=self.players, seed=seed)
            done, (player, observation) = bool(game.state.done), game.get_observation()
        while not done:
            move = yield Observation(self._messages(observation, player), player)
            with random_state.install():
                done, _ = game.step(move)
                player, observation = (player, ()) if done else game.get_observation()
        rewards, info = game.close()
        illegal = any(info[player].get("invalid_move") for player in range(self.players))
        by_player = tuple(float((rewards or {}).get(player, 0.0)) for player in range(self.players))
        yield Observation(rewards=by_player, metrics={"illegal": float(illegal)}, done=True)

    def _messages(self, observation: Any, player: int) -> tuple[Message, ...]:
        """Return one message with the texts of the game and the other players, without own moves."""
        lines = []
        for speaker, text, kind in observation:
            is_move = getattr(kind, "name", kind) == "PLAYER_ACTION"
            is_own = speaker == player or (is_move and self.players == 1)  # some games omit the speaker
            if not is_own:
                lines.append(f"[Player {speaker}] {text}" if speaker >= 0 else str(text))
        return ({"role": "user", "content": "\n".join(lines) + "\n"},) if lines else ()

    def _find_min_players(self) -> int:
        last_error: Exception | None = None
        for players in range(1, MAX_PLAYERS + 1):
            try:
                kind = self._start(players)
            except Exception as error:  # each game rejects a number of players in its own way
                last_error = error
                continue
            if players > 1 or kind == "SinglePlayerState":  # many multi-player games accept a single player
                return players
        raise RequestError(f"'{self.spec.game}' does not start: {last_error}", where="environment.game")

    def _require_player_count(self, players: int) -> int:
        try:
            self._start(players)
        except Exception as error:
            what = f"'{self.spec.game}' does not start with {players} players: {error}"
            raise RequestError(what, where="environment.players") from None
        return players

    def _start(self, players: int) -> str:
        """Start a game with this number of players, and return the class name of its state."""
        game = copy.deepcopy(self._game)
        with GlobalRandom(0).install(), contextlib.redirect_stdout(io.StringIO()):
            game.reset(num_players=players, seed=0)
        return type(game.state).__name__


def _make_game(spec: TextArenaSpec) -> Any:
    names = _registry()
    if spec.game not in names:
        what = f"TextArena has no game '{spec.game}'"
        raise RequestError(what, where="environment.game", remedy=did_you_mean(spec.game, names))
    try:
        with GlobalRandom(0).install(), contextlib.redirect_stdout(io.StringIO()):
            game = import_module("textarena").make(spec.game, **spec.config)
    except TypeError as error:
        raise RequestError(f"'{spec.game}': {error}", where="environment.config") from None
    except Exception as error:  # for example word lists that NLTK would have to download
        reason = next((line.strip() for line in str(error).splitlines() if line.strip(" *")), "")
        raise RequestError(f"'{spec.game}' cannot be created: {reason}", where="environment.game") from None
    while hasattr(game, "env"):  # TextArena's wrappers repeat the whole game at each move
        game = game.env
    return game


def _registry() -> dict[str, Any]:
    try:
        registration = import_module("textarena.envs.registration")
        import_module("textarena")
    except ImportError:
        raise _not_installed() from None
    names: dict[str, Any] = registration.ENV_REGISTRY
    return names


def _not_installed() -> RequestError:
    return RequestError("TextArena is not installed", where="environment.id", remedy=REMEDY)
