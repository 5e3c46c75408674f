"""Hostile bodies get a JSON answer, never a 500, and do not delay or break other streams."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import CONTEXT, Direct, Served, make_checkpoint, served

from perilune.serve.lanes import LONG_TASK_SIZE, Lanes
from perilune.serve.schema import ChatBody, CompletionBody

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    with served(folder, "--slots", "32", "--max-queue", "1000") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _background_stream(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A second client that streams during all tests and must receive the same tokens as alone."""
    (expected,) = Direct.load(make_checkpoint(tmp_path_factory.mktemp("same") / "tiny")).sample(
        "1+1=", 5, max_tokens=CONTEXT - 4, stop_token_ids=()
    )
    over, tokens = threading.Event(), []

    def listen() -> None:
        with server.client() as client:
            while not over.is_set():
                stream = client.completions.create(
                    model="tiny", prompt="1+1=", max_tokens=CONTEXT - 4, seed=5, stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )  # fmt: skip
                tokens.append([token for chunk in stream for token in chunk.choices[0].token_ids])  # type: ignore[attr-defined]

    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(listen)
        yield
        over.set()
        listening.result(60)
    assert tokens and all(ids == expected.token_ids.tolist() for ids in tokens)


def ask(server: Served, path: str, content: bytes) -> tuple[int, Any]:
    with server.http() as http:
        answer = http.post(f"/v1/{path}", content=content, headers=JSON)
    return answer.status_code, answer.json()


def complete(**change: Any) -> tuple[str, Any]:
    return "completions", {"model": "tiny", "prompt": "1", "max_tokens": 1} | change


