"""Sessions in a separate process: a misbehaving session fails without affecting the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hostile_sessions import Echo

from perilune.environments import EpisodeTotals, Failure, Observation, SingleTurn, Transcript
from perilune.verifiers import Scorer, ScorerLimits
from perilune.verifiers.fork_server import ForkServer
from perilune.verifiers.sessions import Sessions

SPEC = {"id": "factory", "factory": "hostile_sessions:Echo"}
ECHO = Echo({})
DESCRIPTORS = Path("/proc/self/fd")


def result_of(live):
    """The result of a session, without the digest of the scored text."""
    return live.result if isinstance(live.result, Failure) else replace(live.result, info={})


TASKS = list(islice(ECHO.tasks("train", 0), 8))


@pytest.fixture(scope="module")
def scorer():
    with Scorer(SPEC, ScorerLimits(item_seconds=0.5, answer_bytes=1 << 16)) as shared:
        yield shared


def test_remote_session_matches_local_session(scorer):
    sessions = Sessions(scorer.processes, ECHO)
    (live,) = sessions.open([(TASKS[0], 5)])
    local = ECHO.reset(TASKS[0], 5)
    assert result_of(live) == local.observation
    tally = EpisodeTotals(1)
    for action in ("a", "é\n", "end"):
        sessions.step([(live, [action], True)])
        assert result_of(live) == local.step(action)
        tally.add(live.result)
    assert live.result.done
    sessions.close([live])
    transcript = Transcript("end", earlier=("a", "é\n"), seed=5)
    assert scorer.score([(TASKS[0], transcript)]) == [tally.score()] == [ECHO.score(TASKS[0], transcript)]


def test_time_limit_may_exceed_longest_kernel_timeout():
    with Scorer(SPEC, ScorerLimits(item_seconds=1e9)) as patient:
        assert patient.score([(TASKS[0], Transcript("end", seed=5))]) == [
            ECHO.score(TASKS[0], Transcript("end", seed=5))
        ]


@pytest.mark.parametrize(
    ("action", "boundary", "reason"),
    [
        ("raise", "environment", "ValueError: no idea"),
        ("leave", "environment", "SystemExit: 3"),
        ("die", "environment", "exit code 3"),
        ("hang", "environment", "no answer within 0.5 s"),
        ("sandbox", "sandbox", "no room"),
        ("flood", "environment", "standard error"),
        ("babble", "environment", "malformed"),
        ("nan", "environment", "a number is not finite"),
        ("huge", "environment", "malformed"),
        ("stuck", "environment", "the player to move has no legal action"),
        ("nothing", "environment", "not an Observation"),
        ("object", "environment", "not JSON"),
        ("role", "environment", "other than system, user, assistant and tool"),
        ("nobody", "environment", "the player to move does not exist"),
        ("overpaid", "environment", "there is not one reward per player"),
        ("results", "environment", "only of sub-agents that its own agent started"),
        ("long", "environment", "more than 65536 bytes"),
        ("bare", "environment", "malformed"),
        ("write", "environment", "PermissionError"),
    ],
)
def test_misbehaving_session_does_not_affect_other_sessions(scorer, action, boundary, reason):
    sessions = Sessions(scorer.processes, ECHO)
    lives = sessions.open([(task, 0) for task in TASKS[:3]])
    sessions.step([(live, ["a"], True) for live in lives])
    sessions.step([(lives[0], ["b"], True), (lives[1], [action], True), (lives[2], ["b"], True)])
    failure = lives[1].result
    assert isinstance(failure, Failure) and failure.boundary == boundary and reason in failure.reason
    for live in (lives[0], lives[2]):
        assert live.result.messages[0]["content"] == "2 after b"
    sessions.step([(lives[0], ["c"], True), (lives[2], ["end"], True)])
    assert lives[0].result.messages[0]["content"] == "3 after c"
    assert result_of(lives[2]) == Observation(rewards=(1.0,), terms={"turns": 2.0}, done=True)
    sessions.close(lives)


def test_scorer_closes_sessions_and_environment(tmp_path):
    log, before = tmp_path / "log", len([*DESCRIPTORS.iterdir()])
    section = SPEC | {"confined": False, "log": str(log)}
    with Scorer(section) as scorer:
        sessions = Sessions(scorer.processes, Echo(section))
        sessions.close(sessions.open([(TASKS[0], 0), (TASKS[1], 0)])[:1])
        assert log.read_text() == "session train0\n"
    assert log.read_text() == "session train0\nsession train1\nenvironment\n"
    assert len([*DESCRIPTORS.iterdir()]) == before


def test_closing_in_two_threads_closes_each_descriptor_once(monkeypatch):
    """A descriptor that is closed twice may belong to something else by then."""
    scorer, ending, close = Scorer(SPEC), threading.Event(), threading.Event()
    sessions = Sessions(scorer.processes, ECHO)
    opened = sessions.open([(TASKS[0], 5)])

    def end(self, process):
        ending.set()
        assert close.wait(30)
        return 0

    monkeypatch.setattr(ForkServer, "end", end)
    with ThreadPoolExecutor(1) as threads:
        closed = threads.submit(sessions.close, opened)
        assert ending.wait(30)  # the thread is closing the worker
        scorer.close()
        close.set()
        closed.result()  # raises if the descriptor was closed already


def test_printed_output_does_not_affect_session(scorer):
    sessions = Sessions(scorer.processes, ECHO)
    (live,) = sessions.open([(TASKS[0], 0)])
    sessions.step([(live, ["print"], True)])
    assert live.result.messages[0]["content"] == "1 after print"


def test_other_sessions_survive_crashes_of_process(scorer):
    sessions = Sessions(scorer.processes, ECHO)
    before = scorer.restarts
    lives = sessions.open([(TASKS[i % 8], i) for i in range(100)])
    sessions.step([(live, [f"word {i}"], True) for i, live in enumerate(lives)])
    sessions.step([(live, ["die" if i % 40 == 0 else "b"], True) for i, live in enumerate(lives)])
    assert scorer.restarts == before + 3
    for i, live in enumerate(lives):
        if i % 40 == 0:
            assert isinstance(live.result, Failure)
        else:
            assert live.result.messages[0]["content"] == "2 after b"
    alive = [live for live in lives if isinstance(live.result, Observation)]
    sessions.step([(live, ["end"], True) for live in alive])
    assert all(live.result.done and live.result.terms == {"turns": 2.0} for live in alive)


def test_truncated_action_ends_session_without_playing(scorer):
    sessions = Sessions(scorer.processes, ECHO)
    lives = sessions.open([(TASKS[0], 0), (TASKS[1], 0)])
    sessions.step([(lives[0], ["end"], False), (lives[1], ["die"], False)])
    assert [result_of(live) for live in lives] == [Observation(done=True, truncated=True)] * 2


def test_single_turn_session_returns_score(scorer):
    class Same(SingleTurn):
        id = "same"

        def tasks(self, split, seed):
            yield from TASKS

        def score(self, task, transcript):
            return ECHO.score(task, transcript)

    sessions = Sessions(scorer.processes, Same())
    (live,) = sessions.open([(TASKS[0], 0)])
    assert result_of(live) == Observation()
    sessions.step([(live, ["end"], True)])
    assert result_of(live) == Observation(rewards=(1.0,), terms={"turns": 0.0}, done=True)
    (live,) = sessions.open([(TASKS[0], 0)])
    sessions.step([(live, ["nan"], True)])
    assert live.result.boundary == "verifier"


def test_environment_with_confined_false_may_write_files():
    spec = SPEC | {"confined": False, "players": 2}
    with Scorer(spec, workers=2) as own:
        sessions = Sessions(own.processes, Echo(spec))
        lives = sessions.open([(TASKS[0], 0), (TASKS[1], 0)])
        sessions.step([(live, ["write"], True) for live in lives])
        assert [live.result.rewards for live in lives] == [(0.25, 0.25)] * 2
        sessions.step([(lives[1], ["end"], True)])
        assert lives[1].result.done
