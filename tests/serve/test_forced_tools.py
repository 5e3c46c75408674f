"""Enforced tool choice: calls of any model match the schemas of the tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from served import Served, served
from tokenizers import AddedToken

from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.parts import PartsReader
from perilune.serve.tool_formats import FORMATS, detect_format

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{# FORM #}"
)
FORMS = {  # template text that identifies each model family
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "named mistral": "[TOOL_CALLS] [ARGS]",
    "llama3_json": "<|python_tag|>",
    "pythonic": "[func_name1(",
    "deepseek_v3": " ".join([*FORMATS["deepseek_v3"].marks, "```json"]),
    "kimi_k2": " ".join(FORMATS["kimi_k2"].marks),
}
QUICK = ("hermes", "named mistral", "deepseek_v3")
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "unit": {"enum": ["C", "°F"]},
        "days": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": PLACE, "now": {"maxProperties": 0}}
ASKED: Any = [{"role": "user", "content": "warm?"}]


def make_checkpoint(folder: Path, form: str) -> Path:
    """Save a model with random weights, whose answers vary."""
    tokenizer = Tokenizer.byte_level()
    if marks := detect_format(FORMS[form]).marks:
        tokenizer._backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = tokenizer.with_chat_template(TEMPLATE.replace("FORM", FORMS[form]), where="test")
    shape = PRESETS["tiny"].replace(initializer_range=0.1, max_position_embeddings=4096)
    save_checkpoint(folder, new_model(shape, tokenizer, seed=0), tokenizer)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(form, marks=[] if form in QUICK else pytest.mark.thorough)
        for form in FORMS
        if form != "pythonic"
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "m", request.param)
    with served(folder, "--slots", "16") as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def complete_chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "m", "messages": ASKED, "tools": TOOLS, "seed": 3, "max_tokens": 600, "n": 16} | options
    )


def calls_of(message: Any) -> list[tuple[str, str]]:
    """The calls of a message, checked against their schemas."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    return calls


def test_required_tool_calls_match_their_schemas(client: openai.OpenAI) -> None:
    choices = complete_chat(client, tool_choice="required").choices
    complete = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert len(complete) > 8
    assert {choice.finish_reason for choice in choices} <= {"tool_calls", "length"}
    called = [calls_of(choice.message) for choice in complete]
    assert all(called) and all(choice.message.content is None for choice in complete)
    assert {name for calls in called for name, _ in calls} == set(SCHEMAS)
    assert any(len(calls) > 1 for calls in called)
    assert any(json.loads(given) for calls in called for _, given in calls)


def test_parallel_tool_calls_false_gives_one_call(client: openai.OpenAI) -> None:
    for choice in complete_chat(client, tool_choice="required", parallel_tool_calls=False).choices:
        assert choice.finish_reason == "tool_calls"
        assert len(calls_of(choice.message)) == 1