def chat(**change: Any) -> tuple[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    return "chat/completions", body | change


def respond(**change: Any) -> tuple[str, Any]:
    return "responses", {"model": "tiny", "input": "1", "max_output_tokens": 1} | change


def schema(document: Any) -> tuple[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": document}})


def nested(depth: int) -> Any:
    document: Any = {}
    for _ in range(depth):
        document = {"a": [document]}
    return document


HOSTILE = {
    "empty objects as prompts": (complete(prompt=[{}] * 500_000), "too many values"),
    "fewer empty objects": (complete(prompt=[{}] * 60_000), "prompt"),
    "unknown keys": (complete(**{f"k{i}": 1 for i in range(250_000)}), "too many values"),
    "fewer unknown keys": (complete(**{f"k{i}": 1 for i in range(30_000)}), "argument: k0"),
    "token ids": (complete(prompt=[1] * 300_000), "too many values"),
    "fewer token ids": (complete(prompt=[1] * 260_000), "260000"),
    "a long text": (complete(prompt="x" * 4_000_000), "4,000,000 characters"),
    "many long texts": (complete(prompt=["x" * 15_000] * 256), "the prompt has 15000, and max_tokens is 1"),
    "a long chat": (chat(messages=[{"role": "user", "content": "x" * 4_000_000}]), "4,000,004 characters"),
    "many messages": (chat(messages=[{"role": "user", "content": ""}] * 11_000), "at most 10000 items"),
    "a message's unknown key": (chat(messages=[{"role": "user", "x": 1}]), "argument: messages.0.x"),
    "many biases": (complete(logit_bias={str(i): 1 for i in range(20_000)}), "logit_bias"),
    "many stops": (complete(stop=[1] * 200_000), "stop"),
    "a large enum": (schema({"enum": [f"v{i}" for i in range(120_000)]}), "more than 10,000 values"),
    "a long constant": (schema({"const": "x" * 1_000_000}), "longer than 131,072 characters"),
    "a large bound": (schema({"type": "string", "minLength": 10**400}), "schema"),
    "an infinite bound": (schema({"type": "number", "maximum": float("inf")}), ""),
    "half a character": (schema({"const": "\ud800"}), ""),
    "a deep schema": (schema(nested(100)), "nested deeper"),
    "deep variables": (chat(chat_template_kwargs=nested(100)), "nested deeper"),
    "many variables": (chat(chat_template_kwargs={"a": [1] * 11_000}), "more than 10,000 values"),
    "half a character in a chat": (chat(chat_template_kwargs={"shout": "\ud800", "\ud800": 1}), None),
    "half a character before a message to continue": (
        chat(
            messages=[{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        "cannot encode",
    ),
    "half a character in the name of a format": (
        respond(text={"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}),
        "text.format.name",
    ),
    "half a character in a hidden tool": (
        respond(tools=[{"type": "function", "name": "f", "description": "\ud800"}], tool_choice="none"),
        "tools.0.description",
    ),
    "half a character in instructions": (respond(instructions="\ud800"), "instructions"),
    "a variable called self": (chat(chat_template_kwargs={"self": 1, "conversations": 2}), None),
    "a choice of tool whose type is an object": (chat(tool_choice={"type": {}}), "tool_choice"),
    "a long role": (chat(messages=[{"role": "<eos>" * 20, "content": ""}]), "role"),
    "a picture": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages.0.content: a part has the type 'image_url'",
    ),
    "a route that an option adds": (
        ("embeddings", {"input": "x"}),
        "no route /v1/embeddings: start it with --embeddings mean",
    ),
    "a long model": (complete(model="x" * 1_000_000), "no model"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_server_answers_hostile_bodies_without_500(server: Served, name: str) -> None:
    (path, body), message = HOSTILE[name]
    status, answer = ask(server, path, json.dumps(body).encode())
    if message is None:
        assert status == 200, answer
    else:
        assert status in (400, 404) and message in answer["error"]["message"], answer
        assert len(answer["error"]["message"]) < 1000


def test_punctuation_inside_text_does_not_count_as_json_structure(server: Served) -> None:
    text = '{"[:,\\' * 40_000
    status, answer = ask(server, *_encoded(complete(prompt=[text])))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_control_tokens_in_chat_messages_are_plain_text(server: Served) -> None:
    messages = [{"role": "user", "content": "<eos>1", "name": "<pad>"}]
    status, answer = ask(server, *_encoded(chat(messages=messages, return_token_ids=True)))
    assert status == 200
    prompt = answer["choices"][0]["prompt_token_ids"]
    assert not {0, 1} & set(prompt) and len(prompt) == len("user: <eos>1\nassistant: ")


def _encoded(asked: tuple[str, Any]) -> tuple[str, bytes]:
    return asked[0], json.dumps(asked[1]).encode()


odd = st.sampled_from(
    [None, True, -1, 0, 1, 2, 97, 2**31, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "1", "\ud800"]
)
values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", ""]), inner),
    max_leaves=5,
)
names = st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields, "echo", "tools", "user", "x"])
schemas = st.fixed_dictionaries({"schema": values})
shapes = st.one_of(
    values,
    st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": schemas}),
    st.lists(st.fixed_dictionaries({"role": values, "content": values}), max_size=2),
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([complete(), chat()]),
    st.dictionaries(names, shapes, max_size=3),
    st.none() | st.tuples(st.integers(0, 200), st.binary(max_size=3)),
)
def test_any_body_gets_a_json_answer(
    server: Served, asked: tuple[str, Any], change: dict[str, Any], damage: tuple[int, bytes] | None
) -> None:
    content = json.dumps(asked[1] | change).encode()
    if damage is not None:
        offset, inserted = damage
        content = content[:offset] + inserted + content[offset + 1 :]
    with server.http() as http:
        answer = http.post(f"/v1/{asked[0]}", content=content, headers=JSON)
    assert answer.status_code in (200, 400, 404, 413), (content, answer.text)
    if "text/event-stream" in answer.headers["Content-Type"]:
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    else:
        assert ("error" in answer.json()) == (answer.status_code != 200)


def test_short_work_does_not_wait_for_long_work_templates_or_schemas() -> None:
    async def everything() -> None:
        lanes, over = Lanes(), threading.Event()
        waiting = [
            asyncio.ensure_future(work)
            for work in (
                lanes.short_or_long(LONG_TASK_SIZE, over.wait),
                lanes.run("template", over.wait),
                lanes.run("schema", over.wait),
            )
        ]
        assert await asyncio.wait_for(lanes.short_or_long(LONG_TASK_SIZE - 1, lambda: 7), 60) == 7
        assert not any(future.done() for future in waiting)
        over.set()
        assert await asyncio.gather(*waiting) == [True] * 3
        lanes.close()

    asyncio.run(everything())


def test_hanging_template_does_not_block_other_requests(server: Served) -> None:
    hang = chat(messages=[{"role": "user", "content": "hang"}])
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(ask, server, *_encoded(hang))
        assert ask(server, *_encoded(complete()))[0] == 200
        assert not hanging.done()
        status, answer = hanging.result(60)
        assert status == 400 and "no answer within 5 s" in answer["error"]["message"]
        assert ask(server, *_encoded(chat()))[0] == 200
