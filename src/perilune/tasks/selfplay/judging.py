"""By what a policy is judged: matches with frozen ones and with the environment's players, and exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perilune.engine.backend import SamplingBackend
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Task
from perilune.environments.core.registry import make_environment
from perilune.games.exact_games import ExactGame
from perilune.games.ratings import Match, points_of, ratings
from perilune.metrics.bootstrap import Interval, bootstrap_problems, paired_difference
from perilune.models.decoder import Decoder
from perilune.rollout.opponents import Rivals
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.selfplay.exact_play import exact_figures
from perilune.verifiers import Scorer

JUDGED = 0  # the step that random numbers of matches are keyed by; training counts from 1
ILLEGAL_SLACK = (
    0.01  # of the probability mass, by which a champion may move illegally more often than the last
)

Returns = dict[str, float]
"""What the policy got, by the place of the game in the match. Games that failed, or were over before it had
moved, are not there. The same place is the same deal in every match of a run, with the same luck."""


@dataclass(frozen=True)
class Judge:
    """One game a task of the held-out split; the policy's seat changes from game to game.

    Attributes:
        rollouts: with the policy's engine.
        section: of the recipe's environment.
        game: the environment's, where it is small enough to be looked at whole.
    """

    rollouts: RolloutWorker
    section: Mapping[str, Any]
    tasks: Sequence[Task]
    params: SamplingParams
    game: ExactGame | None

    @property
    def engine(self) -> Engine:
        """Of the policy."""
        assert isinstance(self.rollouts.engine, Engine)
        return self.rollouts.engine

    def against(self, engine: SamplingBackend) -> Returns:
        """The returns of a match against who samples with `engine`."""
        return self._play(replace(self.rollouts, learned=None, opponents=Rivals(engine)))

    def against_named(self, name: str) -> Returns:
        """The same against a player of the environment's own."""
        section = {**self.section, "opponent": name}
        with Scorer(section) as scorer:
            rollouts = replace(self.rollouts, scorer=scorer, environment=make_environment(section))
            return self._play(replace(rollouts, learned=None))

    def exact(self, decoder: Decoder) -> dict[str, float]:
        """`exact_figures` of a policy; none where the game is too large."""
        if self.game is None:
            return {}
        return exact_figures(self.game, decoder, self.rollouts.tokenizer, self.params.temperature)

    def _play(self, rollouts: RolloutWorker) -> Returns:
        groups = rollouts.play(self.tasks, samples=1, params=self.params, step=JUDGED, watch=Stopwatch())
        return {one.group_id.split("/")[1]: one.reward for (one,) in groups if one.reward is not None}


@dataclass(frozen=True)
class Table:
    """Who got what against whom: `record` is JSON, and grows with every policy that is judged.

    Attributes:
        named: the environment's players that every policy is judged against.
    """

    record: dict[str, Any]
    named: Sequence[str]
    seed: int

    def most(self, returns: Sequence[float] = ()) -> float:
        """The largest return so far, either way: what a win is worth."""
        self.record["most"] = max([self.record.get("most", 0.0), *map(abs, returns)])
        return float(self.record["most"])

    def enter(
        self, step: int, returns: Mapping[str, Returns], exact: Mapping[str, float]
    ) -> dict[str, float]:
        """Note what the policy of that step got, and return the figures of it: means, exact ones, Elo."""
        figures = dict(exact)
        for name, found in returns.items():
            self.most(list(found.values()))
            figures |= _named(f"against/{name}", self._mean(found))
            self.record.setdefault("matches", []).append([f"step {step}", name, list(found.values())])
        if rating := self.ratings().get(f"step {step}"):
            figures |= _named("elo", rating)
        self.record.setdefault("judgements", []).append({"step": step, **figures})
        self.record.setdefault("returns", {})[str(step)] = {name: dict(one) for name, one in returns.items()}
        return figures

    def worse(self, step: int, champion: int) -> list[str]:
        """In what the policy of that step is worse than the champion; if in nothing, it replaces it.

        Where exploitability can be computed it decides, unless more of the policy goes to illegal moves. Else
        no match may be clearly lost to the champion, and against nobody may the policy clearly get less than
        the champion did: by 95% intervals.
        """
        before, after = self._judged(champion), self._judged(step)
        if "exploitability" in after:
            slack = {"exploitability": 0.0, "illegal_mass": ILLEGAL_SLACK}
            return [
                f"{name.replace('_', ' ')} was {before[name]:.3f} at step {champion}"
                for name, more in slack.items()
                if after[name] > before[name] + more
            ]
        lost = after.get(f"against/step {champion}/high", 0.0) < 0
        less = self._clearly_less(step, champion)
        return [f"loses to step {champion}"] * lost + [f"less against {name} than then" for name in less]

    def weaker(self) -> list[str]:
        """Against whom the policy judged last clearly plays worse than the first one."""
        step = self.record["judgements"][-1]["step"]
        if step == 0:
            return []
        lost = self._judged(step)["against/step 0/high"] < 0
        return self._clearly_less(step, 0) + ["the policy it began as"] * lost

    def ratings(self) -> dict[str, Interval]:
        """Elo of all; chance is 0 where it is among them, else the first policy."""
        played = [one for one in self.record.get("matches", ()) if one[2]]
        matches = [Match(first, second, points_of(found, self.most())) for first, second, found in played]
        return ratings(matches, "random" if "random" in self.named else "step 0", seed=self.seed)

    def summary(self) -> dict[str, Any]:
        """Judgements in order, ratings, and the matches that these are made of."""
        return {
            "judgements": self.record["judgements"],
            "ratings": {name: one._asdict() for name, one in self.ratings().items()},
            "matches": [_told(*one) for one in self.record["matches"]],
        }

    def _judged(self, step: int) -> dict[str, float]:
        return next(dict(one) for one in self.record["judgements"] if one["step"] == step)

    def _clearly_less(self, step: int, other: int) -> list[str]:
        """Against which of the environment's players one policy got less than another, in the same games."""
        now, then = (self.record["returns"][str(one)] for one in (step, other))
        less = []
        for name in self.named:
            both = sorted(now[name].keys() & then[name].keys())
            before, after = ({game: found[name][game] for game in both} for found in (then, now))
            if both and paired_difference(before, after, seed=self.seed).high < 0:
                less.append(name)
        return less

    def _mean(self, returns: Returns) -> Interval:
        return bootstrap_problems(list(returns.values()), seed=self.seed)


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}/low": interval.low, f"{name}/high": interval.high}


def _told(first: str, second: str, returns: Sequence[float]) -> dict[str, Any]:
    counts = {"won": 0, "drawn": 0, "lost": 0}
    for one in returns:
        counts["won" if one > 0 else "lost" if one < 0 else "drawn"] += 1
    mean = math.fsum(returns) / len(returns) if returns else None
    return {"first": first, "second": second, **counts, "return": mean}
