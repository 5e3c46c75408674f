"""Answers of `perilune serve` to the OpenAI client, under load, and to RemoteEngine."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pandas as pd
import psutil
import pytest
from served import CONTEXT, Direct, Served, make_checkpoint, served

from perilune.bundle.freeze import job_document
from perilune.bundle.job import InputReference, Job, Resources
from perilune.bundle.plugin import load_plugin
from perilune.bundle.workspace import Workspace
from perilune.engine.engine import Engine
from perilune.engine.remote import RemoteEngine
from perilune.engine.request import Delta, Prompt, SamplingParams
from perilune.errors import RequestError
from perilune.serve.answers import CompletionAnswer, TokenFormatter

SLOTS = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(
        checkpoint, "--slots", str(SLOTS), "--max-queue", "1000", "--max-body", "0.25", "--stall", "2"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def direct(checkpoint: Path) -> Direct:
    return Direct.load(checkpoint)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_models_route_lists_the_model(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by) == ("tiny", "perilune")
    assert card.max_model_len == CONTEXT  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError, match="no model 'of/another'"):
        client.models.retrieve("of/another")


def test_completion_matches_engine_samples(client: openai.OpenAI, direct: Direct) -> None:
    answer = client.completions.create(
        model="tiny", prompt="12+34=", max_tokens=20, seed=7, n=3, temperature=0.8, logprobs=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    expected = direct.sample("12+34=", 7, 3, max_tokens=20, temperature=0.8, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, own in zip(answer.choices, expected, strict=True):
        assert choice.text == direct.text(own)
        assert choice.token_ids == own.token_ids.tolist()  # type: ignore[attr-defined]
        assert choice.finish_reason == own.finish_reason
        assert choice.logprobs is not None
        assert np.array_equal(np.float32(choice.logprobs.token_logprobs), own.logprobs)  # to the last bit
        assert choice.logprobs.tokens == [direct.tokenizer.token_text(int(token)) for token in own.token_ids]
        assert choice.logprobs.text_offset == [
            len(direct.tokenizer.decode(own.token_ids[:end])) for end in range(len(own.token_ids))
        ]
        for row, likely, token in zip(
            choice.logprobs.top_logprobs or [], own.top_logprobs or [], own.token_ids, strict=True
        ):
            wanted = {direct.tokenizer.token_text(id): logprob for id, logprob in likely}
            assert {text: row[text] for text in wanted} == pytest.approx(wanted, abs=1e-6)
            assert direct.tokenizer.token_text(int(token)) in row
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in expected)


def test_echo_returns_prompt_logprobs(client: openai.OpenAI, direct: Direct) -> None:
    """lm-evaluation-harness computes the likelihood of texts with such requests."""
    texts = ["12+34=46", "9", "1+1=2"]
    tokens = [direct.tokenizer.encode(text) for text in texts]
    scored = Engine(direct.decoder).score([ids[:1] for ids in tokens], [ids[1:] for ids in tokens])
    for prompt in (texts, tokens):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, n=2, logprobs=1, echo=True, seed=7
        )
        for index, (text, logprobs) in enumerate(zip(texts, scored, strict=True)):
            for choice in answer.choices[2 * index : 2 * index + 2]:
                report = choice.logprobs
                assert choice.text.startswith(text) and report is not None
                assert report.text_offset == list(range(len(text) + 1))
                assert report.tokens is not None and "".join(report.tokens[:-1]) == text
                assert report.token_logprobs is not None and report.top_logprobs is not None
                assert report.token_logprobs[0] is None and report.top_logprobs[0] is None
                assert np.array_equal(np.float32(report.token_logprobs[1:-1]), logprobs)  # to the last bit
                for row, token, logprob in zip(
                    report.top_logprobs[1:], report.tokens[1:], report.token_logprobs[1:], strict=True
                ):
                    assert row[token] == logprob and max(row.values()) >= logprob
    alone = client.completions.create(model="tiny", prompt="9", max_tokens=1, logprobs=0, echo=True)
    assert alone.choices[0].logprobs is not None and alone.choices[0].logprobs.top_logprobs is None
    assert alone.choices[0].logprobs.text_offset == [0, 1]
    for choice, scored_prompt in zip(
        client.completions.create(model="tiny", prompt=texts, max_tokens=0, logprobs=1, echo=True).choices,
        answer.choices[::2],
        strict=True,
    ):
        (one, more), count = (each.logprobs for each in (choice, scored_prompt)), len(choice.text)
        assert (choice.text, choice.finish_reason) == (texts[choice.index], "length")
        assert one is not None and more is not None and one.top_logprobs and more.top_logprobs
        assert (
            one.tokens == (more.tokens or [])[:count]
            and one.token_logprobs == (more.token_logprobs or [])[:count]
        )
        assert one.top_logprobs == more.top_logprobs[:count]
    plain = client.completions.create(model="tiny", prompt="1+1=", max_tokens=2, echo=True, seed=7)
    assert plain.choices[0].text.startswith("1+1=") and plain.choices[0].logprobs is None


def test_completion_accepts_several_prompts_as_text_or_tokens(client: openai.OpenAI, direct: Direct) -> None:
    def texts(prompt: Any) -> list[str]:
        made = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, n=2, extra_body={"key": [5, 0, 0]}
        )
        return [choice.text for choice in made.choices]

    spoken = texts(["1+1=", "2+2="])
    assert len(spoken) == 4
    assert texts([direct.tokenizer.encode("1+1="), direct.tokenizer.encode("2+2=")]) == spoken
    first, second = spoken[:2], spoken[2:]
    assert first == [direct.text(sample) for sample in direct.sample("1+1=", 5, 2, max_tokens=6)]
    assert second != first  # the prompts of one request draw different numbers


def test_chat_applies_the_template(client: openai.OpenAI, direct: Direct) -> None:
    question: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
    answer = client.chat.completions.create(
        model="tiny", messages=question, max_completion_tokens=12, seed=3, logprobs=True, top_logprobs=1,
        extra_body={"chat_template_kwargs": {"shout": 1}},
    )  # fmt: skip
    (sample,) = direct.sample("user: 1+1=\nLOUD assistant: ", 3, max_tokens=12, top_logprobs=1)
    (choice,) = answer.choices
    assert choice.message.content == direct.text(sample)
    assert choice.logprobs is not None
    rows = choice.logprobs.content or []
    assert [row.logprob for row in rows] == sample.logprobs.tolist()
    for row, likely in zip(rows, sample.top_logprobs or [], strict=True):
        assert row.bytes == list(row.token.encode())
        assert [(top.token, top.logprob) for top in row.top_logprobs] == [
            (direct.tokenizer.token_text(id), logprob) for id, logprob in likely
        ]
    # Without a limit the answer may fill the rest of the context.
    whole = client.chat.completions.create(
        model="tiny", messages=question, seed=3, extra_body={"ignore_eos": True}
    )
    assert whole.usage is not None and whole.usage.total_tokens == CONTEXT


def test_stream_matches_engine_samples(client: openai.OpenAI, direct: Direct) -> None:
    expected = direct.sample("user: hi\nassistant: ", 11, 2, max_tokens=30)
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=30, seed=11, n=2, stream=True,
        stream_options={"include_usage": True}, logprobs=True,
    )  # fmt: skip
    texts, logprobs, reasons, usage = ["", ""], [[], []], {}, None  # type: ignore[var-annotated]
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                logprobs[choice.index] += [row.logprob for row in choice.logprobs.content or []]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [direct.text(sample) for sample in expected]
    assert logprobs == [sample.logprobs.tolist() for sample in expected]
    assert reasons == {index: sample.finish_reason for index, sample in enumerate(expected)}
    assert usage is not None and usage.completion_tokens == sum(len(sample.token_ids) for sample in expected)


def test_streamed_usage_is_null_before_the_last_event(server: Served) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stream": True}
    for options in ({"include_usage": True}, None):
        with server.http() as http:
            text = http.post("/v1/completions", json=body | {"stream_options": options}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        *earlier, last = [event.get("usage", "absent") for event in events]
        assert set(earlier) <= {None if options else "absent"}
        assert last == "absent" if options is None else last["total_tokens"] == 43


def test_text_offsets_count_whole_characters() -> None:
    """Tokens of one character begin where it begins, also if an event of a stream ends between them."""
    parts = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b", None, "é".encode()]
    formatter = TokenFormatter(lambda token: f"<{token}>", parts)
    answer = CompletionAnswer("tiny", formatter, chat=False, logprobs=True, include_ids=False)
    offsets = []
    for tokens in ([0, 1], [2], [3, 4, 5], [6, 0]):
        delta = Delta(0, 0, tokens, [0.0] * len(tokens), [0] * len(tokens))
        event = json.loads(answer.delta_event(0, delta).removeprefix(b"data: "))
        offsets += event["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3, 3, 4]


def test_stop_string_ends_text_before_the_match(client: openai.OpenAI, direct: Direct) -> None:
    (free,) = direct.sample("abc", 1, max_tokens=40)
    text = direct.text(free)
    stop = text[10:13]
    for stream in (False, True):
        made: Any = client.completions.create(
            model="tiny", prompt="abc", max_tokens=40, seed=1, stop=[stop, "\x00never"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in made] if stream else made.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_sampling_options_reach_the_sampler(client: openai.OpenAI, direct: Direct) -> None:
    (greedy,) = direct.sample("abc", 0, max_tokens=8, temperature=0.0)
    for options in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        made = client.completions.create(model="tiny", prompt="abc", max_tokens=8, extra_body=options)
        assert made.choices[0].text == direct.text(greedy), options
    forced = direct.tokenizer.encode("z")[0]
    made = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logit_bias={str(forced): 100})
    assert made.choices[0].text == "zzzzz"
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -2.0}
    made = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, seed=4, logprobs=0, **penalties
    )
    (sample,) = direct.sample("abc", 4, max_tokens=30, **penalties)
    assert made.choices[0].text == direct.text(sample)
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(sample.logprobs.tolist())
    seedless = {
        client.completions.create(model="tiny", prompt="a", max_tokens=16).choices[0].text for _ in range(4)
    }
    assert len(seedless) == 4


def test_answer_matches_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"zeta": {"enum": ["a", "b"]}, "alpha": {"type": "boolean"}},
        "required": ["zeta", "alpha"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=120, seed=0,
        response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}},
    )  # fmt: skip
    document = json.loads(made.choices[0].message.content or "")
    assert list(document) == ["zeta", "alpha"]  # in the schema's order
    assert document["zeta"] in {"a", "b"} and isinstance(document["alpha"], bool)


STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"[0-4]{2}/\/[x-z]"}, r"[0-4]{2}//[x-z]"),
    ({"regex": "a|b\n"}, "a|b\n"),
    ({"choice": ["yes", 'no "really"']}, 'yes|no "really"'),
    ({"json": '{"enum": [7, 8]}'}, "7|8"),
    ({"json": {"enum": [7, 8]}, "disable_fallback": False}, "7|8"),
    ({"grammar": 'root ::= "a" rest\nrest ::= [0-4]{2} | "b"'}, "a([0-4]{2}|b)"),
    ({"grammar": 'start: "}" %json {"enum": [7]}'}, "}7"),
    (
        {"structural_tag": {
            "structures": [{"begin": "<f>", "schema": {"enum": [7, 8]}, "end": "</f>"}],
            "triggers": ["<"],
        }},
        "[^<]*(<f>[78]</f>[^<]*)*(<(f(>([78](<(/f?)?)?)?)?)?)?",  # the last one may be cut off
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "pattern"), STRUCTURED, ids=str)
def test_structured_outputs_constrain_answers(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    extra = {"structured_outputs": asked}
    text = client.completions.create(model="tiny", prompt="1", max_tokens=40, n=4, extra_body=extra)
    assert all(re.fullmatch(pattern, choice.text) for choice in text.choices)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=40, extra_body=extra
    )
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")


def structural_tag_request(begin: str, schema: dict[str, Any]) -> dict[str, Any]:
    tag = {"triggers": ["<"], "structures": [{"begin": begin, "schema": schema}]}
    return {"structured_outputs": {"structural_tag": tag}}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "no model 'other'; this server has 'tiny'"),
    ({"prompt": "x" * CONTEXT}, 400, "256 tokens; the prompt has 256, and max_tokens is 16"),
    ({"prompt": "x", "max_tokens": CONTEXT}, 400, "256 tokens; the prompt has 1, and max_tokens is 256"),
    ({"prompt": ""}, 400, "the prompt has no tokens"),
    ({"prompt": "é"}, 400, "cannot encode"),
    ({"prompt": [98]}, 400, "the vocabulary has no token 98"),
    ({"prompt": 1}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt is missing"),
    ({"tempreature": 1}, 400, "unrecognized argument: tempreature"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 2.5}, 400, "temperature: Input should be less than or equal to 2"),
    ({"temperature": "0.5"}, 400, "temperature: Input should be a valid number"),
    ({"n": "2"}, 400, "n: Input should be a valid integer"),
    ({"n": True}, 400, "n: Input should be a valid integer"),
    ({"stream": "false"}, 400, "stream: Input should be a valid boolean"),
    ({"key": ["0", 0, 0]}, 400, "key.0: Input should be a valid integer"),
    ({"n": 0}, 400, "n:"),
    ({"n": 100, "prompt": ["a", "b", "c"]}, 400, "at most 256 choices"),
    ({"echo": True, "stream": True}, 400, "echo needs stream: false"),
    ({"best_of": 2}, 400, "best_of is not supported"),
    ({"max_tokens": 0}, 400, "max_tokens: 0 needs echo: true"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty"),
    ({"tools": [{}]}, 400, "tools is not supported"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["x" * 513]}, 400, "stop"),
    ({"logit_bias": {"98": 1}}, 400, "the vocabulary has no token 98"),
    ({"stream_options": {}}, 400, "stream_options needs stream: true"),
    ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, 400, ""),
    ({"structured_outputs": {"regex": "[a", "choice": ["b"]}}, 400, "give exactly one of json"),
    ({"structured_outputs": {"regex": "[a"}}, 400, "regex"),
    ({"structured_outputs": {"regex": "\ud800"}}, 400, "regex"),
    ({"structured_outputs": {"json": "{"}}, 400, "json"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, 400, "malformed grammar: Rule 'x' not found"),
    ({"structured_outputs": {"grammar": "start: @x"}}, 400, "unknown grammar @x"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 9000}}, 400, "malformed grammar"),
    ({"structured_outputs": {"grammar": "root ::= root"}}, 400, "cannot express"),
    (structural_tag_request("f", {}), 400, "no trigger begins 'f'"),
    (structural_tag_request("<f", {"not": {}}), 400, "Unimplemented keys"),
    ({"structured_outputs": {"choice": ["é"]}}, 400, "the vocabulary cannot express"),
    ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, 400, "only one"),
    ({"seed": 1, "key": [0, 0, 0]}, 400, "give only one"),
    ({"top_p": float("nan")}, 400, "top_p"),
    ({"\ud800": 1}, 400, "unrecognized argument: ?"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "told"), REFUSED, ids=lambda value: str(value)[:24])
def test_invalid_requests_get_specific_errors(
    server: Served, change: dict[str, Any], status: int, told: str
) -> None:
    body = {"model": "tiny", "prompt": "1"} | change
    headers = {"Content-Type": "application/json"}
    with server.http() as http:
        answer = http.post("/v1/completions", content=json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert told in error["message"]
    if told.endswith(("is not supported", "needs stream: true")):
        assert error["param"] == told.split(maxsplit=1)[0]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": ["hi"]}, "messages.0", "not a JSON object"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", ""),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "valid integer"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs", "is not supported"),
        ({"messages": [{"role": "user", "content": "é"}]}, None, "cannot encode"),  # no path of the server
        ({"structured_outputs": {"choice": ["é"]}}, None, "cannot express"),  # nor a name of the engine
    ],
)  # fmt: skip
def test_error_names_the_invalid_parameter(
    server: Served, change: dict[str, Any], param: str | None, told: str
) -> None:
    """The message does not list the internal type names."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}]} | change
    with server.http() as http:
        error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == param
    assert told in error["message"]


