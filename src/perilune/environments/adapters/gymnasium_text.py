"""Gymnasium's toy texts, in words: grids to walk, a taxi, Blackjack.

https://github.com/Farama-Foundation/Gymnasium (MIT); Towers et al. 2024, arXiv:2407.17032.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Split, Task
from perilune.errors import RequestError

HELD_OUT_PARTS = 10  # one tenth of all beginnings is held out
_MARKED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m")  # where the player stands, in colour

Game = Literal["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"]
_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "FrozenLake-v1": (
        "Walk from S to G over frozen tiles F; holes H end it. The ice is slippery. [] is where you are.",
        ("left", "down", "right", "up"),
    ),
    "CliffWalking-v1": (
        "Walk from x at the lower left to T at the lower right, around the cliff C, which costs 100.",
        ("up", "right", "down", "left"),
    ),
    "Taxi-v4": (
        "Drive the taxi to the passenger, pick up, drive where the passenger wants to go, and drop off."
        " | is a wall; [] is the taxi.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "Blackjack-v1": ("Blackjack: come nearer to 21 than the dealer, and not above.", ("stick", "hit")),
}


class GymnasiumSpec(BaseModel):
    """The environment section of a recipe, for `id: gymnasium`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["gymnasium"] = Field("gymnasium", description="which environment this is")
    game: Game = Field(description="Gymnasium's name of it")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="its own settings, e.g. {is_slippery: false}"
    )
    turns: int = Field(50, ge=1, le=1000, description="most moves of an episode")


class GymnasiumEnvironment(MultiTurn):
    """One of the games; each move earns what Gymnasium says, and what is no move changes nothing.

    Raises:
        RequestError: when Gymnasium is not installed, or a setting is none of the game's.
    """

    Spec = GymnasiumSpec
    family_field = "game"

    def __init__(self, spec: GymnasiumSpec) -> None:
        self.spec = spec
        self.id = f"gymnasium/{spec.game}"
        self.max_turns = spec.turns
        self._rules, self._moves = _WORDS[spec.game]
        self._made().close()

    @staticmethod
    def families() -> tuple[str, ...]:
        """Names of the games, sorted."""
        return tuple(sorted(_WORDS))

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Beginnings without end."""
        prompt = ({"role": "user", "content": f"{self._rules} Moves: {', '.join(self._moves)}."},)
        for number in range(sys.maxsize):
            task_id = hashlib.sha256(f"{self.id}/{seed}/{number}".encode()).hexdigest()[:32]
            if (int(task_id[:8], 16) % HELD_OUT_PARTS == 0) == (split == "heldout"):
                yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Moves until the game ends."""
        game = self._made()
        try:
            seen, _ = game.reset(seed=rng.integer(1 << 31, "reset"))
            reward, ended, illegal = 0.0, False, 0
            while not ended:
                said = yield ask(
                    f"{_shown(game, seen)}\n",
                    rewards=(reward,),
                    metrics={"illegal": float(illegal)},
                    legal=self._moves,
                )
                if said.strip() not in self._moves:
                    reward, illegal = 0.0, illegal + 1
                    continue
                seen, reward, terminated, truncated, _ = game.step(self._moves.index(said.strip()))
                reward, ended = float(reward), terminated or truncated
            yield end_episode(reward, metrics={"illegal": float(illegal)})
        finally:
            game.close()

    def _made(self) -> Any:
        try:
            gymnasium = import_module("gymnasium")
        except ImportError:
            remedy = "pip install 'perilune[games]'"
            raise RequestError("Gymnasium is not installed", where="environment.id", remedy=remedy) from None
        drawn = {} if self.spec.game == "Blackjack-v1" else {"render_mode": "ansi"}
        try:
            return gymnasium.make(
                self.spec.game, max_episode_steps=self.spec.turns, disable_env_checker=True,
                **drawn, **self.spec.config,
            )  # fmt: skip
        except TypeError as error:
            raise RequestError(f"'{self.spec.game}': {error}", where="environment.config") from None


def _shown(game: Any, seen: Any) -> str:
    if isinstance(seen, tuple):
        own, dealer, ace = (int(one) for one in seen)
        return f"you have {own}{' with an ace as 11' if ace else ''}, the dealer shows {dealer}"
    lines = _MARKED.sub(r"[\1]", game.render()).strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines if not line.startswith("  ("))
