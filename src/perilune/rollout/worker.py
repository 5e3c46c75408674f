"""From tasks to scored episodes: sample with the engine, let the environment answer, keep every token."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from perilune.data.episode import Episode, outcome_fields, outcome_metrics
from perilune.engine.backend import SamplingBackend
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.protocol import Environment, Outcome, Task
from perilune.errors import RequestError
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.checks import check_group, check_judged
from perilune.rollout.failures import require_few_failures
from perilune.rollout.groups import Groups, gather_groups
from perilune.rollout.learned_reward import LearnedReward
from perilune.rollout.limits import episode_tokens
from perilune.rollout.opponents import Opponents
from perilune.rollout.rollout import Rollout, Seat
from perilune.rollout.timing import Stopwatch
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import Sessions
from perilune.watchdog import STALL, Waiting


@dataclass(frozen=True)
class RolloutWorker:
    """Plays tasks: one group of `samples` episodes a task and player. Of several processes each plays some of
    the tasks, and all are given all groups. What `opponents` play is in no group.

    Episodes advance together: the turns that are due are sampled in one batch, the environment takes them
    all, and so on until none is due. The random numbers of a turn are keyed by (seed, step, task's place in
    the step, sample, turn), so an episode does not depend on what else is in the batch.
    """

    engine: SamplingBackend
    tokenizer: Tokenizer
    scorer: Scorer
    environment: Environment
    seed: int
    learned: LearnedReward | None = None
    ranks: Ranks = SINGLE_RANK
    opponents: Opponents | None = None

    def play(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        params: SamplingParams,
        step: int,
        watch: Stopwatch,
        first: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Groups:
        """Sample and score; groups come in the order of `tasks`, whose place in the step is from `first`.

        Raises:
            WorkFailedError: when sampling fails, or more episodes do than the recipe allows.
        """
        if self.opponents is not None:
            self.opponents.prepare(step)
        places = self.ranks.shard(range(first, first + len(tasks)))
        tasks = self.ranks.shard(tasks)
        begun = time.perf_counter()
        sessions = Sessions(self.scorer, self.environment)
        with self._scoring(len(tasks) * samples):
            games = self._open(sessions, tasks, samples, step, places)
            self._listen(games, params)
        watch.scoring += time.perf_counter() - begun
        try:
            while due := [game for game in games if not game.is_over]:
                self._turn(sessions, due, samples, params, watch, on_progress)
                if on_progress is not None:
                    on_progress(sum(game.is_over for game in games), len(games))
        finally:
            sessions.close([game.session for game in games])
        begun = time.perf_counter()
        groups = [
            group
            for start in range(0, len(games), samples)
            for player in games[start].own
            if (group := self._group(games[start : start + samples], player, params))
        ]
        if self.learned is not None:
            groups = self.learned.rescore(groups)
        watch.scoring += time.perf_counter() - begun
        groups = gather_groups(groups, self.ranks, watch)
        require_few_failures([one for group in groups for one in group], self.scorer.settings, f"step {step}")
        return groups

    def _open(
        self, sessions: Sessions, tasks: Sequence[Task], samples: int, step: int, places: Sequence[int]
    ) -> list[Rollout]:
        """All sessions of a group have one seed, so that all its episodes have one prompt."""
        keys = [(self.seed, step, index) for index in places]
        opened = sessions.open(
            [(task, session_seed(key)) for task, key in zip(tasks, keys, strict=True) for _ in range(samples)]
        )
        players = getattr(self.environment, "players", 1)
        taken = [frozenset(self.opponents.seats(key, players) if self.opponents else ()) for key in keys]
        games = [
            Rollout(
                one.task, keys[place // samples], place % samples, one, players,
                others=taken[place // samples],
            )
            for place, one in enumerate(opened)
        ]  # fmt: skip
        for game in games:
            game.advance()
        return games

    def _turn(  # noqa: PLR0917
        self,
        sessions: Sessions,
        due: Sequence[Rollout],
        samples: int,
        params: SamplingParams,
        watch: Stopwatch,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """One turn of the policy in each of these games, and what the environment makes of it."""
        begun = time.perf_counter()
        with Waiting("sampling") as wait:

            def progress(finished: int, total: int) -> None:
                wait.progress()
                if on_progress is not None and len(due) == total and due[0].is_single_turn:
                    on_progress(finished, total)

            asked = [game.seat.context() for game in due]
            completions = self._sample(due, asked, samples, params, progress)
        watch.sampling += time.perf_counter() - begun
        watch.tokens += sum(len(one.token_ids) for one in completions)

        begun = time.perf_counter()
        moves = []
        for game, ids, one in zip(due, asked, completions, strict=True):
            text = self._text(one)
            game.add_completion(ids, one, text)
            if not game.is_over:
                moves.append((game.session, text, one.finish_reason == "stop"))
        with self._scoring(len(moves)):
            sessions.step(moves)
            for game, one in zip(due, completions, strict=True):
                if not game.is_over:
                    check_judged(game, self._text(one))
                    game.advance()
            self._listen([game for game in due if not game.is_over], params)
        watch.scoring += time.perf_counter() - begun

    def _sample(
        self,
        due: Sequence[Rollout],
        asked: Sequence[list[int]],
        samples: int,
        params: SamplingParams,
        progress: Callable[[int, int], None],
    ) -> list[Completion]:
        """The next turn of each game, by whoever has the seat."""
        found: dict[Rollout, Completion] = {}
        for is_others in (False, True):
            pairs = [
                (game, ids) for game, ids in zip(due, asked, strict=True) if game.is_others_turn == is_others
            ]
            engine = self.opponents.engine if is_others and self.opponents else self.engine
            if not pairs:
                continue
            if due[0].actions:
                prompts = [Prompt(ids, game.turn_key) for game, ids in pairs]
                groups = engine.sample(prompts, 1, params, progress)
                found |= {game: one for (game, _), (one,) in zip(pairs, groups, strict=True)}
            else:
                first = {game.key: Prompt(ids, game.key) for game, ids in pairs}
                groups = engine.sample(list(first.values()), samples, params, progress)
                of_key = dict(zip(first, groups, strict=True))
                found |= {game: of_key[game.key][game.sample] for game, _ in pairs}
        return [found[game] for game in due]

    def _listen(self, games: Sequence[Rollout], params: SamplingParams) -> None:
        """Let the players to move take in what is new to them; end games that have no room for a turn."""
        known: dict[tuple[tuple[str, str], ...], list[int]] = {}
        began: dict[tuple[int, int, int], list[int]] = {}
        for game in games:
            if game.is_over:
                continue
            seat, new = game.seat, game.news
            if seat.prompt_ids:
                try:
                    seat.add_observation(self.tokenizer, new)
                except RequestError as error:  # it says what no token can
                    game.fail("environment", error.what)
            else:
                opening = (*game.task.prompt, *new)
                key = tuple((message["role"], message["content"]) for message in opening)
                if key not in known:
                    known[key] = self.tokenizer.encode_prompt(opening)
                seat.begin(opening, known[key])
                if not game.actions and began.setdefault(game.key, seat.prompt_ids) != seat.prompt_ids:
                    game.fail("environment", "the same task and seed began differently")
            if game.actions and not game.is_over and not self._has_room(game, params):
                game.cut()

    def _has_room(self, game: Rollout, params: SamplingParams) -> bool:
        settings, positions = self.scorer.settings, self.engine.positions
        tokens = len(game.seat.token_ids) + params.max_tokens
        return (
            tokens <= episode_tokens(self.environment, settings, params.max_tokens)
            and len(game.actions) < (settings.max_turns or math.inf)
            and (positions is None or len(game.seat.prompt_ids) + tokens <= positions)
        )

    def _scoring(self, moves: int) -> Waiting:
        return Waiting("scoring", STALL + 2 * moves * self.scorer.item_seconds)

    def _text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def _group(self, games: Sequence[Rollout], player: int, params: SamplingParams) -> tuple[Episode, ...]:
        """The episodes of a player; one who never moved has none, unless it is there to tell of a failure."""
        moved = [
            game for game in games if game.seats[player].turns or (game.failure and player == game.own[0])
        ]
        group = tuple(self._episode(game, player) for game in moved)
        check_group(group, moved, player, params if isinstance(self.engine, Engine) else None)
        return group

    def _episode(self, game: Rollout, player: int) -> Episode:
        seat, outcome = game.seats[player], game.outcome(player)
        _, step, index = game.key
        group_id = f"{step}/{index}/p{player}" if player else f"{step}/{index}"
        return Episode(
            episode_id=f"{group_id}/{game.sample}",
            group_id=group_id,
            task_id=game.task.task_id,
            environment=self.environment.id,
            seed=self.seed,
            messages=tuple(seat.messages or game.task.prompt),
            prompt_ids=np.asarray(seat.prompt_ids, dtype=np.int32),
            token_ids=np.asarray(seat.token_ids, dtype=np.int32),
            loss_mask=seat.mask(),
            logprobs=seat.sampled("logprobs", 0.0, np.float32),
            policy_version=seat.sampled("policy_version", -1, np.int32),
            finish_reason=game.finish_reason,
            metrics=_metrics(game, seat, outcome),
            **outcome_fields(outcome),
        )


def _metrics(game: Rollout, seat: Seat, outcome: Outcome) -> dict[str, float]:
    figures = outcome_metrics(outcome)
    if not game.is_single_turn:
        figures["turns"] = float(len(seat.turns))
    if game.task.difficulty is not None:
        figures["difficulty"] = float(game.task.difficulty)
    return figures


def session_seed(key: tuple[int, int, int]) -> int:
    """Seed of the sessions that play the task at (seed, step, place in the step); 48 bits."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:6], "big")