def test_server_accepts_arguments_with_default_values(server: Served) -> None:
    nothing = {
        "echo": False, "best_of": 1, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0,
        "user": "me", "tools": [], "logit_bias": None, "stop": None, "skip_special_tokens": True,
    }  # fmt: skip
    body = {"model": "tiny", "prompt": "1", "max_tokens": 1, **nothing}
    with server.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
        body |= {"prompt_cache_retention": "24h", "stream": True}
        body |= {"stream_options": {"include_obfuscation": False}}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


JSON = {"Content-Type": "application/json"}
NOT_JSON = (b"", b"{", b'{"model": "tiny", "prompt": "1"', b"\xff\xfe", b"[1]", b"3", b"[" * 50_000)


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:12]))
def test_server_refuses_malformed_bodies(server: Served, content: bytes) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_server_refuses_oversized_bodies(server: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 300_000}).encode()

    def pieces() -> Iterator[bytes]:  # sent without Content-Length
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    with server.http() as http:
        for content in (body, pieces()):
            answer = http.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


def test_server_refuses_other_content_types_and_foreign_host_names(server: Served) -> None:
    body = {"model": "tiny", "prompt": "1", "max_tokens": 1}
    with server.http() as http:
        assert http.post("/v1/completions", data={"model": "tiny"}).status_code == 415
        stranger = http.post("/v1/completions", json=body, headers={"Host": "evil.example:80"})
        assert stranger.status_code == 403
        assert http.post("/v1/completions", json=body, headers={"Host": "localhost"}).status_code == 200
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"


