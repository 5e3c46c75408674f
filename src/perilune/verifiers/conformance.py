"""What any environment must do, found out by playing it: the same tests for ours, adapters and yours.

from perilune.verifiers.conformance import check_environment

def test_my_environment_conforms():
    assert not check_environment({"id": "my_game"}).findings
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import (
    Environment,
    Failure,
    Observation,
    Outcome,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.registry import make_environment
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions

ACCEPTED = 1.0  # a reward of at least this is a pass, here as in evaluations
WORTHLESS = ("", " ", "xyzzy", "I do not know.", ";", "()", "[]", "{}", "None", "0" * 200, "\u0000\n\ufffd")
MOST_TASKS = 200  # of each split, that must not be in the other

Player = Callable[[Observation, int], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an environment must do, and does not; `task_id` is empty where no task shows it."""

    check: str
    task_id: str
    what: str


@dataclass(slots=True)
class Conformance:
    """What was found out.

    Attributes:
        checked: how often each thing was looked at.
        findings: what was not as it must be.
    """

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def expect(self, check: str, task: Task | None, holds: bool, what: str) -> bool:
        """Count a look at something."""
        self.checked[check] += 1
        if not holds:
            self.findings.append(Finding(check, task.task_id if task else "", what))
        return holds


@dataclass(slots=True)
class _Played:
    """An episode that was played: each observation, and the end."""

    transcript: Transcript
    observations: list[Observation]
    outcome: Outcome
    done: bool
    rewards: tuple[float, ...]  # by player


def check_environment(
    section: Mapping[str, Any], *, tasks: int = 4, seed: int = 0, limits: ScorerLimits | None = None
) -> Conformance:
    """Play some training tasks of the environment that `section` describes, right, wrong and at random.

    Everything that needs no trust runs where it will run in a stage: in the scorer's process.

    Raises:
        RequestError: when the section is wrong, or the environment has no training tasks.
    """
    environment, again = make_environment(section), make_environment(section)
    found = Conformance()
    chosen = list(islice(environment.tasks("train", seed), tasks))
    _check_tasks(found, environment, again, chosen, seed)
    _check_closing(found, environment, chosen)
    with Scorer(section, limits) as scorer, Scorer(section, limits) as other:
        first, second = Sessions(scorer, environment), Sessions(other, environment)
        for task in chosen:
            for name, own_seed, player in _players(environment, task, seed):
                played = _play(first, environment, task, own_seed, player)
                _check_episode(found, environment, task, name, played)
                repeated = _play(second, environment, task, own_seed, player)
                same = (played.observations, played.outcome) == (repeated.observations, repeated.outcome)
                found.expect("the same seed gives the same episode", task, same, f"played as {name}")
                if isinstance(played.outcome, Failure):
                    continue
                (judged,) = other.score([(task, played.transcript)])
                found.expect(
                    "score says what stepping gave", task, judged == played.outcome,
                    f"played as {name}: {played.outcome} by stepping, {judged} by score",
                )  # fmt: skip
    return found


def _check_tasks(
    found: Conformance, environment: Environment, again: Environment, chosen: Sequence[Task], seed: int
) -> None:
    found.expect("there are tasks", None, bool(chosen), "the training split is empty")
    repeated = list(islice(again.tasks("train", seed), len(chosen)))
    found.expect("the same seed gives the same tasks", None, repeated == chosen, f"seed {seed}")
    ids = {split: _ids(environment, split, seed + 1) for split in ("train", "heldout")}
    for split, listed in ids.items():
        found.expect("tasks are distinct", None, len(set(listed)) == len(listed), f"split {split}")
    both = set(ids["train"]) & set(ids["heldout"])
    found.expect("no task is in both splits", None, not both, f"{len(both)} tasks are")
    for task in chosen:
        try:
            kept = json.loads(json.dumps(task.data)) == task.data
        except (TypeError, ValueError):
            kept = False
        found.expect("a task's data survive JSON", task, kept, f"{task.data!r}"[:200])


def _ids(environment: Environment, split: str, seed: int) -> list[str]:
    wanted: Split = "heldout" if split == "heldout" else "train"
    return [task.task_id for task in islice(environment.tasks(wanted, seed), MOST_TASKS)]


def _check_closing(found: Conformance, environment: Environment, chosen: Sequence[Task]) -> None:
    """A session may be closed before it is done, and all may be closed twice."""
    closings: list[tuple[str, Callable[[], Any]]] = []
    if chosen and hasattr(environment, "reset"):
        closings.append(("session", environment.reset(chosen[0], 0).close))
    if hasattr(environment, "close"):
        closings.append(("environment", environment.close))
    for name, close in closings:
        try:
            close()
            close()
            said = ""
        except Exception as error:
            said = f"the {name}'s close raised {type(error).__name__}: {error}"
        found.expect("close may be called again", None, not said, said)


def _players(environment: Environment, task: Task, seed: int) -> Iterator[tuple[str, int, Player]]:
    """Who plays, and in a session of which seed: the stated answer, chance, and worthless texts."""
    state = getattr(environment, "gold", None)
    gold = None if state is None else state(task)
    if gold is not None:
        yield "gold", gold.seed, lambda _, turn: gold.actions[min(turn, len(gold.actions) - 1)]
    chance = KeyedRandom(seed, task.task_id)

    def at_random(observation: Observation, turn: int) -> str:
        legal = observation.legal
        return chance.choice(legal, "legal", turn) if legal else chance.choice(WORTHLESS, "worthless", turn)

    yield "random", seed, at_random
    for text in WORTHLESS:
        yield f"{text[:20]!r}", seed, partial(_always, text)


def _always(text: str, observation: Observation, turn: int) -> str:
    return text


def _play(sessions: Sessions, environment: Environment, task: Task, seed: int, player: Player) -> _Played:
    (live,) = sessions.open([(task, seed)])
    players, most = getattr(environment, "players", 1), getattr(environment, "max_turns", 1)
    tally = EpisodeTotals(players)
    observations: list[Observation] = []
    while isinstance(live.result, Observation):
        observations.append(live.result)
        tally.add(live.result)
        if live.result.done or len(live.actions) > most:
            break
        sessions.step([(live, player(live.result, len(live.actions)), True)])
    sessions.close([live])
    *earlier, last = live.actions or [""]
    transcript = Transcript(last, earlier=tuple(earlier), seed=seed)
    outcome = live.result if isinstance(live.result, Failure) else tally.score()
    done = isinstance(live.result, Failure) or live.result.done
    return _Played(transcript, observations, outcome, done, tuple(tally.rewards))


def _check_episode(
    found: Conformance, environment: Environment, task: Task, name: str, played: _Played
) -> None:
    outcome, most = played.outcome, getattr(environment, "max_turns", 1)
    failed = outcome if isinstance(outcome, Failure) else None
    said = f"played as {name}: {failed.boundary}: {failed.reason}" if failed else ""
    if not found.expect("nothing fails", task, failed is None, said):
        return
    assert not isinstance(outcome, Failure)
    turns = len(played.transcript.actions)
    is_over = played.done and turns <= most
    found.expect("an episode ends within max_turns", task, is_over, f"played as {name}: {turns} of {most}")
    accepted = outcome.reward >= ACCEPTED
    if name == "gold":
        found.expect("the stated answer is accepted", task, accepted, f"its reward is {outcome.reward:g}")
    elif name != "random":
        accepted = min(played.rewards) >= ACCEPTED  # where all players write it, one of them may win
        found.expect("what is worthless is refused", task, not accepted, f"{name} got {played.rewards}")
