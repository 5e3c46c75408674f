"""OpenSpiel's games as environments with text, by self-play or against a teacher.

https://github.com/google-deepmind/open_spiel (Apache-2.0); Lanctot et al. 2019, arXiv:1908.09453.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode, strip_move
from perilune.environments.core.protocol import AgentTurn, Message, Observation, Split, Task
from perilune.environments.core.splits import generate_task_ids
from perilune.errors import RequestError, did_you_mean
from perilune.frozen import Frozen
from perilune.games.open_spiel_match import Match, is_simultaneous, load_pyspiel
from perilune.games.open_spiel_text import game_text, move_text
from perilune.games.teachers import (
    BEST_TEACHERS,
    GAME_TEACHERS,
    UniformTeacher,
    choose_move,
    make_game_teacher,
)

Choice = Generator[Observation, str, int | None]


class OpenSpielSpec(Frozen):
    """The environment section of a recipe, for `id: open_spiel`."""

    id: Literal["open_spiel"] = Field("open_spiel", description="id of the environment")
    game: str = Field(description="OpenSpiel's name of the game, e.g. tic_tac_toe")
    config: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="the game's settings, e.g. {num_cards: 4}"
    )
    opponent: Literal["self", "random", "mcts", "cfr", "mccfr", "minimax", "rules"] = Field(
        "self",
        description="who plays the other players: the policy itself, or a teacher that can play the game",
    )
    simulations: int = Field(50, ge=2, le=10_000, description="simulations per move of the opponent mcts")
    illegal_move: Literal["loses", "ends"] = Field(
        "loses",
        description="result of an illegal move, which ends the game. loses: its player gets the game's"
        " lowest return, which the other players share as a gain; ends: nobody gets a reward",
    )
    show_rules: bool = Field(True, description="whether to show the rules to the player")
    list_moves: bool = Field(True, description="whether to show the legal moves to the player")
    random_moves: int = Field(
        0,
        ge=0,
        description="maximum number of random moves before the first turn. Each game draws its number"
        " from 0 to this maximum, so players meet positions that they would never choose"
        " (exploring starts)",
    )
    history: bool = Field(
        True,
        description="false: the player sees only the rules and the current state, not its earlier turns."
        " Every turn after its first then counts as a sub-agent's, so set train_sub_agents in"
        " stages that train",
    )


class OpenSpielEnvironment(MultiTurn):
    """One game. Rewards are its returns, at the end. Against an opponent, the task sets the policy's player.

    Raises:
        RequestError: if OpenSpiel is not installed, the game does not exist or has no text, or the opponent
            cannot play it.
    """

    Spec = OpenSpielSpec
    family_field = "game"
    cut_off = ""  # illegal in every game, so exceeding the token limit gains nothing

    def __init__(self, spec: OpenSpielSpec) -> None:
        self.spec = spec
        self.id = f"open_spiel/{spec.game}"
        self.game = game = _load_game(spec)
        self._text = game_text(game)
        rules: Message = {"role": "user", "content": self._text.rules}
        self._prompt = (rules,) if spec.show_rules else ()
        self._opponent = None
        if spec.opponent != "self":
            where = "environment.opponent"
            self._opponent = make_game_teacher(spec.opponent, game, simulations=spec.simulations, where=where)
        self.players = game.num_players() if self._opponent is None else 1
        self.history = spec.history
        self.max_turns = int(game.max_game_length()) * (self.players if is_simultaneous(game) else 1)

    @staticmethod
    def families() -> tuple[str, ...]:
        return tuple(sorted(kind.short_name for kind in load_pyspiel().registered_games() if _has_text(kind)))

    @staticmethod
    def notes() -> dict[str, dict[str, str]]:
        return {"teachers": {game: f"{name}: {GAME_TEACHERS[name]}" for game, name in BEST_TEACHERS.items()}}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield tasks without end. They differ in chance events and in the policy's player."""
        for task_id in generate_task_ids(self.id, split, seed):
            yield Task(task_id, self._prompt, {"seat": int(task_id[8:16], 16) % self.game.num_players()})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Play to the end, or to the first illegal move."""
        match = self.begin(rng)
        turns = [0] * self.game.num_players()
        while not match.is_over:
            action = self.opponent_move(match, task, rng)
            if action is None:
                turns[match.player] += 1
                action = yield from self._ask_for_move(match, turns[match.player])
            if action is None:
                yield self._end_after_illegal_move(match.player, task)
                return
            match.take(action)
        yield self._end_episode(match.returns, task)

    def begin(self, rng: KeyedRandom) -> Match:
        """Return a new game after its random moves, which stop before one that would end it."""
        match, teacher = Match(self.game, rng), UniformTeacher()
        for _ in range(rng.integer(self.spec.random_moves + 1, "random moves")):
            next_match = match.copy()
            next_match.take(choose_move(teacher, next_match, rng).action)
            if next_match.is_over:
                break
            match = next_match
        return match

    def opponent_move(self, match: Match, task: Task, rng: KeyedRandom) -> int | None:
        """Return the move of a player that the environment plays; None if it is the policy's turn."""
        if self._opponent is None or match.player == task.data["seat"]:
            return None
        return choose_move(self._opponent, match, rng).action

    def _ask_for_move(self, match: Match, turn: int) -> Choice:
        """Return the policy's action in a player's turn, counted from 1; None for an illegal move."""
        text, moves = self.describe(match.state, match.player)
        observation = ask(text, player=match.player if self._opponent is None else 0, legal=tuple(moves))
        if turn > 1 and not self.spec.history:
            opening = (*self._prompt, *observation.messages)
            agent_turn = AgentTurn(str(turn - 2), opening, "move", continues=True)
            observation = replace(observation, messages=(), turns=(agent_turn,))
        move = yield observation
        return moves.get(strip_move(move))

    def conversation_after(self, messages: tuple[Message, ...], move: str) -> tuple[Message, ...]:
        """Return the messages of a player who saw `messages` and made a move, before its next observation."""
        return (*messages, {"role": "assistant", "content": move}) if self.spec.history else self._prompt

    def describe(self, state: Any, player: int) -> tuple[str, dict[str, int]]:
        """Return the text of a pyspiel state for the player to move, and the legal moves by their text."""
        moves = {move_text(state, player, action): action for action in state.legal_actions(player)}
        separator = " | " if any(" " in move for move in moves) else " "
        move_line = f"moves {separator.join(moves)}\n" if self.spec.list_moves else ""
        return f"{self._text.view(state, player)}\n{move_line}", moves

    def _end_after_illegal_move(self, player: int, task: Task) -> Observation:
        if self.spec.illegal_move == "ends":
            return end_episode(metrics={"illegal": 1.0})
        lost, others = self.game.min_utility(), self.game.num_players() - 1
        returns = [-lost / others if others else 0.0] * (others + 1)
        returns[player] = lost
        return self._end_episode(returns, task, illegal=1.0)

    def _end_episode(self, returns: list[float], task: Task, illegal: float = 0.0) -> Observation:
        if self._opponent is None:
            return end_episode(*returns, metrics={"illegal": illegal})
        result = returns[task.data["seat"]]
        figures = {"illegal": illegal, "won": float(result > 0), "drawn": float(result == 0)}
        return end_episode(result, metrics=figures)


def _load_game(spec: OpenSpielSpec) -> Any:
    spiel = load_pyspiel()
    if spec.game not in spiel.registered_names():
        raise RequestError(
            f"OpenSpiel has no game '{spec.game}'",
            where="environment.game",
            remedy=did_you_mean(spec.game, spiel.registered_names()),
        )
    kind = next(game for game in spiel.registered_games() if game.short_name == spec.game)
    if not _has_text(kind):
        raise RequestError(f"'{spec.game}' has no text for its states", where="environment.game")
    try:
        return spiel.load_game(spec.game, dict(spec.config))
    except spiel.SpielError as error:
        raise RequestError(f"'{spec.game}': {error}", where="environment.config") from None


def _has_text(kind: Any) -> bool:
    """Return whether a game can describe its states as text."""
    text = kind.provides_observation_string or kind.provides_information_state_string
    return bool(text) and kind.dynamics != load_pyspiel().GameType.Dynamics.MEAN_FIELD