@pytest.mark.thorough
def test_load_of_mixed_clients_leaks_nothing_and_answers_correctly(server: Served, direct: Direct) -> None:
    """Fast readers, slow readers, disconnecting clients and refused requests, all concurrently."""
    before = server.at_rest()
    asked = [(f"{i}+{i}=", i) for i in range(200)]
    slow = [(f"{i}-{i}=", 1000 + i) for i in range(20)]
    expected = [
        [direct.text(one) for one in group] for group in direct.sample_all([*asked, *slow], max_tokens=24)
    ]
    body = {"model": "tiny", "prompt": "left", "max_tokens": 240, "ignore_eos": True}

    async def read(client: openai.AsyncOpenAI, text: str, seed: int) -> str:
        answer = ""
        async for chunk in await client.completions.create(
            model="tiny", prompt=text, max_tokens=24, seed=seed, stream=True
        ):
            answer += chunk.choices[0].text
        return answer

    async def read_slowly(text: str, seed: int) -> str:
        """Read from the socket in small pieces, long after the server has sent everything."""
        document = {"model": "tiny", "prompt": text, "seed": seed, "max_tokens": 24, "stream": True}
        reader, writer = await raw(document)
        received = b""
        while b"[DONE]" not in received:
            more = await reader.read(64 if len(received) < 1024 else 1 << 16)
            assert more, f"the server closed the connection after {received[-200:]!r}"
            received += more
            await asyncio.sleep(0.01)
        writer.close()
        events = [line for line in received.splitlines() if line.startswith(b"data: {")]
        return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)

    async def raw(document: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = json.dumps(document).encode()
        host, port = server.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        return reader, writer

    async def send_and_disconnect(place: int) -> None:
        """Request many tokens and disconnect: at once, during a stream, or before the full answer."""
        reader, writer = await raw(body | {"stream": place % 3 > 0})
        if place % 3 == 1:
            await reader.read(2000)
        elif place % 3 == 2:
            await asyncio.sleep(0.05)
        sock: socket.socket = writer.get_extra_info("socket")
        if place % 2:  # with a TCP reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.close()

    async def nonsense(http: httpx.AsyncClient, content: bytes) -> int:
        return (await http.post("/v1/completions", content=content, headers=JSON)).status_code

    async def everything() -> tuple[list[str], list[str], list[int]]:
        long = json.dumps(body | {"prompt": "x" * 600}).encode()
        bad = [b"{", b'{"model": "tiny"}', b"x" * 300_000, long] * 10
        async with (
            server.async_client() as client,
            httpx.AsyncClient(base_url=server.root, timeout=120) as http,
        ):
            readers = asyncio.gather(*(read(client, *pair) for pair in asked))
            slow_readers = asyncio.gather(*(read_slowly(*pair) for pair in slow))
            refused = asyncio.gather(*(nonsense(http, content) for content in bad))
            await asyncio.gather(*(send_and_disconnect(number) for number in range(60)))
            return await readers, await slow_readers, await refused

    read_texts, slow_texts, statuses = asyncio.run(everything())
    assert read_texts == [text for (text,) in expected[: len(asked)]]
    assert slow_texts == [text for (text,) in expected[len(asked) :]]
    assert statuses == [400, 400, 413, 400] * 10
    after = server.at_rest()
    # On a busy machine many answers finish before the server notices the disconnect.
    assert after["disconnects_total"] - before["disconnects_total"] >= 10
    name = 'tokens_total{kind="completion"}'  # absent before the first answer
    sampled = after[name] - before.get(name, 0.0)
    assert sampled < 220 * 24 + 60 * 120  # requests of disconnected clients were not sampled to the end


def test_server_drops_client_that_stops_reading(server: Served) -> None:
    much = {"model": "tiny", "prompt": "1", "n": 16, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    content = json.dumps(much | {"stream": True}).encode()
    before = server.at_rest()["stalls_total"]
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.root.removeprefix("http://").split(":")
        reader.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        reader.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        reader.settimeout(30)
        assert reader.recv(12) == b"HTTP/1.1 200"
        assert server.at_rest()["stalls_total"] == before + 1
        address = reader.getsockname()
        connections = psutil.Process(server.process.pid).net_connections()
        assert not [peer for peer in connections if peer.raddr and tuple(peer.raddr) == address]


def test_remote_engine_gives_the_same_samples(server: Served, direct: Direct) -> None:
    prompts = [Prompt(direct.tokenizer.encode(f"{i}*{i}="), (9, 4, i)) for i in range(12)]
    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, stop_token_ids=(1, 5))
    local = Engine(direct.decoder).sample(prompts, 3, params)
    progress: list[tuple[int, int]] = []
    with RemoteEngine(server.url) as engine:
        assert (engine.model, engine.server) == ("tiny", "perilune")
        remote = engine.sample(prompts, 3, params, lambda done, total: progress.append((done, total)))
    assert progress == [(3 * i, 36) for i in range(1, 13)]
    for group, others in zip(local, remote, strict=True):
        for own, other in zip(group, others, strict=True):
            assert own.token_ids.tolist() == other.token_ids.tolist()
            assert np.array_equal(own.logprobs, other.logprobs)
            assert own.policy_version.tolist() == other.policy_version.tolist()
            assert own.finish_reason == other.finish_reason
            ended = own.finish_reason == "stop"
            assert other.text == direct.tokenizer.decode(own.token_ids[:-1] if ended else own.token_ids)


SUMS = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
}


