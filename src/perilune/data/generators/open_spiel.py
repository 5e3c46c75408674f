"""Games of OpenSpiel played by their teachers, for a policy to imitate.

What is written is the conversation that a policy in the teacher's seat would have had, move by move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.data.generators.scripted import strategy_for
from perilune.data.generators.teacher import Candidate
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.games.open_spiel_match import Match, is_simultaneous
from perilune.games.open_spiel_text import move_text
from perilune.games.teachers import (
    BEST,
    GAME_TEACHERS,
    GameTeacher,
    choose,
    make_game_teacher,
)

Outcome = Literal["any", "drawn", "won"]

_LEAST = {"any": float("-inf"), "drawn": 0.0, "won": 1e-9}


class OpenSpielOptions(BaseModel):
    """What the teacher of games can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["best", "mcts", "cfr", "mccfr", "minimax", "rules", "random"] = Field(
        "best", description="who is imitated; best: the game's own teacher; random: who knows only the rules"
    )
    simulations: int = Field(200, ge=2, le=100_000, description="of a move of the search that is imitated")
    greedy: bool = Field(False, description="play the likeliest move instead of drawing one")
    keep: Outcome | float | None = Field(
        None,
        description="games that were won, or not lost, or worth at least so much; null: all games where luck"
        " decides too, else those not lost",
    )
    seats: Literal["both", "first", "second"] = Field("both", description="which seat is imitated")
    repeats: bool | None = Field(
        None,
        description="keep equal games of different deals, so that a mixed policy's moves are as frequent in"
        " the records as in its play; null: where luck decides too, unless greedy",
    )


class OpenSpielTeacher:
    """Plays a game a task, in the seat that the task names; a strategy is who sits opposite.

    Where the environment gives the other seats to an opponent, that is who sits there.
    """

    name = "open_spiel"
    strategies: ClassVar[Mapping[str, float]] = {
        "teacher": 0.5,
        **dict.fromkeys(GAME_TEACHERS, 0.0),
        "random": 0.5,
    }
    Options = OpenSpielOptions

    def __init__(self, shares: Mapping[str, float], options: OpenSpielOptions | None = None) -> None:
        self.shares = dict(shares)
        self.options = options or OpenSpielOptions()

    def prepare(self, environment: Environment) -> None:
        """Learn the game: solve it, where it is one to be solved.

        Raises:
            RequestError: when the environment has other tasks, or a teacher that is asked for cannot play.
        """
        if not isinstance(environment, OpenSpielEnvironment):
            raise RequestError("this teacher knows the environment 'open_spiel' alone", where="teacher")
        game, spec = environment.game, environment.spec
        name = self.options.policy
        if name == "best" and game.get_type().short_name not in BEST:
            raise RequestError(
                f"'{spec.game}' has no teacher of its own",
                where="options.policy",
                remedy="choose one by name",
            )
        own = BEST[game.get_type().short_name] if name == "best" else name
        self._environment = environment
        self._policy = make_game_teacher(
            own, game, simulations=self.options.simulations, where="options.policy"
        )
        self._opponents: dict[str, GameTeacher] = {"teacher": self._policy}
        if spec.opponent != "self":
            default = {name: share for name, share in self.strategies.items() if share}
            if self.shares != default:
                raise RequestError(
                    f"the environment says that '{spec.opponent}' sits opposite", where="strategies",
                    remedy="leave strategies out, or `opponent: self` of the environment",
                )  # fmt: skip
            self.shares = {spec.opponent: 1.0}
            return
        for one in self.shares.keys() - self._opponents:
            where = f"strategies.{one}"
            self._opponents[one] = make_game_teacher(one, game, simulations=spec.simulations, where=where)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """A game a task, where it is of a seat that is asked for and the seat moved at all."""
        wanted = {"both": None, "first": 0, "second": 1}[self.options.seats]
        for task in tasks:
            if wanted is None or task.data["seat"] == wanted:
                found = self._played(task, seed)
                if found is not None:
                    yield found

    def _played(self, task: Task, seed: int) -> Candidate | None:
        environment, seat = self._environment, task.data["seat"]
        facing = strategy_for(self.shares, seed, task.task_id)
        luck, own_luck = KeyedRandom(seed, task.task_id), KeyedRandom(seed, f"{task.task_id}/teacher")
        match = Match(environment.game, luck)
        actions: list[str] = []
        likely: list[float] = []
        while not match.over:
            action = environment.opponent_move(match, task, luck)
            if action is None:
                is_own = match.player == seat
                policy = self._policy if is_own else self._opponents[facing]
                move = choose(policy, match, own_luck, greedy=is_own and self.options.greedy)
                action = move.action
                actions.append(move_text(match.state, match.player, action))
                likely += [move.probability] if is_own else []
            match.take(action)
        if not likely:
            return None
        *earlier, last = actions
        return Candidate(
            task, last, f"{self.name}/{facing}", tuple(earlier), seed,
            player=seat if environment.players > 1 else 0,
            keep_from=self._least(),
            details={
                "game": str(environment.game), "policy": self._policy.name, "opponent": facing, "seat": seat,
                "actions": actions, "probabilities": likely, "mixed": self._repeats(),
            },
        )  # fmt: skip

    def _least(self) -> float:
        """What a game has to be worth to the teacher to be kept."""
        keep: Any = self.options.keep
        if keep is None:
            keep = "any" if self._is_lucky() else "drawn"
        return _LEAST[keep] if isinstance(keep, str) else float(keep)

    def _repeats(self) -> bool:
        if self.options.repeats is None:
            return self._is_lucky() and not self.options.greedy
        return self.options.repeats

    def _is_lucky(self) -> bool:
        """Whether chance, or what the others hide or do at the same time, decides too."""
        game = self._environment.game
        modes = game.get_type().chance_mode.name, game.get_type().information.name
        return is_simultaneous(game) or modes != ("DETERMINISTIC", "PERFECT_INFORMATION")
