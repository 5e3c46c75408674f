"""Authentication, queue limits and shutdown of the server."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from served import CONTEXT, Direct, Served, make_checkpoint, served

from perilune.cli.main import main

TOKEN = "a-token-for-these-tests"
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "1+1=",
    "max_tokens": CONTEXT - 4,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def small_server(checkpoint: Path, *options: str) -> Iterator[Served]:
    """A server with two slots and a queue of one."""
    limits = ("--slots", "2", "--max-queue", "1", "--token-env", "SERVER_TOKEN")
    with served(checkpoint, *limits, *options, token=TOKEN, SERVER_TOKEN=TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with small_server(checkpoint) as server:
        yield server


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream)


def test_server_requires_the_token(server: Served) -> None:
    with server.http() as http:
        for token in (
            "",
            "Bearer",
            "Bearer wrong",
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
        ):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = http.get(path, headers={"Authorization": token})
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert http.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
        assert http.get("/v1/models", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
        # With a token, any host name is accepted.
        assert http.get("/v1/models", headers={"Host": "gpu.example"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong").models.list()


def test_full_queue_answers_429_with_retry_after(server: Served) -> None:
    with server.client() as client:
        streams = [client.completions.create(**LONG, stream=True) for _ in range(3)]
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**LONG)
        assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 30
        assert refused.value.code == "queue_full"
        for stream in streams:
            stream.close()  # disconnecting frees the slots at once
        server.at_rest()
        answers = client.completions.create(model="tiny", prompt="1", n=3, max_tokens=2)
        assert len(answers.choices) == 3


def test_shutdown_does_not_wait_for_hanging_requests(checkpoint: Path) -> None:
    hang: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hang"}]}
    with (
        small_server(checkpoint, "--drain", "0") as server,
        server.client() as client,
        ThreadPoolExecutor(1) as threads,
    ):
        hanging = threads.submit(client.chat.completions.create, **hang)
        until(lambda: server.metrics()["requests_answering"] == 1)
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server was shut down"):
            text_of(stream)
        with pytest.raises(openai.APIError):
            hanging.result(30)
        assert server.process.wait(120) == 0


def test_second_ctrl_c_aborts_running_answers_without_a_traceback(checkpoint: Path) -> None:
    """`served` checks that the server writes no traceback."""
    with small_server(checkpoint) as server, server.client() as client, server.http() as http:
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGINT)
        until(lambda: http.get("/health").json() == {"status": "draining"})
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server was shut down"):
            text_of(stream)
        assert server.process.wait(120) == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["serve", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_serve_refuses_public_host_without_token(
    checkpoint: Path, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, str(checkpoint), "--host", host)
    assert "without a token" in message
    assert "--token-env" in message


def test_serve_refuses_unset_and_short_tokens(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NO_SUCH_TOKEN is not set" in refusal(capsys, str(checkpoint), "--token-env", "NO_SUCH_TOKEN")
    monkeypatch.setenv("SHORT", "hunter2")
    message = refusal(capsys, str(checkpoint), "--token-env", "SHORT", "--host", "0.0.0.0")
    assert "SHORT has 7 characters" in message
    assert "hunter2" not in message


def test_serve_refuses_invalid_arguments(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    assert "no such checkpoint folder" in refusal(capsys, str(tmp_path / "none"))
    assert "config.json" in refusal(capsys, str(tmp_path))
    assert refusal(capsys, "no-run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}" in refusal(capsys, str(checkpoint), "--port", port)
    assert "is not an address" in refusal(capsys, str(checkpoint), "--host", "no.such.host.invalid")


def test_token_is_not_in_the_command_line(server: Served) -> None:
    arguments = psutil.Process(server.process.pid).cmdline()
    assert "serve" in arguments
    assert TOKEN not in " ".join(arguments)


def test_shutdown_drains_running_answers(server: Served, checkpoint: Path) -> None:
    """This test runs last in the file because it stops the shared server."""
    direct = Direct.load(checkpoint)
    (expected,) = direct.sample("1+1=", 5, max_tokens=CONTEXT - 4, stop_token_ids=())
    with server.client() as client, server.http() as http:
        stream = client.completions.create(**LONG, seed=5, stream=True)
        begun = next(iter(stream)).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/health").json() == {"status": "draining"})
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="tiny", prompt="1")
        assert refused.value.status_code == 503
        assert "Retry-After" in refused.value.response.headers
        assert begun + text_of(stream) == direct.text(expected)
        assert server.process.wait(120) == 0
