"""Evaluating the members of a league: matches against earlier policies and named players, and exact play."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from perilune.engine.backend import SamplingBackend
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Task
from perilune.environments.core.registry import make_environment
from perilune.games.exact_games import ExactGame
from perilune.games.ratings import Match, compute_ratings, returns_to_points
from perilune.metrics.bootstrap import Interval, bootstrap_problems, paired_difference
from perilune.models.decoder import Decoder
from perilune.rollout.opponents import FixedOpponents
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.selfplay.exact_play import exact_figures
from perilune.verifiers import Scorer

MATCH_STEP = 0  # step in the keys of the matches' random numbers; training counts from 1
ILLEGAL_SLACK = 0.01  # probability mass by which a new champion may make more illegal moves than the last

Returns = dict[str, float]
"""The policy's return in each game of a match, by the game's index. Games that failed, or ended before the
policy moved, are missing. Games with the same index have the same deal and chance events in every match."""


@dataclass(frozen=True)
class MatchEvaluator:
    """Plays matches with one game per held-out task; the policy's player alternates from game to game.

    Attributes:
        section: the environment's section of the recipe.
        game: the game for exact computations; None if it is too large.
    """

    rollouts: RolloutWorker
    section: Mapping[str, Any]
    tasks: Sequence[Task]
    params: SamplingParams
    game: ExactGame | None

    @property
    def engine(self) -> Engine:
        assert isinstance(self.rollouts.engine, Engine)
        return self.rollouts.engine

    def play_policy(self, engine: SamplingBackend) -> Returns:
        """Return the returns of a match against the policy of `engine`."""
        return self._play(replace(self.rollouts, opponents=FixedOpponents(engine)))

    def play_named(self, name: str) -> Returns:
        """Return the returns of a match against a named player of the environment, such as `random`."""
        section = {**self.section, "opponent": name}
        with Scorer(section) as scorer:
            rollouts = replace(self.rollouts, scorer=scorer, environment=make_environment(section))
            return self._play(rollouts)

    def exact(self, decoder: Decoder) -> dict[str, float]:
        """Return `exact_figures` of a policy; empty when the game is too large."""
        if self.game is None:
            return {}
        return exact_figures(self.game, decoder, self.rollouts.tokenizer, self.params.temperature)

    def _play(self, rollouts: RolloutWorker) -> Returns:
        rollouts = replace(
            rollouts, learned_reward=None, sub_agents=replace(rollouts.sub_agents, trained=False)
        )
        groups = rollouts.play(self.tasks, samples=1, params=self.params, step=MATCH_STEP, watch=Stopwatch())
        return {
            episode.group_id.split("/")[1]: episode.reward
            for (episode,) in groups
            if episode.reward is not None
        }


@dataclass(frozen=True)
class Standings:
    """The results of all matches of a league.

    Attributes:
        record: the results as JSON, to which every evaluated member is added.
        named: players of the environment against which every member is evaluated.
    """

    record: dict[str, Any]
    named: Sequence[str]
    seed: int

    def largest_return(self, returns: Sequence[float] = ()) -> float:
        """Record `returns`; return the largest absolute return so far, which counts as that of a win."""
        self.record["most"] = max([self.record.get("most", 0.0), *map(abs, returns)])
        return float(self.record["most"])

    def add(self, step: int, returns: Mapping[str, Returns], exact: Mapping[str, float]) -> dict[str, float]:
        """Record the matches of the member of `step`; return its metrics.

        Args:
            returns: the returns of its matches, by the opponent's name.
            exact: its `exact_figures`.

        Returns:
            `exact`, and the mean return of each match and the Elo rating, with 95% intervals.
        """
        figures = dict(exact)
        for name, match in returns.items():
            values = list(match.values())
            self.largest_return(values)
            figures |= bootstrap_problems(values, seed=self.seed).figures(f"against/{name}")
            self.record.setdefault("matches", []).append([f"step {step}", name, values])
        if rating := self.ratings().get(f"step {step}"):
            figures |= rating.figures("elo")
        self.record.setdefault("judgements", []).append({"step": step, **figures})
        self.record.setdefault("returns", {})[str(step)] = {name: dict(row) for name, row in returns.items()}
        return figures

    def reasons_to_reject(self, step: int, champion: int) -> list[str]:
        """Return why the member of `step` is worse than the champion; empty if it becomes the champion.

        If exploitability can be computed, it decides, together with the mass of illegal moves. Else the
        member must not clearly lose its match against the champion, and must not get clearly lower returns
        than the champion against any named player. "Clearly" means by a 95% interval.
        """
        before, after = self._figures(champion), self._figures(step)
        if "exploitability" in after:
            slack = {"exploitability": 0.0, "illegal_mass": ILLEGAL_SLACK}
            return [
                f"{name.replace('_', ' ')} was {before[name]:.3f} at step {champion}"
                for name, more in slack.items()
                if after[name] > before[name] + more
            ]
        lost = after.get(f"against/step {champion}/high", 0.0) < 0
        worse = self._worse_against(step, champion)
        return [f"loses to step {champion}"] * lost + [
            f"lower return against {name} than step {champion}" for name in worse
        ]

    def opponents_lost_to(self) -> list[str]:
        """Return the opponents against which the newest member clearly plays worse than the initial policy.

        "the initial policy" is among them if the newest member clearly loses its match against that policy.
        """
        step = self.record["judgements"][-1]["step"]
        if step == 0:
            return []
        lost = self._figures(step)["against/step 0/high"] < 0
        return self._worse_against(step, 0) + ["the initial policy"] * lost

    def ratings(self) -> dict[str, Interval]:
        """Return Elo ratings, relative to `random` if it is in `named`, else to the initial policy."""
        played = [entry for entry in self.record.get("matches", ()) if entry[2]]
        win = self.largest_return()
        matches = [Match(first, second, returns_to_points(returns, win)) for first, second, returns in played]
        return compute_ratings(matches, "random" if "random" in self.named else "step 0", seed=self.seed)

    def summary(self) -> dict[str, Any]:
        """Return all evaluations in order, ratings and matches."""
        return {
            "judgements": self.record["judgements"],
            "ratings": {name: rating._asdict() for name, rating in self.ratings().items()},
            "matches": [_match_summary(*entry) for entry in self.record["matches"]],
        }

    def _figures(self, step: int) -> dict[str, float]:
        return next(dict(entry) for entry in self.record["judgements"] if entry["step"] == step)

    def _worse_against(self, step: int, other: int) -> list[str]:
        """Return the named players against which `step` got clearly less than `other` in the same games."""
        own, others = (self.record["returns"][str(number)] for number in (step, other))
        worse = []
        for name in self.named:
            both = sorted(own[name].keys() & others[name].keys())
            before, after = ({game: returns[name][game] for game in both} for returns in (others, own))
            if both and paired_difference(before, after, seed=self.seed).high < 0:
                worse.append(name)
        return worse


def _match_summary(first: str, second: str, returns: Sequence[float]) -> dict[str, Any]:
    counts = {"won": 0, "drawn": 0, "lost": 0}
    for value in returns:
        counts["won" if value > 0 else "lost" if value < 0 else "drawn"] += 1
    mean = fmean(returns) if returns else None
    return {"first": first, "second": second, **counts, "return": mean}
