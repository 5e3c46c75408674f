"""Tasksets for the package verifiers, with the real package."""

import signal
from dataclasses import replace

import pytest

from perilune.environments import Failure, Transcript, make_environment
from perilune.environments.adapters import verifiers_package
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions

pytest.importorskip("verifiers", reason="verifiers supports no Python newer than 3.13")
pytestmark = pytest.mark.slow


def section(package, **more):
    return {"id": "verifiers", "package": package, **more}


@pytest.fixture(autouse=True)
def close_environments(monkeypatch):
    """An event loop left open has two sockets, about which garbage collection warns in a later test."""
    opened, kind = [], verifiers_package.VerifiersEnvironment
    make = kind.__init__

    def remember(self, *arguments, **settings):
        opened.append(self)
        make(self, *arguments, **settings)

    monkeypatch.setattr(kind, "__init__", remember)
    yield
    for environment in opened:
        environment.close()


def open_session(package, seed=0, **more):
    environment = make_environment(section(package, **more))
    task = next(environment.tasks("train", 0))
    return environment, task, environment.reset(task, seed)


@pytest.mark.thorough
def test_verifiers_taskset_passes_conformance():
    assert not check_environment(section("taskset_guess"), tasks=1).findings


@pytest.mark.thorough
def test_confined_session_matches_local_session():
    environment, task, session = open_session("taskset_guess", seed=3)
    with Scorer(
        section("taskset_guess")
    ) as scorer:  # a process that imports verifiers takes seconds to start
        sessions = Sessions(scorer.processes, environment)
        (live,) = sessions.open([(task, 3)])
        assert live.result == session.observation
        for action in ("0", "4", "8"):
            sessions.step([(live, [action], True)])
            assert replace(live.result, info={}) == session.step(action)  # without the checksum
        (score,) = scorer.score([(task, Transcript("8", earlier=("0", "4"), seed=3))])
    assert score == environment.score(task, Transcript("8", earlier=("0", "4"), seed=3))


def test_episode_depends_on_seed():
    def played(seed):
        environment, task, session = open_session("taskset_guess", seed, turns=6)
        guesses = []
        while not session.observation.done:
            guesses.append(str(len(guesses) + 3))
            session.step(guesses[-1])
        session.close()
        score = environment.score(task, Transcript(guesses[-1], earlier=tuple(guesses[:-1]), seed=seed))
        assert score.reward == session.observation.rewards[0]
        return session.observation.rewards, len(guesses)

    first, again, *others = map(played, (1, 1, 2, 4))
    assert first == again
    assert ((0.0,), 6) in others and len({first, *others}) == 3


def test_heldout_split_is_small_and_disjoint():
    environment = make_environment(section("taskset_reverse"))
    train, kept = ({task.task_id for task in environment.tasks(split, 0)} for split in ("train", "heldout"))
    assert len(train | kept) == 40 and not train & kept and 0 < len(kept) < 12


def test_interleaved_sessions_are_independent():
    environment = make_environment(section("taskset_guess"))
    first, second = list(environment.tasks("train", 0))[:2]
    alone = environment.reset(first, 1)
    expected = [alone.step(str(n)) for n in (0, 9, 1)]
    one, two = environment.reset(first, 1), environment.reset(second, 2)
    for n, observation in zip((0, 9, 1), expected, strict=True):
        two.step("5") if not two.observation.done else None
        assert one.step(str(n)) == observation


def test_taskset_uses_rewards_and_metrics_of_task():
    _, task, session = open_session("taskset_reverse")
    assert task.prompt[0] == {"role": "system", "content": "Reverse it."}
    end = session.step(task.prompt[1]["content"][::-1])
    assert end.done and end.rewards == (1.0,) and end.terms == {"right": 2.0}
    assert end.metrics == {"letters": float(len(task.prompt[1]["content"]))}


def test_v1_environment_runs_turn_by_turn():
    environment, _, session = open_session("taskset_guess", turns=10)
    assert environment.max_turns == 10
    reply = session.step("x")
    assert reply.messages == ({"role": "user", "content": "no"},)
    digit = 0
    while not session.observation.done:
        session.step(str(digit))
        digit += 1
    assert session.observation.rewards == ((1.0,) if digit < 10 else (0.0,))
    assert session.observation.metrics["replies"] == digit + 1


def test_exception_in_reward_is_verifier_failure():
    environment, task, _ = open_session("taskset_reverse", config={"task": {"broken": True}})
    failure = environment.score(task, Transcript("1"))
    assert isinstance(failure, Failure) and failure.boundary == "verifier"
    assert "no key for the judge" in failure.reason


def test_second_conversation_fails_the_episode(monkeypatch):
    """Loading notices it only if the environment also begins it after empty replies."""
    check = "perilune.environments.adapters.verifiers_taskset.TasksetPackage._check_conversations"
    monkeypatch.setattr(check, lambda package, name, task: None)
    environment = make_environment(section("taskset_best_of"))
    failure = environment.score(next(environment.tasks("train", 0)), Transcript("1"))
    assert isinstance(failure, Failure) and failure.boundary == "environment"
    assert "several conversations" in failure.reason


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (section("no_such_package"), "no package 'no_such_package'"),
        (section("environment_cases"), "environment_cases"),
        (section("before_tasksets"), r"load_environment.*\(v0\)"),
        (section("taskset_reverse", config={"wards": 3}), r"environment\.config"),
        (
            section("taskset_reverse", config={"task": {"judges": [{"id": "reference"}]}}),
            "uses a model as a judge",
        ),
        (section("taskset_reverse", config={"words": 0}), "has no tasks"),
        (section("taskset_best_of"), "holds several conversations in an episode"),
    ],
)
def test_unsupported_packages_and_settings_are_rejected(wrong, message, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(RequestError, match=message):
        make_environment(wrong)


def test_signal_handlers_are_kept_and_missing_package_is_named(monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make_environment(section("taskset_reverse"))
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    monkeypatch.setattr(verifiers_package, "find_spec", lambda name: None)
    with pytest.raises(RequestError) as caught:
        make_environment(section("taskset_reverse"))
    assert "perilune[verifiers]" in caught.value.remedy