def test_named_tool_choice_gives_one_call(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choices = complete_chat(client, tool_choice=named).choices
    assert {choice.finish_reason for choice in choices} == {"stop"}  # like OpenAI
    calls = [calls_of(choice.message) for choice in choices]
    assert all([name for name, _ in answer] == ["weather"] for answer in calls)
    assert len({arguments for answer in calls for _, arguments in answer}) > 8


def test_stream_has_the_same_tool_calls(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        whole = complete_chat(client, tool_choice=choice, n=2)
        streamed: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
        reasons, pieces = {}, 0
        for chunk in complete_chat(client, tool_choice=choice, n=2, stream=True):
            for part in chunk.choices:
                for call in part.delta.tool_calls or ():
                    pieces += 1
                    if call.index == len(streamed[part.index]):
                        assert call.id and call.type == "function"
                        streamed[part.index].append((call.function.name, ""))
                    assert call.index == len(streamed[part.index]) - 1
                    name, arguments = streamed[part.index][-1]
                    streamed[part.index][-1] = name, arguments + call.function.arguments
                reasons[part.index] = part.finish_reason or reasons.get(part.index)
        assert streamed == {choice.index: calls_of(choice.message) for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert pieces > sum(map(len, streamed.values())) + 2  # arguments arrive during generation


def test_truncated_tool_call_keeps_partial_arguments(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    whole = complete_chat(client, tool_choice=named, n=1)
    most = whole.usage.completion_tokens - 20
    (choice,) = complete_chat(client, tool_choice=named, n=1, max_tokens=most).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    ((name, arguments),) = [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ]
    ((_, complete),) = calls_of(whole.choices[0].message)
    assert name == "weather" and len(arguments) > 2
    assert complete.startswith(arguments) and arguments != complete


def test_allowed_tools_restrict_calls_and_prompt(client: openai.OpenAI) -> None:
    def allowed(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for choice in complete_chat(client, tool_choice=allowed("required", "now")).choices:
        assert {name for name, _ in calls_of(choice.message)} == {"now"}
    some, all_tools, single = (
        complete_chat(client, n=1, max_tokens=1, **given).usage.prompt_tokens
        for given in ({"tool_choice": allowed("auto", "now")}, {}, {"tools": TOOLS[1:]})
    )
    assert some == single < all_tools
    with pytest.raises(openai.BadRequestError, match="tool_choice needs a function in tools"):
        complete_chat(client, tool_choice=allowed("auto", "now", "x"))


def test_responses_api_enforces_tool_choice(client: openai.OpenAI) -> None:
    flat: Any = [{"type": "function", "strict": False, "parameters": None} | TOOLS[0]["function"]]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    for choice in ("required", {"type": "function", "name": "weather"}, allowed):
        response = client.responses.create(
            model="m", input="warm?", tools=flat, tool_choice=choice, parallel_tool_calls=False,
            max_output_tokens=600,
        )  # fmt: skip
        (item,) = response.output
        assert (response.status, item.type) == ("completed", "function_call")
        jsonschema.validate(json.loads(item.arguments), PLACE)
        assert response.model_dump()["tool_choice"] == choice


def test_responses_stream_sends_argument_deltas(client: openai.OpenAI) -> None:
    flat: Any = [{"type": "function", "strict": False, "parameters": None} | TOOLS[0]["function"]]
    asked = {
        "model": "m",
        "input": "warm?",
        "tools": flat,
        "tool_choice": "required",
        "max_output_tokens": 600,
    }
    seeded: Any = asked | {"extra_body": {"seed": 3}}
    whole = client.responses.create(**seeded)
    events = list(client.responses.create(**seeded, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 2 * len(done) > 0
    assert "".join(deltas) == "".join(done)
    assert done == [item.arguments for item in whole.output if item.type == "function_call"]
    assert events[-1].response.output == [
        item.model_copy(update={"id": other.id, "call_id": other.call_id})
        for item, other in zip(whole.output, events[-1].response.output, strict=True)
    ]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "function is missing"),
        ({"tool_choice": "required", "tools": []}, None, "tool_choice needs a function"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, None, "tool_choice needs"),
        ({"response_format": {"type": "json_object"}}, None, "give only one"),
        ({"min_tokens": 3}, None, "min_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "'a b' does not match"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "the parameters of function 'f' are not of type object",
        ),
        (
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools",
            'f: Unimplemented keys: ["not"]',
        ),
    ],
)  # fmt: skip
def test_server_refuses_unenforceable_tool_choice(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            complete_chat(client, stream=stream, tool_choice="required", extra_body=change)
        assert message in refused.value.message
        assert param is None or (refused.value.param or "").startswith(param)


def test_pythonic_format_refuses_required_tool_choice(tmp_path: Path) -> None:
    with served(make_checkpoint(tmp_path / "m", "pythonic")) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            complete_chat(client, tool_choice="required")
        assert "calls in the format pythonic cannot be constrained" in refused.value.message
        assert "--tool-format hermes" in refused.value.message
        auto = complete_chat(client, tool_choice="auto", n=1, max_tokens=4)
        assert auto.choices[0].finish_reason == "length"


def test_ids_of_kimi_k2_count_the_calls_of_the_conversation(tmp_path: Path) -> None:
    """Its chat template shows a result under the id of the call."""
    call = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "noon"},
    ]
    with served(make_checkpoint(tmp_path / "m", "kimi_k2")) as running, running.client() as client:
        asked: Any = {"tool_choice": {"type": "function", "function": {"name": "now"}}, "n": 1}
        (choice,) = complete_chat(client, messages=messages, **asked).choices
        assert [made.id for made in choice.message.tool_calls] == ["functions.now:1"]
        (choice,) = complete_chat(client, **asked).choices
        assert [made.id for made in choice.message.tool_calls] == ["functions.now:0"]


def test_number_beyond_float_range_becomes_largest_float() -> None:
    """JSON allows such numbers, so the call is valid."""
    reader = PartsReader(calls=FORMATS["hermes"])
    text = '<tool_call>{"name": "f", "arguments": {"a": 1e999, "b": -1e999}}</tool_call>'
    ((_, arguments),) = reader.feed(text, last=True).calls
    assert json.loads(arguments) == {"a": 1.7976931348623157e308, "b": -1.7976931348623157e308}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_parts_reader_drops_calls_beyond_most_calls(form: str) -> None:
    text = FORMATS[form].format_calls([("f", '{"a": 1}'), ("g", "{}")])
    reader = PartsReader(calls=FORMATS[form], max_calls=1)
    parts = reader.feed(text + " x", last=True)
    assert parts.calls == [("f", '{"a": 1}')]
