"""Tests that any environment must pass, run by playing it.

from perilune.verifiers.conformance import check_environment

def test_my_environment_conforms():
    assert not check_environment({"id": "my_game"}).findings
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    Score,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.registry import make_environment
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions

ACCEPTED_REWARD = 1.0  # the lowest reward of a right answer, as in evaluations
JUNK_TEXTS = (
    "",
    " ",
    "xyzzy",
    "I do not know.",
    ";",
    "()",
    "[]",
    "{}",
    "None",
    "0" * 200,
    "\u0000\n\ufffd",
)
MAX_COMPARED_TASKS = 200  # tasks of each split to compare with the other

Player = Callable[[Observation, int], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """A requirement that an environment does not meet.

    Attributes:
        check: the requirement.
        task_id: the task that shows the problem; empty if the problem is not that of one task.
        what: the problem.
    """

    check: str
    task_id: str
    what: str


@dataclass(slots=True)
class Conformance:
    """The results of the tests.

    Attributes:
        checked: how often each requirement was checked.
        findings: the requirements that were not met.
    """

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def expect(self, check: str, task: Task | None, holds: bool, what: str) -> bool:
        """Record whether the requirement `check` holds, and return `holds`; `what` describes a problem."""
        self.checked[check] += 1
        if not holds:
            self.findings.append(Finding(check, task.task_id if task else "", what))
        return holds


@dataclass(slots=True)
class _Episode:
    """A played episode."""

    transcript: Transcript
    observations: list[Observation]
    outcome: Outcome
    done: bool
    rewards: tuple[float, ...]  # by player


def check_environment(
    section: Mapping[str, Any], *, tasks: int = 4, seed: int = 0, limits: ScorerLimits | None = None
) -> Conformance:
    """Play some training tasks of the environment in `section` with right, wrong and random answers.

    Untrusted code runs in the scorer's process, as in a stage.

    Args:
        tasks: number of tasks to play.

    Raises:
        RequestError: if the section is wrong, or the environment has no training tasks.
    """
    environment, twin = make_environment(section), make_environment(section)
    result = Conformance()
    chosen = list(islice(environment.tasks("train", seed), tasks))
    chosen = _check_tasks(result, environment, twin, chosen, seed)
    _check_closing(result, environment, chosen)
    with Scorer(section, limits) as scorer, Scorer(section, limits) as other:
        first, second = Sessions(scorer.processes, environment), Sessions(other.processes, environment)
        for task in chosen:
            baseline = None  # reward of random legal actions
            for name, own_seed, player in _make_players(environment, task, seed):
                played = _play(first, environment, task, own_seed, player)
                _check_episode(result, environment, task, name, played)
                if isinstance(played.outcome, Failure):
                    break  # an environment that hangs would take the time limit for every player
                if name == "random" and any(view.legal for view in played.observations):
                    baseline = played.outcome
                elif name not in ("gold", "random"):
                    _check_invalid(result, task, name, played, baseline)
                repeated = _play(second, environment, task, own_seed, player)
                same = (played.observations, played.outcome) == (repeated.observations, repeated.outcome)
                result.expect("the same seed gives the same episode", task, same, f"played as {name}")
                (scored,) = other.score([(task, played.transcript)])
                what = f"played as {name}: {played.outcome} by stepping, {scored} by score"
                result.expect("score equals the sum of the steps", task, scored == played.outcome, what)
    return result


def _check_tasks(
    result: Conformance,
    environment: Environment,
    twin: Environment,
    chosen: Sequence[Task],
    seed: int,
) -> list[Task]:
    """Check the tasks, and return those of `chosen` that can be played."""
    result.expect("there are tasks", None, bool(chosen), "the training split is empty")
    repeated = list(islice(twin.tasks("train", seed), len(chosen)))
    result.expect("the same seed gives the same tasks", None, repeated == chosen, f"seed {seed}")
    ids = {split: _list_ids(environment, split, seed + 1) for split in ("train", "heldout")}
    for split, listed in ids.items():
        repeated_ids = [task_id for task_id, count in Counter(listed).items() if count > 1]
        what = f"{len(repeated_ids)} of {len(listed)} {split} tasks are repeated: {repeated_ids[:1]}"
        result.expect("tasks are distinct", None, not repeated_ids, what)
    shared = set(ids["train"]) & set(ids["heldout"])
    result.expect("no task is in both splits", None, not shared, f"{len(shared)} tasks are")
    return [
        task
        for task in chosen
        if result.expect(
            "a task's data survives JSON", task, _survives_json(task.data), f"{task.data!r}"[:200]
        )
    ]


def _survives_json(data: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(data)) == data)
    except (TypeError, ValueError):
        return False


def _list_ids(environment: Environment, split: str, seed: int) -> list[str]:
    name: Split = "heldout" if split == "heldout" else "train"
    return [task.task_id for task in islice(environment.tasks(name, seed), MAX_COMPARED_TASKS)]


def _check_closing(result: Conformance, environment: Environment, chosen: Sequence[Task]) -> None:
    """Check that sessions close before they are done, and that closing twice is allowed."""
    closings: list[tuple[str, Callable[[], Any]]] = []
    if chosen and hasattr(environment, "reset"):
        with suppress(Exception):  # playing reports why a session does not open
            closings.append(("session", environment.reset(chosen[0], 0).close))
    if hasattr(environment, "close"):
        closings.append(("environment", environment.close))
    for name, close in closings:
        try:
            close()
            close()
            what = ""
        except Exception as error:
            what = f"the {name}'s close raised {type(error).__name__}: {error}"
        result.expect("close may be called again", None, not what, what)


def _make_players(environment: Environment, task: Task, seed: int) -> Iterator[tuple[str, int, Player]]:
    """Yield players and seeds: the gold transcript, random actions and worthless texts."""
    gold_of = getattr(environment, "gold", None)
    gold = None if gold_of is None else gold_of(task)
    if gold is not None:
        yield "gold", gold.seed, lambda _, turn: gold.actions[min(turn, len(gold.actions) - 1)]
    rng = KeyedRandom(seed, task.task_id)

    def act_at_random(observation: Observation, turn: int) -> str:
        legal = observation.legal
        return rng.choice(legal, "legal", turn) if legal else rng.choice(JUNK_TEXTS, "worthless", turn)

    yield "random", seed, act_at_random
    for text in JUNK_TEXTS:
        yield f"{text[:20]!r}", seed, partial(_repeat_text, text)


def _repeat_text(text: str, observation: Observation, turn: int) -> str:
    return text


def _play(sessions: Sessions, environment: Environment, task: Task, seed: int, player: Player) -> _Episode:
    (session,) = sessions.open([(task, seed)])
    players, limit = getattr(environment, "players", 1), getattr(environment, "max_turns", 1)
    totals = EpisodeTotals(players)
    observations: list[Observation] = []
    own_turns = 0
    while isinstance(session.result, Observation):
        observations.append(session.result)
        totals.add(session.result)
        if session.result.done or own_turns > limit:
            break
        own_turns += not session.result.due[0].agent
        sessions.step([(session, [player(session.result, len(session.actions))], True)])
    sessions.close([session])
    *earlier, last = session.actions or [""]
    transcript = Transcript(last, earlier=tuple(earlier), seed=seed)
    outcome = session.result if isinstance(session.result, Failure) else totals.score()
    done = isinstance(session.result, Failure) or session.result.done
    return _Episode(transcript, observations, outcome, done, tuple(totals.rewards))


def _check_invalid(
    result: Conformance, task: Task, name: str, played: _Episode, baseline: Outcome | None
) -> None:
    """Check that a single player gets no more reward for invalid actions than for random legal ones."""
    if isinstance(played.outcome, Score) and isinstance(baseline, Score) and len(played.rewards) == 1:
        reward, what = played.outcome.reward, "invalid actions pay no more than legal ones"
        result.expect(
            what,
            task,
            reward <= baseline.reward,
            f"{name} got {reward:g}, random play {baseline.reward:g}",
        )


def _check_episode(
    result: Conformance, environment: Environment, task: Task, name: str, played: _Episode
) -> None:
    outcome, limit = played.outcome, getattr(environment, "max_turns", 1)
    if isinstance(outcome, Failure):
        result.expect("nothing fails", task, False, f"played as {name}: {outcome.boundary}: {outcome.reason}")
        return
    result.expect("nothing fails", task, True, "")
    turns = sum(1 for view in played.observations if view.due and not view.due[0].agent)
    is_over = played.done and turns <= limit
    result.expect("an episode ends within max_turns", task, is_over, f"played as {name}: {turns} of {limit}")
    accepted = outcome.reward >= ACCEPTED_REWARD
    if name == "gold":
        result.expect("the gold answer is accepted", task, accepted, f"its reward is {outcome.reward:g}")
    elif name != "random":
        # Of several players who all write the same text, one may win.
        accepted = min(played.rewards) >= ACCEPTED_REWARD
        result.expect("worthless texts are refused", task, not accepted, f"{name} got {played.rewards}")
