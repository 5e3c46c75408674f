"""A league: earlier versions of the policy to play against, and a champion.

A policy that only plays against its current self can cycle. A share of the tasks is therefore played against
earlier versions, drawn uniformly or by how hard they are to beat (prioritised fictitious self-play: Vinyals
et al. 2019, Nature 575). A new member becomes the champion if it is not worse than the last champion.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.engine.engine import Engine
from perilune.games.ratings import returns_to_points
from perilune.learn.trainer import Learner
from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.rl.opponents import NoOpponents
from perilune.tasks.selfplay.health import find_alarms, game_figures
from perilune.tasks.selfplay.matches import MatchEvaluator, Standings
from perilune.tasks.selfplay.snapshots import Snapshots
from perilune.tasks.selfplay.spec import SelfPlaySpec
from perilune.tasks.stage.publishing import Publisher
from perilune.watchdog import Watchdog

DECAY = 0.9  # weight of earlier steps in the mean points against a member


class League(NoOpponents):
    """The members of a stage's league. All state is in the learner's memory and the snapshots' files.

    Args:
        learner: its policy joins the league every `league.every` steps.
        evaluator: plays the matches of the policy.

    Attributes:
        rollouts: the evaluator's worker, with members of the league as opponents.
    """

    def __init__(
        self,
        workspace: Workspace,
        spec: SelfPlaySpec,
        learner: Learner,
        snapshots: Snapshots,
        evaluator: MatchEvaluator,
    ) -> None:
        self._workspace, self._spec, self._settings = workspace, spec, spec.league
        self._learner, self._snapshots, self._evaluator = learner, snapshots, evaluator
        self._lines: list[Mapping[str, float]] | None = None
        self._magnet: int | None = None  # the member that the reference is a copy of, in this attempt
        self.updates_reference = spec.league.magnet == "newest"
        super().__init__(replace(evaluator.rollouts, opponents=self))

    @property
    def _record(self) -> dict[str, Any]:
        """The checksum and mean points of each member, the champion, alarms and standings, as JSON."""
        empty = {"members": {}, "points": {}, "champion": 0, "alarms": [], "table": {}}
        record: dict[str, Any] = self._learner.memory.setdefault("league", empty)
        return record

    @property
    def _standings(self) -> Standings:
        return Standings(self._record["table"], self._settings.against, self._workspace.job.seed)

    # -- the interface Opponents -------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, which samples with the member that was drawn for the step."""
        return self._snapshots.engine

    def prepare(self, step: int) -> None:
        """Draw and load the member to play against, which depends on the seed and on earlier results."""
        if not self._record["members"]:
            self._add_member(0)
        self._met = self._draw(step)
        self._load(self._met)

    def opponent_players(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """Return all players but one for the share `league.share` of tasks, and none for the others."""
        random = np.random.default_rng(key)
        if random.random() >= self._settings.share:
            return ()
        own_player = int(random.integers(players))
        return [player for player in range(players) if player != own_player]

    def _draw(self, step: int) -> int:
        frozen = sorted(map(int, self._record["members"]))
        members = sorted({frozen[0], self._record["champion"], *frozen[-self._settings.size :]})
        weights = np.ones(len(members))
        if self._settings.choice == "prioritised":
            weights = np.array([(1 - self._record["points"][str(member)]) ** 2 + 1e-3 for member in members])
        random = np.random.default_rng([self._workspace.job.seed, step])
        return int(random.choice(members, p=weights / weights.sum()))

    def _load(self, step: int) -> Engine:
        return self._snapshots.load(step, self._record["members"][str(step)])

    def update_reference(self, reference: Decoder | None) -> bool:
        """With `magnet: newest`, make the reference a copy of the newest member."""
        newest = max(map(int, self._record["members"]))
        if reference is None or not self.updates_reference or newest == self._magnet:
            return False
        self._snapshots.copy(newest, self._record["members"][str(newest)], reference)
        self._magnet = newest
        return True

    # -- after each step ---------------------------------------------------------------------------------

    def after_step(
        self, step: int, groups: Sequence[WeightedGroup], figures: dict[str, float]
    ) -> dict[str, float]:
        """Return the metrics with those of the step's games; if it is due, add the policy to the league."""
        groups = [group for group in groups if not group.episodes[0].is_sub_agent]
        episodes = [episode for group in groups for episode in group.episodes]
        figures = {**figures, **game_figures(episodes), "met": float(self._met), **self._points(groups)}
        if step % self._settings.every == 0 or step == self._spec.steps:
            figures |= self._add_member(step)
        self._check_alarms(step, figures)
        return figures

    def _points(self, groups: Sequence[WeightedGroup]) -> dict[str, float]:
        """Record and return the mean points against the step's member, on which prioritised draws depend."""
        returns = [
            episode.reward
            for group in groups
            if self._has_opponents(group)
            for episode in group.episodes
            if episode.reward is not None
        ]
        if not returns:
            return {}
        points = returns_to_points(returns, self._standings.largest_return(returns))
        mean, earlier = sum(points) / len(points), self._record["points"][str(self._met)]
        self._record["points"][str(self._met)] = DECAY * earlier + (1 - DECAY) * mean
        return {"points_against_met": mean}

    def _has_opponents(self, group: WeightedGroup) -> bool:
        step, index = map(int, group.episodes[0].group_id.split("/")[:2])
        players = getattr(self.rollouts.environment, "players", 1)
        return bool(self.opponent_players((self._workspace.job.seed, step, index), players))

    def _add_member(self, step: int) -> dict[str, float]:
        """Add the current policy to the league, evaluate it, and return its metrics."""
        record, standings, evaluator = self._record, self._standings, self._evaluator
        with Watchdog("judging", 3600.0):
            Publisher(evaluator.engine, self._learner).publish()
            digest = self._snapshots.save(step, self._learner.decoder)
            returns = {name: evaluator.play_named(name) for name in self._settings.against}
            for member in sorted({0, record["champion"]}) if step else ():
                returns[f"step {member}"] = evaluator.play_policy(self._load(member))
            figures = standings.add(step, returns, evaluator.exact(self._learner.decoder))
        record["members"][str(step)], record["points"][str(step)] = digest, 0.5
        worse = standings.reasons_to_reject(step, record["champion"]) if step else []
        if not worse:
            record["champion"] = step
        logged = ", ".join(f"{name} {value:+.2f}" for name, value in figures.items() if _is_logged(name))
        self._workspace.log(f"step {step} joined the league: {logged}; {'; '.join(worse) or 'the champion'}")
        self._workspace.event("judged", step=step, champion=record["champion"], worse=worse)
        return figures | {"champion": float(record["champion"])}

    def _check_alarms(self, step: int, line: Mapping[str, float]) -> None:
        """Record and log new alarms, and extend the alarms that continue."""
        if self._lines is None:
            self._lines = list(self._workspace.step_metrics())
        self._lines.append(line)
        recorded = self._record["alarms"]
        for alarm in find_alarms(self._lines, self._standings.opponents_lost_to()):
            active = [item for item in recorded if item["name"] == alarm.name and item["until"] == step - 1]
            if active:
                active[0]["until"] = step
                continue
            kind = "collapse" if alarm.is_collapse else "narrow"
            entry = {"name": alarm.name, "kind": kind, "message": alarm.message, "step": step, "until": step}
            recorded.append(entry)
            self._workspace.log(f"step {step}: {kind}: {alarm.message}")
            self._workspace.event("alarm", step=step, name=alarm.name, message=alarm.message)

    # -- at the end --------------------------------------------------------------------------------------

    def save_final(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the champion instead of the latest policy."""
        self._load(self._record["champion"])
        save_policy(path, self._snapshots.decoder, tokenizer)

    def summary(self) -> dict[str, Any]:
        """Return `league`: the champion, evaluations, ratings, matches and alarms."""
        recorded = self._record["alarms"]
        return {
            "league": {
                "champion": self._record["champion"],
                **self._standings.summary(),
                "alarms": recorded,
                "collapsed": any(item["kind"] == "collapse" for item in recorded),
            }
        }


def _is_logged(name: str) -> bool:
    return name in ("exploitability", "elo") or (name.startswith("against/") and name.count("/") == 1)