def evaluate(root: Path, checkpoint: Path, **options: Any) -> tuple[dict[str, Any], pd.DataFrame]:
    """Run an evaluate stage in a bundle at `root`; returns its summary and episodes."""
    plugin = load_plugin("evaluate")
    spec = {"checkpoint": "sft", "tasks": 4, "samples": 3, "max_tokens": 8, "temperature": 0.9} | options
    job = Job(
        task="evaluate",
        stage="judge",
        spec=plugin.spec.model_validate(spec).model_dump(mode="json"),
        model={"preset": "tiny"},
        environment=SUMS,
        seed=1,
        resources=Resources(device="cpu", threads=1),
        inputs=(InputReference(name="checkpoint", path="inputs/checkpoint", digest="", kind="checkpoint"),),
        secrets=("SERVER_TOKEN",),
    )
    root.mkdir()
    (root / "job.json").write_bytes(job_document(job))
    (root / "inputs").mkdir()
    (root / "inputs" / "checkpoint").symlink_to(checkpoint)
    assert plugin.plan(job)
    summary = dict(plugin.run(Workspace(root)))
    files = sorted((root / "artifacts" / "episodes").glob("*.parquet"))
    return summary, pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def test_evaluation_through_server_makes_the_same_episodes(
    server: Served, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "not-asked-for-here")
    there = {"url": server.url, "model": "tiny", "token": "SERVER_TOKEN"}
    local, frame = evaluate(tmp_path / "local", checkpoint)
    remote, remote_frame = evaluate(tmp_path / "remote", checkpoint, engine=there)
    assert remote["server"] == {"url": server.root, "model": "tiny", "kind": "perilune"}
    assert len(frame) == 4 * 4
    pd.testing.assert_frame_equal(frame, remote_frame)
    timed = {"seconds", "tokens_per_second", "memory", "server"}
    assert {k: v for k, v in local.items() if k not in timed} == {
        k: v for k, v in remote.items() if k not in timed
    }


