"""The remote engine against scripted servers: vLLM and SGLang protocols, and malformed responses.

The responses have the format of the servers' own code (vLLM: /v1/completions with `return_token_ids`;
SGLang: /generate with `return_logprob`). The tests of `perilune serve` use a real server.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from perilune import servers
from perilune.engine.remote import RemoteEngine
from perilune.engine.request import Prompt, SamplingParams
from perilune.engine.wire import derive_seed
from perilune.errors import RequestError, WorkFailedError

Reply = tuple[int, dict[str, str], Any]
PROMPT = Prompt([5, 6, 7], (3, 1, 2))
PLAIN = SamplingParams(max_tokens=4, stop_token_ids=(2,))
TOKEN = "never-shown-anywhere"


class Scripted(ThreadingHTTPServer):
    """A server that answers POST requests with `reply` and lists models."""

    daemon_threads = True

    def __init__(self, owner: str, reply: Callable[[Any], Reply], models: tuple[str, ...]) -> None:
        self.asked: list[tuple[str, Any, str]] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cards = [{"id": name, "object": "model", "owned_by": owner} for name in models]
                self.answer(200, {}, {"object": "list", "data": cards})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                scripted.asked.append((self.path, body, self.headers.get("Authorization", "")))
                self.answer(*reply(body))

            def answer(self, status: int, headers: dict[str, str], document: Any) -> None:
                content = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def scripted(
    owner: str, reply: Callable[[Any], Reply], models: tuple[str, ...] = ("m",)
) -> Iterator[Scripted]:
    with Scripted(owner, reply, models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def choice(
    index: int = 0, tokens: Any = (9, 2), logprobs: Any = (-0.5, -0.25), **more: Any
) -> dict[str, Any]:
    """One choice of a vLLM response."""
    return {
        "index": index, "text": "ab", "finish_reason": "stop", "stop_reason": 2, "token_ids": list(tokens),
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": list(logprobs), "top_logprobs": None},
    } | more  # fmt: skip


def of_vllm(body: Any) -> Reply:
    return 200, {}, {"choices": [choice(index) for index in reversed(range(body["n"]))]}


def of_sglang(body: Any) -> Reply:
    assert all(options["n"] == 1 for options in body["sampling_params"])
    sample = {
        "text": "ab",
        "output_ids": [9, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-0.5, 9, None], [-0.25, 2, None]],
            "completion_tokens": 2,
        },
    }
    return 200, {}, [sample] * len(body["input_ids"])


@pytest.mark.parametrize(
    ("owner", "reply"), [("vllm", of_vllm), ("sglang", of_sglang), ("llamacpp", of_vllm)]
)
@pytest.mark.parametrize("n", [1, 3])
def test_completions_of_vllm_sglang_and_llamacpp_are_read(
    owner: str, reply: Callable[[Any], Reply], n: int
) -> None:
    with scripted(owner, reply) as server, RemoteEngine(server.url + "/v1/", token=TOKEN) as engine:
        groups = engine.sample([PROMPT] * 5, n, PLAIN)
    assert [len(group) for group in groups] == [n] * 5
    for completion in (completion for group in groups for completion in group):
        assert (completion.token_ids.dtype, completion.token_ids.tolist()) == (np.int32, [9, 2])
        assert (completion.logprobs.dtype, completion.logprobs.tolist()) == (np.float32, [-0.5, -0.25])
        assert completion.policy_version.tolist() == [0, 0]
        assert (completion.finish_reason, completion.text) == ("stop", "ab")
    assert {authorization for _, _, authorization in server.asked} == {f"Bearer {TOKEN}"}


FULL = SamplingParams(
    max_tokens=9, temperature=0.5, stop_token_ids=(2, 3), stop=("x",), min_tokens=1, top_k=7, top_p=0.9,
    min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-1.5, logit_bias={4: 1.5},
)  # fmt: skip


def test_vllm_request_sets_every_sampling_option() -> None:
    with scripted("vllm", of_vllm) as server, RemoteEngine(server.url, reported="processed") as engine:
        engine.sample([PROMPT], 2, FULL)
        engine.sample([PROMPT], 2, SamplingParams(max_tokens=4))
    (path, full, _), (_, plain, _) = server.asked
    common = {
        "model": "m", "prompt": [5, 6, 7], "n": 2, "logprobs": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    assert path == "/v1/completions"
    assert full == common | {
        "max_tokens": 9, "temperature": 0.5, "stop_token_ids": [2, 3], "stop": ["x"], "min_tokens": 1,
        "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {"4": 1.5},
        "presence_penalty": 0.5, "frequency_penalty": -1.5,
    }  # fmt: skip
    # vLLM takes omitted options from the model's generation_config.json.
    assert plain == common | {
        "max_tokens": 4, "temperature": 1.0, "stop_token_ids": [], "stop": [], "min_tokens": 0,
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


def test_sglang_request_sets_every_sampling_option() -> None:
    with scripted("sglang", of_sglang) as server, RemoteEngine(server.url, reported="processed") as engine:
        engine.sample([PROMPT], 2, FULL)
        engine.sample([PROMPT], 2, PLAIN)
    (path, full, _), (_, plain, _) = server.asked
    assert (path, full["input_ids"], full["return_logprob"]) == ("/generate", [[5, 6, 7]] * 2, True)
    seed = derive_seed(PROMPT.key)
    first, second = full["sampling_params"]  # SGLang gives all samples of one prompt the same seed
    assert (first, second) == ({**second, "sampling_seed": seed}, {**first, "sampling_seed": seed + 1})
    assert first == {
        "n": 1, "sampling_seed": seed, "max_new_tokens": 9, "temperature": 0.5,
        "stop": ["x"],
        "stop_token_ids": [2, 3], "min_new_tokens": 1, "top_k": 7, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.2, "logit_bias": {"4": 1.5},
        "presence_penalty": 0.5, "frequency_penalty": -1.5,
    }  # fmt: skip
    assert plain["sampling_params"][0]["top_k"] == -1  # SGLang rejects 0


WARM = SamplingParams(max_tokens=4, temperature=0.7)
NARROW = SamplingParams(max_tokens=4, top_p=0.9)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    ("owner", "reported", "params", "fits"),
    [
        ("vllm", None, PLAIN, True), ("vllm", None, GREEDY, True), ("vllm", None, WARM, False),
        ("vllm", "processed", WARM, True), ("vllm", "processed", NARROW, True), ("sglang", None, WARM, True),
        ("sglang", None, NARROW, False), ("sglang", "raw", WARM, False), ("perilune", None, NARROW, True),
        ("somebody", None, WARM, False),
    ],
)  # fmt: skip
def test_sampling_is_rejected_when_server_logprobs_are_of_another_distribution(
    owner: str, reported: Any, params: SamplingParams, fits: bool
) -> None:
    reply = of_sglang if owner == "sglang" else of_vllm
    with scripted(owner, reply) as server, RemoteEngine(server.url, reported=reported) as engine:
        if fits:
            engine.sample([PROMPT], 1, params)
        else:
            with pytest.raises(RequestError, match="distribution sampled from"):
                engine.sample([PROMPT], 1, params)
            assert not server.asked


MALFORMED: list[tuple[Any, str]] = [
    ({"choices": [choice() | {"token_ids": None}]}, "returns no token ids"),
    ({"choices": [{k: v for k, v in choice().items() if k != "token_ids"}]}, "returns no token ids"),
    ({"choices": []}, "choices has 0 entries, not 1"),
    ({"choices": [choice(), choice(1)]}, "choices has 2 entries, not 1"),
    ({"choices": [choice(1)]}, "numbered"),
    ({"choices": "no"}, "not a list"),
    ({}, "choices is missing"),
    ([], "not an object"),
    ({"choices": [choice(tokens=[True, 2])]}, "True"),
    ({"choices": [choice(tokens=[-1, 2])]}, "-1"),
    ({"choices": [choice(tokens=[2**40, 2])]}, str(2**40)),
    ({"choices": [choice(tokens=["a", "b"])]}, "'a'"),
    ({"choices": [choice(logprobs=[-0.5])]}, "token_logprobs has 1 entries, not 2"),
    ({"choices": [choice(logprobs=[-0.5, None])]}, "None is not a log-probability"),
    ({"choices": [choice(logprobs=[-0.5, 0.5])]}, "0.5 is not a log-probability"),
    ({"choices": [choice(logprobs=[-0.5, float("nan")])]}, "nan is not"),
    ({"choices": [choice() | {"logprobs": None}]}, "logprobs is missing"),
    ({"choices": [choice(tokens=[1] * 5, logprobs=[-1.0] * 5)]}, "5 tokens of 4"),
    ({"choices": [choice(tokens=[], logprobs=[])]}, "0 tokens of 4"),
    ({"choices": [choice(finish_reason="abort")]}, "ended with 'abort'"),
    (b"<html>", "not JSON"),
    (b"[" * 100_000, "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "told"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_responses_are_rejected(document: Any, told: str) -> None:
    with (
        scripted("vllm", lambda body: (200, {}, document)) as server,
        RemoteEngine(server.url) as engine,
        pytest.raises(WorkFailedError) as failure,
    ):
        engine.sample([PROMPT], 1, PLAIN)
    assert told in str(failure.value)
    assert failure.value.where == server.url


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(servers.time, "sleep", waited.append)
    return waited


def test_busy_server_is_retried_after_the_requested_delay(waits: list[float]) -> None:
    replies = iter([(429, {"Retry-After": "7"}, {}), (503, {}, b"later"), (429, {"Retry-After": "9999"}, {})])
    with (
        scripted("vllm", lambda body: next(replies, None) or of_vllm(body)) as server,
        RemoteEngine(server.url) as engine,
    ):
        ((completion,),) = engine.sample([PROMPT], 1, PLAIN)
    assert completion.token_ids.tolist() == [9, 2]
    assert waits == [7.0, 1.0, 30.0]


def test_busy_server_fails_after_six_attempts(waits: list[float]) -> None:
    with (
        scripted("vllm", lambda body: (503, {}, {"error": {"message": "no room"}})) as server,
        RemoteEngine(server.url, token=TOKEN) as engine,
        pytest.raises(WorkFailedError, match=r"answers 503 \(no room\), 6 times") as failure,
    ):
        engine.sample([PROMPT], 1, PLAIN)
    assert len(server.asked) == 6
    assert TOKEN not in str(failure.value)


@pytest.mark.parametrize(
    ("status", "document", "kind", "told"),
    [
        (400, {"error": {"message": "prompt too long"}}, RequestError, "400: prompt too long"),
        (401, {"error": "who are you"}, RequestError, "holds the server's token"),
        (404, b"<html>" + b"x" * 1000, RequestError, "…"),
        (500, {"detail": "oh"}, WorkFailedError, "500"),
        (301, b"", RequestError, "301"),
    ],
)
def test_http_error_is_reported_without_the_token(
    status: int, document: Any, kind: type[Exception], told: str
) -> None:
    with (
        scripted("vllm", lambda body: (status, {"Location": "http://evil.example/"}, document)) as server,
        RemoteEngine(server.url, token=TOKEN) as engine,
        pytest.raises(kind) as failure,
    ):
        engine.sample([PROMPT] * 8, 1, PLAIN)
    assert told in str(failure.value)
    assert len(str(failure.value)) < 500
    assert TOKEN not in str(failure.value)


def test_model_must_be_named_when_server_has_several() -> None:
    with scripted("vllm", of_vllm, ("a", "b")) as server:
        with RemoteEngine(server.url, "b") as engine:
            assert (engine.model, engine.server) == ("b", "vllm")
        with pytest.raises(RequestError, match="no model is named") as failure:
            RemoteEngine(server.url)
        assert "one of: a, b" in str(failure.value)
        with pytest.raises(RequestError, match="has no model 'c'"):
            RemoteEngine(server.url, "c")


def test_unreachable_server_raises_work_failed_error(waits: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(WorkFailedError, match="does not answer"):
        RemoteEngine(url, token=TOKEN)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host/?a=1", "/v1", ""])
def test_invalid_server_url_is_rejected(url: str) -> None:
    with pytest.raises(RequestError, match="not the URL of a server"):
        RemoteEngine(url)


def test_url_with_password_is_rejected_without_printing_the_password() -> None:
    with pytest.raises(RequestError, match="contains a password") as failure:
        RemoteEngine("http://me:hunter2@host:8000/v1")
    assert "hunter2" not in str(failure.value)


def test_empty_and_unsupported_requests_are_not_sent() -> None:
    with scripted("perilune", of_vllm) as server, RemoteEngine(server.url) as engine:
        assert engine.sample([], 3, PLAIN) == []
        assert engine.sample([PROMPT], 0, PLAIN) == [[]]
        with pytest.raises(RequestError, match="only"):
            engine.sample([PROMPT], 1, SamplingParams(max_tokens=1, raw_logprobs=True))
    assert not server.asked
