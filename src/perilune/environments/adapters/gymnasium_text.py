"""Gymnasium's toy text environments with prompts in English: grid worlds, a taxi, Blackjack.

https://github.com/Farama-Foundation/Gymnasium (MIT); Towers et al. 2024, arXiv:2407.17032.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode, strip_move
from perilune.environments.core.protocol import Split, Task
from perilune.environments.core.splits import generate_task_ids
from perilune.errors import RequestError, requires_extra
from perilune.frozen import Frozen

_COLORED = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m")
_BRACKETS = {"34;1": "()", "35": "{}"}  # by color; all others show the player's position
_SLIPPERY = " The ice is slippery."

Game = Literal["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"]
_GAMES: dict[str, tuple[str, tuple[str, ...], float]] = {  # rules, moves, and the least reward of a move
    "FrozenLake-v1": (
        f"Walk from S to G over frozen tiles F; holes H end it.{_SLIPPERY} [] is where you are.",
        ("left", "down", "right", "up"),
        0.0,
    ),
    "CliffWalking-v1": (
        "Walk from x at the lower left to T at the lower right, around the cliff C, which costs 100.",
        ("up", "right", "down", "left"),
        -100.0,
    ),
    "Taxi-v4": (
        "Drive the taxi to the passenger, pick up, drive where the passenger wants to go, and drop off."
        " | is a wall; [] is the taxi, () the waiting passenger, {} where the passenger wants to go.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        -10.0,
    ),
    "Blackjack-v1": ("Blackjack: come nearer to 21 than the dealer, and not above.", ("stick", "hit"), -1.0),
}


class GymnasiumSpec(Frozen):
    """The environment section of a recipe, for `id: gymnasium`."""

    id: Literal["gymnasium"] = Field("gymnasium", description="id of the environment")
    game: Game = Field(description="Gymnasium's name of the game")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's settings, e.g. {is_slippery: false}"
    )
    turns: int = Field(50, ge=1, le=1000, description="maximum moves of an episode")


class GymnasiumEnvironment(MultiTurn):
    """One Gymnasium game. Rewards are Gymnasium's own. An illegal move changes nothing and has the least
    reward of a move, so that it is never better than to play.

    Raises:
        RequestError: if Gymnasium is not installed, or the game has no such setting.
    """

    Spec = GymnasiumSpec
    family_field = "game"
    cut_off = ""  # illegal

    def __init__(self, spec: GymnasiumSpec) -> None:
        self.spec = spec
        self.id = f"gymnasium/{spec.game}"
        self.max_turns = spec.turns
        self._rules, self._moves, self._min_reward = _GAMES[spec.game]
        if not spec.config.get("is_slippery", True):
            self._rules = self._rules.replace(_SLIPPERY, "")
        self._make_game().close()

    @staticmethod
    def families() -> tuple[str, ...]:
        return tuple(sorted(_GAMES))

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        prompt = ({"role": "user", "content": f"{self._rules} Moves: {', '.join(self._moves)}."},)
        for task_id in generate_task_ids(self.id, split, seed):
            yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        game = self._make_game()
        try:
            state, _ = game.reset(seed=rng.integer(1 << 31, "reset"))
            reward, ended, illegal = 0.0, False, 0
            while not ended:
                move = yield ask(
                    f"{_render(game, state)}\n",
                    rewards=(reward,),
                    metrics={"illegal": float(illegal)},
                    legal=self._moves,
                )
                if strip_move(move) not in self._moves:
                    reward, illegal = self._min_reward, illegal + 1
                    continue
                state, reward, terminated, truncated, _ = game.step(self._moves.index(strip_move(move)))
                reward, ended = float(reward), terminated or truncated
            yield end_episode(reward, metrics={"illegal": float(illegal)})
        finally:
            game.close()

    def _make_game(self) -> Any:
        with requires_extra("games", "Gymnasium is not installed", where="environment.id"):
            gymnasium = import_module("gymnasium")
        options = {"max_episode_steps": self.spec.turns, "disable_env_checker": True, **self.spec.config}
        if self.spec.game != "Blackjack-v1":
            options["render_mode"] = "ansi"
        try:
            return gymnasium.make(self.spec.game, **options)
        except TypeError as error:
            raise RequestError(f"'{self.spec.game}': {error}", where="environment.config") from None


def _render(game: Any, state: Any) -> str:
    if isinstance(state, tuple):
        player, dealer, ace = (int(value) for value in state)
        return f"you have {player}{' with an ace as 11' if ace else ''}, the dealer shows {dealer}"
    text: str = game.render()
    while _COLORED.search(text):  # from the inside, because a place may have several colors
        text = _COLORED.sub(_put_in_brackets, text)
    lines = text.strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines if not line.startswith("  ("))


def _put_in_brackets(colored: re.Match[str]) -> str:
    brackets = _BRACKETS.get(colored[1], "[]")
    return f"{brackets[0]}{colored[2]}{brackets[1]}"
