"""The OpenEnv client, with a server process that runs the package's server code."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from websockets.sync.server import serve

from perilune.environments import EpisodeFailedError, Failure, Transcript, make_environment
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions

SERVER = Path(__file__).with_name("openenv_server.py")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_server():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}"
        time.sleep(0.05)
    process.kill()
    raise RuntimeError("the server has not started within 60 s")


@pytest.fixture(scope="module")
def url():
    process, url = start_server()
    yield url
    process.kill()
    process.wait()


def section(url, **more):
    return {"id": "openenv", "url": url, "prompt": "Find it.", "observation": "text", "turns": 12, **more}


def open_session(section, seed=0):
    environment = make_environment(section)
    task = next(environment.tasks("train", 0))
    return environment, task, environment.reset(task, seed)


def failure_of(session, action):
    with pytest.raises(EpisodeFailedError) as caught:
        session.step(action)
    session.close()
    assert caught.value.failure.boundary == "environment"
    return caught.value.failure.reason


def test_openenv_environment_passes_conformance(url):
    assert not check_environment(section(url), tasks=1).findings


def test_episode_shows_observations_and_rewards_of_server(url):
    environment, task, session = open_session(section(url))
    assert session.observation.messages == ({"role": "tool", "content": "a number from 0 to 9?"},)
    low, high, guesses = 0, 9, []
    while not session.observation.done:
        guesses.append(str((low + high) // 2))
        reply = session.step(guesses[-1])
        if not reply.done:
            assert reply.rewards == (-0.01,)
            low, high = ((low + high) // 2 + 1, high) if reply.messages[0]["content"] == "higher" else (
                low, (low + high) // 2 - 1)  # fmt: skip
    assert session.observation.rewards == (1.0 / len(guesses),)
    session.close()
    score = environment.score(task, Transcript(guesses[-1], earlier=tuple(guesses[:-1])))
    assert score.reward == pytest.approx(1.0 / len(guesses) - 0.01 * (len(guesses) - 1))


def test_reset_sends_seed_and_config(url):
    def first(seed):
        _, _, session = open_session(section(url, config={"upto": 99}), seed)
        assert session.observation.messages[0]["content"] == "a number from 0 to 99?"
        hints = tuple(session.step(str(n)).messages[0]["content"] for n in (20, 40, 60, 80))
        session.close()
        return hints

    assert first(1) == first(1)
    assert len({first(seed) for seed in range(6)}) > 1


def test_observation_and_action_may_be_json(url):
    _, _, session = open_session(section(url, observation=None))
    assert session.observation.messages[0]["content"] == '{"text": "a number from 0 to 9?", "tries": 0}'
    session.close()
    _, _, session = open_session(section(url, action="wrong"))
    reply = session.step("3")
    assert reply.messages[0]["content"] == '{"error": "that is no valid action"}'
    assert reply.rewards == (0.0,) and reply.metrics == {"illegal": 1.0} and not reply.done
    session.close()


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("sleep", "did not answer a step within 1 s"),
        ("raise", "no such luck"),
        ("nan", ""),
        ("flood", "the server closed the connection after a step"),
    ],
)
def test_misbehaving_server_fails_episode(url, action, reason):
    _, _, session = open_session(section(url, seconds=1.0))
    if action == "nan":  # the package's server sends null, which earns 0
        assert session.step("nan").rewards == (0.0,)
        session.close()
    else:
        assert reason in failure_of(session, action)


def test_dead_or_missing_server_fails_episode():
    process, url = start_server()
    _, _, session = open_session(section(url))
    assert "closed the connection after a step" in failure_of(session, "die")
    process.wait()
    with pytest.raises(EpisodeFailedError, match="cannot be reached"):
        open_session(section(url))
    with Scorer(section(url)) as scorer:
        environment = make_environment(section(url))
        (live,) = Sessions(scorer.processes, environment).open([(next(environment.tasks("train", 0)), 0)])
        assert live.result == Failure("environment", live.result.reason)


GARBAGE = {
    "hello": "not JSON",
    "[1]": "not a JSON object",
    '{"type": "observation"}': "has no data",
    '{"type": "observation", "data": {}}': "has no observation",
    '{"data": {"observation": {"text": "a"}, "reward": NaN, "done": false}}': "NaN is not a JSON number",
    '{"data": {"observation": {"text": "a"}, "reward": 1e999, "done": false}}': "reward is not a number",
    '{"data": {"observation": {"text": "a"}, "reward": "1", "done": false}}': "reward is not a number",
    '{"data": {"observation": {"text": "a"}, "reward": 1, "done": "no"}}': "has no observation",
    '{"data": {"observation": {"words": "a"}, "reward": 1, "done": false}}': "no field 'text'",
    '{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}': "CAPACITY_REACHED: full",
    "[" * 100_000: "not JSON",
}


def test_malformed_message_is_environment_failure():
    replies = iter(GARBAGE)

    def answer(socket):
        socket.recv()
        socket.send(next(replies))

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        for reason in GARBAGE.values():
            with pytest.raises(EpisodeFailedError) as caught:
                open_session(section(url))
            assert caught.value.failure.boundary == "environment" and reason in caught.value.failure.reason
        server.shutdown()


def test_error_field_of_server_does_not_replace_chosen_field():
    def answer(socket):
        socket.recv()
        socket.send('{"data": {"observation": {"text": "a", "error": ""}, "reward": 0, "done": false}}')

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, _, session = open_session(section(f"http://127.0.0.1:{server.socket.getsockname()[1]}"))
        assert session.observation.messages == ({"role": "tool", "content": "a"},)
        session.close()
        server.shutdown()


def test_invalid_url_is_rejected_and_missing_package_is_named(monkeypatch):
    for url in ("127.0.0.1:80", "file:///etc/passwd", "ws://host"):
        with pytest.raises(RequestError, match="HOST"):
            make_environment(section(url))
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(RequestError) as caught:
        make_environment(section("http://127.0.0.1:1"))
    assert "perilune[openenv]" in caught.value.remedy
