"""Adapter loading, pause, sleep, embeddings and tracing on one server in a separate process."""

import asyncio
import gc
import json
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from served import Served, make_checkpoint, served

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.decoder import Decoder
from perilune.serve.adapters import AdapterLoader
from perilune.serve.errors import ApiError
from perilune.serve.tracing import SpanWriter

PROMPT = "12+34=" * 8  # three blocks, which the prefix cache keeps


def make_adapter(folder: Path, seed: int, **changes: Any) -> Path:
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, 96, generator=generator), torch.randn(128, 2, generator=generator)
    Adapter({changes.pop("map", "model.layers.0.self_attn.q_proj"): pair}, 2.0).save(folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, valid adapters, and hostile adapter folders."""
    root = tmp_path_factory.mktemp("control")
    make_checkpoint(root / "base")
    adapters = root / "adapters"
    for seed, name in enumerate(("poet", "critic")):
        make_adapter(adapters / name, seed)
    make_adapter(root / "outside", 3)
    make_adapter(adapters / "misfit", 4, map="model.layers.99.self_attn.q_proj")
    make_adapter(adapters / "dora", 5, use_dora=True)
    make_adapter(adapters / "torn", 6)
    (adapters / "torn" / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    make_adapter(adapters / "linked", 7)
    (adapters / "linked" / "adapter_model.safetensors").unlink()
    (adapters / "linked" / "adapter_model.safetensors").symlink_to("/proc/self/environ")
    (adapters / "escape").symlink_to(root / "outside")
    (adapters / "empty").mkdir()
    make_adapter(adapters / "pipe", 8)
    (adapters / "pipe" / "adapter_config.json").unlink()
    os.mkfifo(adapters / "pipe" / "adapter_config.json")
    make_adapter(adapters / "infinite", 9, lora_alpha=float("inf"))
    make_adapter(adapters / "endless", 9, lora_alpha=10**400)
    make_adapter(adapters / "odd", 9)
    (adapters / "odd" / "base.json").write_text('{"kept": []}')
    (make_adapter(adapters / "wordy", 9) / "adapter_config.json").write_bytes(b" " * (1 << 20) + b"{}")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(
        root / "base",
        *("--slots", "8", "--control", "--adapters-from", str(root / "adapters"), "--embeddings", "mean"),
        *("--traces", str(root / "spans.jsonl")),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def answer(http: httpx.Client, model: str, **options: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "seed": 3, "return_token_ids": True}
    return http.post("/v1/completions", json=body | options).json()


def load(http: httpx.Client, name: str, path: str = "", **options: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path or name} | options)


def tokens_of(root: Path, adapter: str | None) -> list[int]:
    """Expected tokens, sampled by an engine in this process."""
    decoder, tokenizer = load_checkpoint(root / "base")
    engine = Engine(decoder, slots=8, tokenizer=tokenizer)
    if adapter is not None:
        engine.add_adapter("own", Adapter.load(root / "adapters" / adapter))
    params = SamplingParams(12, stop_token_ids=(tokenizer.eos_token_id,))
    request = Request(tokenizer.encode(PROMPT), params, (3, 0, 0), adapter=adapter and "own")
    return [token for delta in engine.stream(request) for token in delta.token_ids]


def test_adapter_loads_replaces_and_unloads(http: httpx.Client, server: Served, root: Path) -> None:
    def sampled(model: str) -> Any:
        return answer(http, model)["choices"][0]["token_ids"]

    base, poet, critic = (tokens_of(root, name) for name in (None, "poet", "critic"))
    assert len({tuple(tokens) for tokens in (base, poet, critic)}) == 3
    assert sampled("base") == base
    assert load(http, "own", "poet").text == "Success: LoRA adapter 'own' added successfully."
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["own"]["root"] == str(root / "adapters" / "poet")
    assert cards["own"]["parent"] == "base"
    assert sampled("own") == poet
    again = load(http, "own", "critic")
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "adapter_loaded"
    assert sampled("own") == poet
    assert load(http, "own", "critic", load_inplace=True).status_code == 200
    assert sampled("own") == critic  # the prefix cache of the old adapter is not used
    assert sampled("base") == base
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "own"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "own"}).status_code == 404
    with server.client() as client, pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="own", prompt="1", max_tokens=2)
    assert refused.value.code == "model_not_found"


def test_running_request_keeps_its_adapter(http: httpx.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 180, "ignore_eos": True}
    assert load(http, "kept", "poet").status_code == 200
    expected = answer(http, "kept", **options)["choices"][0]["token_ids"]
    body = {"model": "kept", "prompt": PROMPT, "seed": 3, "return_token_ids": True, "stream": True}
    tokens: list[int] = []
    with http.stream("POST", "/v1/completions", json=body | options) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                if not tokens:
                    assert load(http, "kept", "critic", load_inplace=True).status_code == 200
                    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "kept"}).status_code == 200
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    assert tokens == expected


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("base", "poet", "is the name of the model"),
        ("a b", "poet", "lora_name"),
        ("x", "../outside", "in the folder of adapters"),
        ("x", "/etc", "in the folder of adapters"),
        ("x", "escape", "in the folder of adapters"),
        ("x", "linked", "in the folder of adapters"),
        ("x", "nothing", "in the folder of adapters"),
        ("x", "po\0et", "in the folder of adapters"),
        ("x", "misfit", "no linear map of this name"),
        ("x", "dora", "only plain LoRA"),
        ("x", "torn", "not safetensors"),
        ("x", "empty", "no adapter_model.safetensors"),
        ("x", "pipe", "not a regular file"),
        ("x", "infinite", "not finite"),
        ("x", "endless", "out of range"),
        ("x", "odd", "kept is not one of"),
        ("x", "wordy", "has more than 1,048,576 bytes"),
    ],
)
def test_server_refuses_hostile_adapters(http: httpx.Client, name: str, path: str, message: str) -> None:
    refused = load(http, name, path)
    assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True), refused.text
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base"]


def test_unknown_arguments_of_control_routes_are_named(http: httpx.Client) -> None:
    error = load(http, "x", "poet", zz=1).json()["error"]
    assert (error["message"], error["param"]) == ("unrecognized argument: zz", "zz")


def test_adapter_load_ignores_symlink_created_after_the_check(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, swapped = AdapterLoader._resolve, make_adapter(root / "adapters" / "swapped", 1)

    def swap(self: AdapterLoader, path: Path) -> Path:
        real = inside(self, path)
        if real.parent == swapped:
            shutil.rmtree(swapped)
            swapped.symlink_to(root / "outside")
        return real

    monkeypatch.setattr(AdapterLoader, "_resolve", swap)
    loads = AdapterLoader(*[Mock()] * 2, "base", {}, root / "adapters", asyncio.Lock())
    with pytest.raises(ApiError) as refused:
        loads._read("swapped")
    assert refused.value.detail.startswith("cannot read adapter_model.safetensors")


def test_loaded_adapter_ignores_later_file_changes(http: httpx.Client, root: Path) -> None:
    changing = make_adapter(root / "adapters" / "changing", 0)
    assert load(http, "changing").status_code == 200
    expected = answer(http, "changing")["choices"][0]["token_ids"]
    with (changing / "adapter_model.safetensors").open("r+b") as file:
        file.write((root / "adapters" / "critic" / "adapter_model.safetensors").read_bytes())
    assert answer(http, "changing")["choices"][0]["token_ids"] == expected
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "changing"}).status_code == 200


def test_paused_server_holds_requests(server: Served, http: httpx.Client) -> None:
    expected = answer(http, "base")["choices"][0]["token_ids"]

    async def ask() -> Any:
        async with server.async_client() as client:
            return await client.completions.create(
                model="base", prompt=PROMPT, max_tokens=12, seed=3, extra_body={"return_token_ids": True}
            )

    async def paused() -> Any:
        assert http.post("/pause?mode=keep").json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert http.post("/resume").json() == {"status": "resumed"}
        return await asking

    assert asyncio.run(paused()).choices[0].token_ids == expected
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_pause_mode_keeps_or_aborts_running_requests(http: httpx.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    expected = answer(http, "base", **options)["choices"][0]["token_ids"]
    body = {"model": "base", "prompt": PROMPT, "seed": 3, "return_token_ids": True, "stream": True}

    def interrupted(*calls: str) -> tuple[list[int], dict[str, Any]]:
        tokens, error, waiting = [], {}, list(calls)
        with http.stream("POST", "/v1/completions", json=body | options) as stream:
            for line in stream.iter_lines():
                while waiting:
                    assert http.post(waiting.pop(0)).status_code == 200
                document = json.loads(line[6:]) if line.startswith("data: {") else {}
                tokens += document["choices"][0]["token_ids"] if "choices" in document else []
                error = document.get("error", error)
        return tokens, error

    assert interrupted("/pause?mode=keep", "/resume") == (expected, {})
    assert interrupted("/pause?mode=keep", "/pause?mode=wait", "/resume") == (expected, {})
    assert interrupted("/sleep?mode=keep", "/wake_up") == (expected, {})
    assert interrupted("/sleep?mode=keep", "/pause?mode=wait", "/pause?mode=keep", "/wake_up") == (
        expected,
        {},
    )
    tokens, error = interrupted("/pause", "/resume")
    assert tokens == expected[: len(tokens)]
    assert len(tokens) < len(expected)
    assert error["message"] == "the server was paused"


def test_sleeping_server_refuses_requests(http: httpx.Client, server: Served) -> None:
    expected = answer(http, "base")
    assert http.post("/sleep?level=2").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    with server.client() as client, pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="base", prompt="1", max_tokens=2)
    assert (refused.value.status_code, refused.value.code) == (503, "sleeping")
    assert http.post("/v1/embeddings", json={"model": "base", "input": "1"}).status_code == 503
    assert http.post("/resume").status_code == 409
    assert load(http, "dream", "poet").status_code == 200  # the load takes effect after wake-up
    assert http.post("/wake_up?tags=weights").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up?tags=kv_cache").status_code == 200
    assert http.post("/wake_up").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert answer(http, "base")["choices"] == expected["choices"]
    assert answer(http, "dream")["choices"] != expected["choices"]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "dream"}).status_code == 200


def test_large_embedding_request_does_not_fill_the_queue(http: httpx.Client, server: Served) -> None:
    texts = {"model": "base", "input": ["1"] * 500}
    assert http.post("/pause").status_code == 200
    with ThreadPoolExecutor(2) as threads:
        embedding = threads.submit(http.post, "/v1/embeddings", json=texts)
        deadline = time.monotonic() + 10
        while not server.metrics()["requests_answering"] and time.monotonic() < deadline:
            time.sleep(0.02)
        answering = threads.submit(http.post, "/v1/completions", json={"model": "base", "prompt": "1"})
        while server.metrics()["requests_answering"] < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert http.post("/resume").status_code == 200
        assert (answering.result(30).status_code, embedding.result(30).status_code) == (200, 200)


def test_top_logprobs_omit_tokens_outside_top_k(http: httpx.Client) -> None:
    (choice,) = answer(http, "base", top_k=2, logprobs=5)["choices"]
    assert {len(row) for row in choice["logprobs"]["top_logprobs"]} == {2}


@pytest.mark.parametrize("path", ["/sleep?level=9", "/pause?mode=never", "/wake_up?tags=moon"])
def test_control_routes_refuse_invalid_parameters(http: httpx.Client, path: str) -> None:
    refused = http.post(path)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert not http.get("/is_paused").json()["is_paused"]


def test_reset_prefix_cache_empties_the_cache(http: httpx.Client) -> None:
    def cached() -> int:
        return answer(http, "base")["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]

    cached()
    assert cached() == 32
    assert http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_cross_site_request_cannot_pause_the_server(http: httpx.Client) -> None:
    refused = http.post("/pause", headers={"Origin": "https://evil.example"})
    assert refused.status_code == 415


def vectors(server: Served, texts: Any, model: str = "base", **options: Any) -> NDArray[np.float32]:
    with server.client() as client:
        answer = client.embeddings.create(model=model, input=texts, **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], dtype=np.float32)


def learner_states(decoder: Decoder, tokens: list[int]) -> NDArray[np.float32]:
    """The last hidden states of a text, computed like in training."""
    ends, positions = torch.tensor([0, len(tokens)]), torch.arange(len(tokens))
    with torch.no_grad():
        return decoder(torch.tensor(tokens), positions, PackedAttention(ends)).numpy()  # type: ignore[no-any-return]


def test_embeddings_are_pooled_hidden_states(server: Served, root: Path) -> None:
    decoder, tokenizer = load_checkpoint(root / "base")
    texts = ["1", "12+34=46", "7" * 200, "9+9=" * 30]
    tokens = [tokenizer.encode(text) for text in texts]
    hidden = [learner_states(decoder, ids) for ids in tokens]
    means = np.stack([states.mean(0) / np.linalg.norm(states.mean(0)) for states in hidden])
    pooled = vectors(server, texts)  # the client asks for base64
    np.testing.assert_allclose(pooled, means, atol=2e-6)
    assert np.array_equal(vectors(server, texts, encoding_format="float"), pooled)
    assert np.array_equal(vectors(server, tokens), pooled)
    assert np.array_equal(vectors(server, "12+34=46"), pooled[1:2])  # independent of the batch
    short = vectors(server, texts, dimensions=8)
    np.testing.assert_allclose(short, means[:, :8] / np.linalg.norm(means[:, :8], axis=1)[:, None], atol=5e-6)
    # The last token, and an adapter.
    for options in ({}, {"runner": TorchRunner}):
        engine = Engine(decoder, tokenizer=tokenizer, **options)  # type: ignore[arg-type]
        engine.add_adapter("poet", Adapter.load(root / "adapters" / "poet"))
        (last,) = (vector for piece in engine.embed([tokens[1]], "last") for vector in piece)
        np.testing.assert_allclose(last, hidden[1][-1] / np.linalg.norm(hidden[1][-1]), atol=2e-6)
        (adapted,) = (vector for piece in engine.embed([tokens[1]], "last", "poet") for vector in piece)
        assert np.abs(adapted - last).max() > 1e-3


def test_long_text_is_embedded_in_pieces_between_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tokenizer = load_checkpoint(root / "base")
    engine = Engine(decoder, tokenizer=tokenizer)
    text = tokenizer.encode("12+34=" * 30)
    (whole,) = (vector for piece in engine.embed([text], "mean") for vector in piece)
    expected = engine.sample([Prompt(text[:20], (1, 0, 0))], 1, SamplingParams(30))[0][0].token_ids.tolist()
    monkeypatch.setattr("perilune.engine.embedding._CHUNK_TOKENS", 50)
    engine.add(Request(text[:20], SamplingParams(30), (1, 0, 0)))
    pieces, sampled = [], []
    for piece in engine.embed([text, text], "mean"):
        pieces.append(len(piece))
        sampled += [token for delta in engine.step() for token in delta.token_ids]
    assert pieces == [0, 0, 0, 1] * 2
    while engine.unfinished:
        sampled += [token for delta in engine.step() for token in delta.token_ids]
    assert sampled == expected
    (again,) = (vector for piece in engine.embed([text], "mean") for vector in piece)
    np.testing.assert_allclose(again, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "other"}, 404, "no model"),
        ({"input": ""}, 400, "has no tokens"),
        ({"input": []}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": "7" * 300}, 400, "the context has"),
        ({"input": [[1 << 20]]}, 400, "no token"),
        ({"dimensions": 97}, 400, "96 dimensions"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
        ({"mystery": 1}, 400, "mystery"),
    ],
)
def test_server_refuses_invalid_embedding_requests(
    http: httpx.Client, body: dict[str, Any], status: int, message: str
) -> None:
    refused = http.post("/v1/embeddings", json={"model": "base", "input": "1"} | body)
    assert (refused.status_code, message in refused.json()["error"]["message"]) == (status, True), (
        refused.text
    )


def test_each_request_has_a_request_id_and_a_span(http: httpx.Client, root: Path) -> None:
    def lines(name: str) -> list[str]:
        return [line for line in (root / "spans.jsonl").read_text().splitlines() if f'"{name}"' in line]

    def last(path: str, body: dict[str, Any], **headers: str) -> tuple[httpx.Response, Any, dict[str, Any]]:
        answer = http.post(path, json=body, headers=headers)
        deadline, name = time.monotonic() + 30, answer.headers["x-request-id"]
        while not lines(name) and time.monotonic() < deadline:  # the span is written after the answer
            time.sleep(0.01)
        (line,) = lines(name)
        span = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        values = {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}
        return answer, span, values

    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    asked = {"model": "base", "prompt": "12+34=", "max_tokens": 5, "ignore_eos": True}
    answer, span, values = last(
        "/v1/completions",
        asked | {"stream": True},
        traceparent=f"00-{trace}-{parent}-01",
        **{"X-Request-Id": "a/1"},
    )
    assert answer.headers["x-request-id"] == values["perilune.request_id"] == "a/1"
    assert (span["name"], span["kind"], span["status"]) == ("text_completion base", 2, {"code": 1})
    assert (span["traceId"], span["parentSpanId"]) == (trace, parent)
    assert int(span["endTimeUnixNano"]) > int(span["startTimeUnixNano"])
    assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == ("6", "5")
    assert (values["http.route"], values["http.response.status_code"]) == ("/v1/completions", "200")
    answer, span, values = last("/v1/embeddings", {"model": "base", "input": "123"})
    assert span["name"] == "embeddings base"
    assert values["gen_ai.usage.input_tokens"] == "3"
    answer, span, values = last("/v1/completions", asked | {"model": "x"}, **{"X-Request-Id": "two words"})
    assert answer.headers["x-request-id"] == values["perilune.request_id"] != "two words"
    assert (span["name"], values["http.response.status_code"]) == ("POST /v1/completions", "404")
    assert "parentSpanId" not in span
    answer, span, values = last("/nowhere", {})
    assert span["name"] == "POST"
    assert (root / "spans.jsonl").stat().st_mode & 0o777 == 0o600


def test_full_disk_drops_spans_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    spans = SpanWriter(Path("/dev/full"))
    for _ in range(2):
        spans.write({"headers": [], "method": "GET"}, "a", 200, 0)
    spans.close()
    assert [record.getMessage() for record in caplog.records] == [
        "spans are lost: /dev/full cannot be written: No space left on device"
    ]


def test_sleeping_engine_frees_memory_and_accepts_weights(root: Path) -> None:
    decoder, tokenizer = load_checkpoint(root / "base")
    engine = Engine(decoder, tokenizer=tokenizer)
    prompt = [Prompt(tokenizer.encode("1+1="), (0, 0, 0))]
    before = engine.sample(prompt, 1, SamplingParams(4))[0][0].token_ids.tolist()
    cache: Any = engine._runner.cache
    refs = [weakref.ref(part) for part in (engine._runner, *cache._parts, *cache.keys, *cache.values)]
    del cache
    engine.sleep()
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    with pytest.raises(RequestError, match="the engine sleeps"):
        engine.sample(prompt, 1, SamplingParams(4))
    state = {name: tensor * 0 for name, tensor in decoder.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    engine.update_weights(state, 1)
    engine.wake_up()
    changed = engine.sample(prompt, 1, SamplingParams(4))[0][0]
    assert changed.policy_version.tolist() == [1] * 4
    assert changed.logprobs.tolist() == pytest.approx([-4.585] * 4, abs=0.01)  # uniform over 98 tokens
    engine.update_weights(kept, 2)
    assert engine.sample(prompt, 1, SamplingParams(4))[0][0].token_ids.tolist() == before


def test_request_keeps_removed_adapter_across_sleep(root: Path) -> None:
    decoder, tokenizer = load_checkpoint(root / "base")
    engine = Engine(decoder, slots=8, tokenizer=tokenizer)
    engine.add_adapter("own", Adapter.load(root / "adapters" / "poet"))
    engine.add(Request(tokenizer.encode(PROMPT), SamplingParams(12), (3, 0, 0), adapter="own"))
    sampled = [token for delta in engine.step() for token in delta.token_ids]
    engine.sleep()
    engine.remove_adapter("own")
    engine.wake_up()
    while engine.unfinished:
        sampled += [token for delta in engine.step() for token in delta.token_ids]
    assert sampled == tokens_of(root, "poet")


def test_in_memory_keeps_weights_until_the_last_thread_leaves(root: Path) -> None:
    """The server checks adapters in another thread while the engine may copy the weights."""
    decoder, _ = open_checkpoint(root / "base")
    entered, left = threading.Event(), threading.Event()

    def use() -> bool:
        with decoder.in_memory():
            entered.set()
            assert left.wait(10)
            return decoder.model.layers[0].self_attn.o_proj.weight.is_meta

    with ThreadPoolExecutor(1) as threads:
        with decoder.in_memory():
            using = threads.submit(use)
            entered.wait(0.1)
        left.set()
        assert not using.result()


def test_paused_server_shuts_down_at_once(http: httpx.Client, server: Served) -> None:
    """This test runs last in the module because it stops the server."""
    assert http.post("/pause").status_code == 200
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(http.post, "/v1/completions", json={"model": "base", "prompt": "1"})
        while not server.metrics()["requests_answering"]:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        refused = waiting.result(20)  # --drain is 30 seconds
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server was shut down")
    assert server.process.wait(20) == 0
