"""Requests with extreme numbers over HTTP do not disturb concurrent streams."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from served import CONTEXT, Direct, Served, make_checkpoint, served

from perilune.engine.engine import Engine
from perilune.models.native import ops
from perilune.serve.app import make_app, text_routes
from perilune.serve.engine_thread import EngineThread
from perilune.serve.guard import BodyLimits
from perilune.serve.model import ServedModel
from perilune.serve.service import Service

VOCABULARY = 98
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
STRANGE: list[tuple[dict[str, Any], int]] = [
    ({"temperature": 1e-9}, 200),
    ({"temperature": 1e-38}, 400),
    ({"temperature": 5e-324}, 400),
    ({"repetition_penalty": 1e-40}, 400),
    ({"repetition_penalty": 1e-6}, 200),
    ({"top_k": 2**63}, 200),
    ({"top_p": 1e-40}, 400),
    ({"min_p": 1e-40}, 200),
    ({"min_tokens": 1, "stop_token_ids": [VOCABULARY]}, 400),
    ({"min_tokens": 1, "stop_token_ids": [2**31 - 1]}, 400),
    ({"stop_token_ids": [VOCABULARY]}, 400),
    ({"min_tokens": 1, "stop_token_ids": list(range(VOCABULARY))}, 400),
    ({"stop_token_ids": list(range(VOCABULARY))}, 200),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": MANY}}}, 200),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("strange") / "model")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint) as server:
        yield server


def streamed(server: Served, seed: int) -> tuple[list[int], list[float]]:
    """Read one long stream; returns its tokens and log-probs."""
    body = {
        "model": server.name, "prompt": "go on: ", "seed": seed, "max_tokens": 200, "stream": True,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    tokens, logprobs = [], []
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                tokens += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
    return tokens, logprobs


def test_extreme_parameters_do_not_disturb_other_streams(server: Served, checkpoint: Path) -> None:
    with ThreadPoolExecutor(4) as threads, server.http() as http:
        streams = [threads.submit(streamed, server, seed) for seed in range(4)]
        for change, status in STRANGE:
            body = {"model": server.name, "prompt": "a", "max_tokens": 4, "seed": 0, **change}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == status, (change, answer.text)
        results = [stream.result() for stream in streams]
    wanted = Direct.load(checkpoint).sample_all([("go on: ", seed) for seed in range(4)], max_tokens=200)
    for (tokens, logprobs), (sample,) in zip(results, wanted, strict=True):
        assert tokens == sample.token_ids.tolist()
        assert logprobs == pytest.approx(sample.logprobs.tolist(), abs=0 if ops.is_available() else 1e-5)
    assert server.metrics()["engine_restarts_total"] == 0


def test_failed_engine_answers_500_and_counts_its_restart(checkpoint: Path) -> None:
    direct = Direct.load(checkpoint)
    engine = Engine(direct.decoder, tokenizer=direct.tokenizer)
    run, failing = engine._runner.run, [True]

    def fail_once(batch: Any) -> Any:
        if failing:
            failing.clear()
            raise MemoryError
        return run(batch)

    engine._runner.run = fail_once  # type: ignore[method-assign]
    model = ServedModel("m", direct.tokenizer, VOCABULARY, CONTEXT, (1,))
    service = Service(model, EngineThread(engine), engine.prompt_logprobs, 8)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[text_routes(service)])
    body = {"model": "m", "prompt": "a", "max_tokens": 4, "seed": 3, "return_token_ids": True}
    with TestClient(app, base_url="http://127.0.0.1") as http:
        failed = http.post("/v1/completions", json=body)
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, "the engine failed")
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["token_ids"] == direct.sample("a", 3, max_tokens=4)[0].token_ids.tolist()
        assert "perilune_engine_restarts_total 1.0" in http.get("/metrics").text
        assert http.get("/health").json() == {"status": "ok"}


def test_max_model_len_is_limited_by_the_cache(checkpoint: Path) -> None:
    with served(checkpoint, "--cache-tokens", "64") as server, server.http() as http:
        (card,) = http.get("/v1/models").json()["data"]
        assert card["max_model_len"] == 64 < CONTEXT
        body = {"model": server.name, "messages": [{"role": "user", "content": "hi"}], "seed": 1}
        options = {"logit_bias": {"1": -100}, "return_token_ids": True}
        answer = http.post("/v1/chat/completions", json=body | options).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 64
        refused = http.post("/v1/chat/completions", json=body | {"max_tokens": 64})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
