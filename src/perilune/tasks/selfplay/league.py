"""A league: frozen past policies to play against, and a champion that only one not worse than it replaces.

A policy that only plays its present self can chase it in circles. Some of the tasks are played against frozen
ones instead, drawn uniformly or by how hard they are to beat (prioritised fictitious self-play: Vinyals et
al. 2019, Nature 575).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.engine.engine import Engine
from perilune.games.ratings import points_of
from perilune.learn.trainer import Learner
from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.rl.opponents import NoOpponents
from perilune.tasks.selfplay.health import alarms, game_figures
from perilune.tasks.selfplay.judging import Judge, Table
from perilune.tasks.selfplay.snapshots import Snapshots
from perilune.tasks.selfplay.spec import SelfPlaySpec
from perilune.tasks.stage.publishing import Publisher
from perilune.watchdog import Waiting

MEMORY = 0.9  # of the mean points against a member, at each step in which it is met


class League(NoOpponents):
    """The frozen policies of a stage. What must survive a kill is in the learner's memory and in their files.

    Args:
        learner: whose policy is frozen every so many steps.
        judge: with rollouts of that policy.

    Attributes:
        rollouts: the same, where some seats are taken by a member.
    """

    def __init__(
        self, workspace: Workspace, spec: SelfPlaySpec, learner: Learner, snapshots: Snapshots, judge: Judge
    ) -> None:
        self._workspace, self._spec, self._settings = workspace, spec, spec.league
        self._learner, self._snapshots, self._judge = learner, snapshots, judge
        self._lines: list[Mapping[str, float]] | None = None
        super().__init__(replace(judge.rollouts, opponents=self))

    @property
    def _record(self) -> dict[str, Any]:
        """JSON: of each member its checksum and mean points against it, the champion, alarms, the table."""
        founded = {"members": {}, "points": {}, "champion": 0, "alarms": [], "table": {}}
        found: dict[str, Any] = self._learner.memory.setdefault("league", founded)
        return found

    @property
    def _table(self) -> Table:
        return Table(self._record["table"], self._settings.against, self._workspace.job.seed)

    # -- as opponents ------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Samples as the member that was drawn for the step."""
        return self._snapshots.engine

    def prepare(self, step: int) -> None:
        """Draw the member that is met at this step; it follows from the seed and what is known by then."""
        if not self._record["members"]:
            self._freeze_and_judge(0)
        self._met = self._drawn(step)
        self._seat(self._met)

    def seats(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """In a share of the tasks all seats but one, drawn anew for each task."""
        random = np.random.default_rng(key)
        if random.random() >= self._settings.share:
            return ()
        own = int(random.integers(players))
        return [seat for seat in range(players) if seat != own]

    def _drawn(self, step: int) -> int:
        frozen = sorted(map(int, self._record["members"]))
        members = sorted({frozen[0], self._record["champion"], *frozen[-self._settings.size :]})
        weights = np.ones(len(members))
        if self._settings.choice == "prioritised":
            weights = np.array([(1 - self._record["points"][str(one)]) ** 2 + 1e-3 for one in members])
        random = np.random.default_rng([self._workspace.job.seed, step])
        return int(random.choice(members, p=weights / weights.sum()))

    def _seat(self, step: int) -> Engine:
        return self._snapshots.seat(step, self._record["members"][str(step)])

    # -- after each step ---------------------------------------------------------------------------------

    def after(
        self, step: int, groups: Sequence[WeightedGroup], figures: Mapping[str, float]
    ) -> dict[str, float]:
        """The figures, with those of the step's games; every so many steps freeze the policy and judge it."""
        episodes = [one for group in groups for one in group.episodes]
        found = {**figures, **game_figures(episodes), "met": float(self._met), **self._points(groups)}
        if step % self._settings.every == 0 or step == self._spec.steps:
            found |= self._freeze_and_judge(step)
        self._watch(step, found)
        return found

    def _points(self, groups: Sequence[WeightedGroup]) -> dict[str, float]:
        """Points against the member that was met, which prioritised choices go by."""
        returns = [
            one.reward
            for group in groups
            if self._is_met(group)
            for one in group.episodes
            if one.reward is not None
        ]
        if not returns:
            return {}
        points = points_of(returns, self._table.most(returns))
        mean, known = sum(points) / len(points), self._record["points"][str(self._met)]
        self._record["points"][str(self._met)] = MEMORY * known + (1 - MEMORY) * mean
        return {"points_against_met": mean}

    def _is_met(self, group: WeightedGroup) -> bool:
        step, place = map(int, group.episodes[0].group_id.split("/")[:2])
        players = getattr(self.rollouts.environment, "players", 1)
        return bool(self.seats((self._workspace.job.seed, step, place), players))

    def _freeze_and_judge(self, step: int) -> dict[str, float]:
        record, table = self._record, self._table
        with Waiting("judging", 3600.0):
            Publisher(self._judge.engine, self._learner).publish()
            digest = self._snapshots.freeze(step, self._learner.decoder)
            returns = {name: self._judge.against_named(name) for name in self._settings.against}
            for one in sorted({0, record["champion"]}) if step else ():
                returns[f"step {one}"] = self._judge.against(self._seat(one))
            figures = table.enter(step, returns, self._judge.exact(self._learner.decoder))
        record["members"][str(step)], record["points"][str(step)] = digest, 0.5
        worse = table.worse(step, record["champion"]) if step else []
        if not worse:
            record["champion"] = step
        told = ", ".join(f"{name} {value:+.2f}" for name, value in figures.items() if _is_told(name))
        self._workspace.log(f"step {step} frozen: {told}; {'; '.join(worse) or 'the champion'}")
        self._workspace.event("judged", step=step, champion=record["champion"], worse=worse)
        return figures | {"champion": float(record["champion"])}

    def _watch(self, step: int, line: Mapping[str, float]) -> None:
        """Look for signs of a collapse, and tell of those that are new."""
        if self._lines is None:
            self._lines = list(self._workspace.metrics())
        self._lines.append(line)
        told = self._record["alarms"]
        for alarm in alarms(self._lines, self._table.weaker()):
            on = [one for one in told if one["name"] == alarm.name and one["until"] == step - 1]
            if on:
                on[0]["until"] = step
                continue
            kind = "collapse" if alarm.is_collapse else "narrow"
            told.append({"name": alarm.name, "kind": kind, "said": alarm.said, "step": step, "until": step})
            self._workspace.log(f"step {step}: {kind}: {alarm.said}")
            self._workspace.event("alarm", step=step, name=alarm.name, said=alarm.said)

    # -- at the end --------------------------------------------------------------------------------------

    def write(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the champion in place of the policy that was trained last."""
        self._seat(self._record["champion"])
        save_policy(path, self._snapshots.decoder, tokenizer)

    def summary(self) -> dict[str, Any]:
        """`league`: the champion, what each member was found to be, who beat whom, ratings and alarms."""
        found = self._record["alarms"]
        return {
            "league": {
                "champion": self._record["champion"],
                **self._table.summary(),
                "alarms": found,
                "collapsed": any(one["kind"] == "collapse" for one in found),
            }
        }


def _is_told(name: str) -> bool:
    return name in ("exploitability", "elo") or (name.startswith("against/") and name.count("/") == 1)
