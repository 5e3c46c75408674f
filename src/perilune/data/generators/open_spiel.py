"""The OpenSpiel teacher: plays games for a policy to imitate.

A trace is the conversation that a policy in the teacher's seat would have had, move by move.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from perilune.data.generators.scripted import choose_strategy
from perilune.data.generators.teacher import Candidate
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.wrapping import unwrap
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.games.open_spiel_match import is_simultaneous
from perilune.games.open_spiel_text import move_text
from perilune.games.teachers import (
    BEST_TEACHERS,
    GAME_TEACHERS,
    EpsilonTeacher,
    GameTeacher,
    choose_move,
    make_game_teacher,
)

Outcome = Literal["any", "drawn", "won"]

_MIN_RESULTS = {"any": float("-inf"), "drawn": 0.0, "won": 1e-9}


class OpenSpielOptions(Frozen):
    """Options of the OpenSpiel teacher."""

    policy: Literal["best", "mcts", "cfr", "mccfr", "minimax", "rules", "random"] = Field(
        "best", description="game teacher to imitate; best: the one for this game; random: random legal moves"
    )
    simulations: int = Field(200, ge=2, le=100_000, description="simulations per move of a search")
    epsilon: float = Field(
        0.0, ge=0, le=1, description="probability of a random legal move instead of the teacher's"
    )
    greedy: bool = Field(False, description="play the most likely move instead of sampling one")
    keep: Outcome | float | None = Field(
        None,
        description="games to keep: won, drawn (or won), any, or with at least this result; null: any for"
        " games with chance or hidden information, else drawn",
    )
    seats: Literal["both", "first", "second"] = Field("both", description="seats to imitate")
    repeats: bool | None = Field(
        None,
        description="keep equal games of different deals, so that the records have the move frequencies of a"
        " mixed policy; null: for games with chance or hidden information, unless greedy",
    )


class OpenSpielTeacher:
    """Plays one game per task, in the seat of the task. A strategy is an opponent.

    If the environment defines the opponent, that opponent plays.
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
        """Make the game teachers for the environment's game. Some of them solve the game first.

        Raises:
            RequestError: when the environment is not open_spiel or has an answer format, or a game teacher
                does not support the game.
        """
        has_format = getattr(environment, "form", None) is not None
        environment = unwrap(environment)
        if not isinstance(environment, OpenSpielEnvironment):
            raise RequestError(
                "the open_spiel teacher supports only the environment 'open_spiel'", where="teacher"
            )
        if has_format:
            what = "the open_spiel teacher plays bare moves, without an answer format"
            raise RequestError(what, where="teacher", remedy="remove prompting.format")
        game, spec = environment.game, environment.spec
        name = self.options.policy
        if name == "best" and game.get_type().short_name not in BEST_TEACHERS:
            what = f"'{spec.game}' has no default game teacher"
            raise RequestError(what, where="options.policy", remedy="set options.policy to a name")
        kind = BEST_TEACHERS[game.get_type().short_name] if name == "best" else name
        self._environment = environment
        teacher = make_game_teacher(kind, game, simulations=self.options.simulations, where="options.policy")
        self._policy = EpsilonTeacher(teacher, self.options.epsilon) if self.options.epsilon else teacher
        self._opponents: dict[str, GameTeacher] = {"teacher": teacher}
        if spec.opponent != "self":
            default = {name: share for name, share in self.strategies.items() if share}
            if self.shares != default:
                raise RequestError(
                    f"the environment already defines the opponent '{spec.opponent}'",
                    where="strategies",
                    remedy="remove strategies, or set `opponent: self` in the environment",
                )
            self.shares = {spec.opponent: 1.0}
            return
        for key in self.shares.keys() - self._opponents:
            where = f"strategies.{key}"
            self._opponents[key] = make_game_teacher(key, game, simulations=spec.simulations, where=where)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """Yield one game per task of a requested seat; games in which the seat never moved are skipped."""
        seat = {"both": None, "first": 0, "second": 1}[self.options.seats]
        for task in tasks:
            if seat is None or task.data["seat"] == seat:
                candidate = self._play(task, seed)
                if candidate is not None:
                    yield candidate

    def _play(self, task: Task, seed: int) -> Candidate | None:
        environment, seat = self._environment, task.data["seat"]
        opponent = choose_strategy(self.shares, f"strategy:{seed}:{task.task_id}")
        luck, own_luck = KeyedRandom(seed, task.task_id), KeyedRandom(seed, f"{task.task_id}/teacher")
        match = environment.begin(luck)
        actions: list[str] = []
        likely: list[float] = []
        while not match.is_over:
            action = environment.opponent_move(match, task, luck)
            if action is None:
                is_own = match.player == seat
                policy = self._policy if is_own else self._opponents[opponent]
                move = choose_move(policy, match, own_luck, greedy=is_own and self.options.greedy)
                action = move.action
                actions.append(move_text(match.state, match.player, action))
                likely += [move.probability] if is_own else []
            match.take(action)
        if not likely:
            return None
        *earlier, last = actions
        details = {
            "game": str(environment.game),
            "policy": self._policy.name,
            "opponent": opponent,
            "seat": seat,
            "actions": actions,
            "probabilities": likely,
            "mixed": self._keeps_repeats(),
        }
        return Candidate(
            task,
            last,
            f"{self.name}/{opponent}",
            tuple(earlier),
            seed,
            player=seat if environment.players > 1 else 0,
            keep_from=self._min_result(),
            details=details,
        )

    def _min_result(self) -> float:
        """Return the lowest result at which a game is kept."""
        keep: Any = self.options.keep
        if keep is None:
            keep = "any" if self._has_luck() else "drawn"
        return _MIN_RESULTS[keep] if isinstance(keep, str) else float(keep)

    def _keeps_repeats(self) -> bool:
        if self.options.repeats is None:
            return self._has_luck() and not self.options.greedy
        return self.options.repeats

    def _has_luck(self) -> bool:
        """Return whether the game has chance, hidden information or simultaneous moves."""
        game = self._environment.game
        modes = game.get_type().chance_mode.name, game.get_type().information.name
        return is_simultaneous(game) or modes != ("DETERMINISTIC", "PERFECT_INFORMATION")