def test_evaluation_refuses_invalid_server_settings_early(checkpoint: Path, tmp_path: Path) -> None:
    for index, (engine, message) in enumerate(
        [
            ({"url": "nowhere"}, "not the URL"),
            ({"url": "http://a/v1", "token": "OTHER"}, "secrets: \\[OTHER\\]"),
        ]
    ):
        with pytest.raises(RequestError, match=message):
            evaluate(tmp_path / str(index), checkpoint, engine=engine)


def test_offloaded_blocks_restore_conversations(checkpoint: Path) -> None:
    options = "--slots", "2", "--cache-tokens", "320", "--offload-memory", "0.0001", "--offload-disk", "0.1"
    options += "--speculate", "draft"
    direct = Direct.load(checkpoint)
    with served(checkpoint, *options) as server, server.client() as client:
        texts = [letter * 100 for letter in "123456"] * 3
        answers = [
            client.completions.create(
                model="tiny", prompt=text, max_tokens=8, seed=1, extra_body={"returns_in": 20}
            )
            for text in texts
        ]
        metrics = server.metrics()
    assert [answer.choices[0].text for answer in answers] == [
        direct.text(direct.sample(text, 1, max_tokens=8)[0]) for text in texts
    ]
    assert metrics["offload_loaded_disk_blocks"] + metrics["offload_refused_blocks"] > 0
    assert metrics["offload_corrupt_blocks"] == 0
    assert 0 < metrics["accepted_tokens"] <= metrics["proposed_tokens"]
