"""Tool calls, reasoning and token routes through the OpenAI client, with a model trained on one answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import torch.nn.functional as F
from fastapi.testclient import TestClient
from served import Served, served
from tokenizers import AddedToken

from perilune.data.tool_calls import describe_tools
from perilune.engine.request import Delta
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.answers import _TextEnd
from perilune.serve.app import make_app, text_routes
from perilune.serve.bodies import read_body
from perilune.serve.engine_thread import StoppedError
from perilune.serve.errors import ApiError
from perilune.serve.guard import BodyLimits
from perilune.serve.response_answer import ResponseAnswer
from perilune.serve.response_body import ResponseBody
from perilune.serve.response_routes import Conversations
from perilune.serve.schema import CompletionBody
from perilune.serve.server import _make_service
from perilune.serve.settings import Settings

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
ASKED: list[Any] = [{"role": "user", "content": "2+3?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
CALLED: list[Any] = [
    *ASKED,
    {
        "role": "assistant",
        "content": "5",
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}],
    },
]
TOKENIZER = Tokenizer.characters()


def tokens(*messages: tuple[str, str]) -> list[int]:
    return TOKENIZER.encode_prompt([{"role": role, "content": content} for role, content in messages])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that reasons and calls the tool it is given, then answers 5 to the tool's result."""
    system = describe_tools([ADD])
    asked = ("system", system), ("user", "2+3?")
    texts = [
        (tokens(*asked), f"<think>sum</think>\nI add.\n{CALL}"),
        (tokens(*asked, ("assistant", f"I add.\n{CALL}"), ("tool", "5")), "It is 5."),
    ]
    folder = tmp_path_factory.mktemp("model") / "tools"
    train_checkpoint(folder, [(prompt, TOKENIZER.encode_completion(answer)) for prompt, answer in texts])
    with served(folder, "--slots", "4", "--reasoning") as running:
        yield running


def train_checkpoint(folder: Path, pairs: list[tuple[list[int], list[int]]]) -> None:
    """Train and save a tiny model that gives these answers to these prompts."""
    decoder = new_model(PRESETS["tiny"].replace(num_layers=2), TOKENIZER, seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), 3e-3, fused=True)
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    flat = torch.tensor([token for prompt, answer in pairs for token in (*prompt, *answer)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    learned = torch.cat(
        [
            torch.arange(int(end) - len(answer), int(end))
            for end, (_, answer) in zip(ends[1:], pairs, strict=True)
        ]
    )
    loss = torch.tensor(9.0)
    for _ in range(400):
        if loss < 0.01:
            break
        logits = decoder.logits(decoder(flat, positions, PackedAttention(ends))[learned - 1])
        loss = F.cross_entropy(logits, flat[learned])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    save_checkpoint(folder, decoder, TOKENIZER)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_chat_calls_tool_and_answers_its_result(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tools", "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    (choice,) = client.chat.completions.create(messages=ASKED, **options).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "sum"  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    parsed = {"parsed": {}, "annotations": []}  # fields of other servers and of the client's `parse`
    for message in (choice.message, choice.message.model_dump(), choice.message.model_dump() | parsed):
        again: Any = [*ASKED, message, result]
        (last,) = client.chat.completions.create(messages=again, **options).choices
        assert (last.message.content, last.finish_reason) == ("It is 5.", "stop")
        assert last.message.tool_calls is None


def test_chat_stream_has_the_same_parts(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tools", messages=ASKED, tools=TOOLS, temperature=0, max_tokens=120, stream=True
    )
    content, reasoning, calls, reasons = "", "", [], []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        calls += choice.delta.tool_calls or []
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (content.strip(), reasoning, reasons) == ("I add.", "sum", ["tool_calls"])
    (call,) = calls
    assert call.index == 0
    assert call.function is not None
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')


def test_reasoning_precedes_constrained_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tools", "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    required = client.chat.completions.create(messages=ASKED, tool_choice="required", **options)
    (choice,) = required.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "sum"  # type: ignore[attr-defined]
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["add"]  # type: ignore[union-attr]
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [5, "It"]}}}
    reply = client.chat.completions.create(messages=ASKED, response_format=form, **options).choices[0].message
    assert reply.reasoning_content == "sum"  # type: ignore[attr-defined]
    assert json.loads(reply.content or "") in {5, "It"}
    text = client.completions.create(
        model="tools", prompt="2+3", max_tokens=200, extra_body={"response_format": form}
    )
    assert json.loads(text.choices[0].text) in {5, "It"}  # completions have no reasoning


def test_continue_final_message_resumes_the_last_message(client: openai.OpenAI) -> None:
    """The message may end inside the reasoning, inside the content, or before a call."""
    whole = f"<think>sum</think>\nI add.\n{CALL}"
    options: dict[str, Any] = {"model": "tools", "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    for begun, reasoning, content in (
        ("<think>s", "um", "I add."),
        ("<think>sum</think>\nI a", None, "dd."),
        (whole[:20], None, " add."),
    ):
        messages: Any = [*ASKED, {"role": "assistant", "content": begun}]
        (choice,) = client.chat.completions.create(messages=messages, extra_body=going_on, **options).choices
        assert getattr(choice.message, "reasoning_content", None) == reasoning
        assert choice.message.content == content
        assert [call.function.arguments for call in choice.message.tool_calls or ()] == ['{"a": 2}']  # type: ignore[union-attr]
    messages = [*ASKED, {"role": "assistant", "content": "<think>s"}]
    forced: Any = options | {"tool_choice": "required", "extra_body": going_on}
    (choice,) = client.chat.completions.create(messages=messages, **forced).choices
    assert choice.message.reasoning_content == "um"  # type: ignore[attr-defined]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    # Once the content has begun there is no reasoning, even if the model prefers it.
    prefers = {"logit_bias": {str(TOKENIZER.encode(letter)[0]): 50 for letter in "<think"}}
    messages = [*ASKED, {"role": "assistant", "content": "<think>sum</think>\n"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [5, "It"]}}}
    (choice,) = client.chat.completions.create(
        model="tools", messages=messages, response_format=form, extra_body=going_on | prefers, max_tokens=20
    ).choices
    assert json.loads(choice.message.content or "") in {5, "It"}


def test_tool_call_without_tools_is_text(client: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": describe_tools([ADD])}
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = client.chat.completions.create(
            model="tools",
            messages=[system, *ASKED],
            temperature=0,
            max_tokens=120,
            **more,  # type: ignore[arg-type]
        ).choices
        assert choice.message.content == f"I add.\n{CALL}"
        assert choice.finish_reason == "stop"


def test_text_offsets_count_the_marks_of_tool_calls(tmp_path: Path) -> None:
    plain = Tokenizer.byte_level()
    plain._backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = plain.with_chat_template("{{ '[TOOL_CALLS]' }}", where="test")
    save_checkpoint(tmp_path / "m", new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    tokens = [tokenizer.control_tokens["[TOOL_CALLS]"], *tokenizer.encode("ab")]
    assert service.model.tokenizer.decode(tokens) == "[TOOL_CALLS]ab"
    answer = service._make_answer(CompletionBody(model="m", prompt="1"), chat=False, logprobs=True)
    assert answer._text_logprobs(Delta(0, 0, tokens, [0.0] * 3, []), _TextEnd())["text_offset"] == [0, 12, 13]
    service.close()


def test_tokenize_and_detokenize_prompts_and_conversations(server: Served) -> None:
    with server.http() as http:
        asked = {"messages": ASKED, "tools": TOOLS}
        encoded = http.post("/tokenize", json=asked).json()
        assert encoded["tokens"] == tokens(("system", describe_tools([ADD])), ("user", "2+3?"))
        assert encoded["count"] == len(encoded["tokens"])
        assert encoded["max_model_len"] > 0
        plain = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
        ended = [*plain, TOKENIZER.eos_token_id]
        assert http.post("/detokenize", json={"tokens": ended}).json() == {"prompt": "abc<eos>"}
        options = {"add_special_tokens": False, "return_token_strs": None, "tools": None}
        assert http.post("/tokenize", json={"prompt": "abc", **options}).json()["tokens"] == plain


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a" * 200_000}, "characters"),
        ("/tokenize", {"messages": ASKED, "add_special_tokens": True}, "add_special_tokens needs prompt"),
        ("/detokenize", {"tokens": [1 << 30]}, "the vocabulary has no token"),
        ("/v1/chat/completions", {"tools": TOOLS * 129}, "tools"),
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "contradict",
        ),
        ("/v1/chat/completions", {"continue_final_message": True}, "needs add_generation_prompt: false"),
        (
            "/v1/chat/completions",
            {"continue_final_message": True, "add_generation_prompt": False, "messages": CALLED},
            "cannot be continued",
        ),
        ("/v1/chat/completions", {"chat_template_kwargs": {"tools": []}}, "cannot contain tools"),
    ],
)
def test_server_refuses_invalid_chat_and_tokenize_requests(
    server: Served, path: str, body: dict[str, Any], message: str
) -> None:
    with server.http() as http:
        asked = {"model": "tools", "messages": ASKED} if "chat" in path else {}
        answer = http.post(path, json=asked | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_template_receives_tools_and_earlier_calls(tmp_path: Path) -> None:
    """The template gets tools as a variable, and earlier calls with their arguments as an object."""
    template = (
        "{% if tools %}TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}"
        "as [TOOL_CALLS]{% endif %}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.id }} {{ call.function.arguments.a }}{% endfor %}"
        "{{ message.tool_call_id or '' }}\n{% endfor %}"
    )
    tokenizer = TOKENIZER.with_chat_template(template, where="test")
    save_checkpoint(tmp_path / "tools", new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "a1", "content": "5"}
    service, _ = _make_service(Settings(tmp_path / "tools", name="tools"), print)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[text_routes(service)])
    with TestClient(app, base_url="http://127.0.0.1") as http:
        asked = http.post("/tokenize", json={"messages": [*ASKED, called, result], "tools": TOOLS}).json()
        alone = http.post("/tokenize", json={"messages": ASKED}).json()
    expected = "TOOLS add as [TOOL_CALLS][user] 2+3?\n[assistant] a1 7\n[tool] 5a1\n"
    assert TOKENIZER.decode(asked["tokens"]) == expected
    assert TOKENIZER.decode(alone["tokens"]) == "[user] 2+3?\n"
    assert service.model.tool_format.name == "mistral"


WRITES = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
KNOWS = "{% for m in messages if m.role in ('developer', 'user') %}[{{ m.role }}]{% endfor %}"
CONCATENATES = (  # like DeepSeek-V3.1
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}{% endfor %}"
)
TESTS_CONTENT = (  # like DeepSeek-V3
    "{% for m in messages %}{% if m['content'] is none %}<tool_call>{{ m.tool_calls | length }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (WRITES, [{"role": "developer", "content": "Brief."}, *ASKED], "[system] Brief.[user] 2+3?"),
        (KNOWS, [{"role": "developer", "content": "Brief."}, *ASKED], "[developer][user]"),
        (CONCATENATES, [(None, '{"a": 1}')], '<tool_call>add{"a": 1}'),
        (CONCATENATES, [(None, "")], "<tool_call>add{}"),
        (TESTS_CONTENT, [(None, "{}")], "<tool_call>1"),
        (TESTS_CONTENT, [("", "{}")], ""),
        (TESTS_CONTENT, [{"role": "assistant", "content": None}, *ASKED], "2+3?"),
        (WRITES + "{# <tool_call> tool_calls #}", [(None, "{}")], "[assistant] "),
    ],
)
def test_template_gets_messages_as_it_expects_them(
    tmp_path: Path, template: str, messages: list[Any], prompt: str
) -> None:
    messages = [
        {
            "role": "assistant",
            "content": message[0],
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": message[1]}}],
        }
        if isinstance(message, tuple)
        else message
        for message in messages
    ]
    tokenizer = TOKENIZER.with_chat_template(template, where="test")
    save_checkpoint(tmp_path / "m", new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[text_routes(service)])
    with TestClient(app, base_url="http://127.0.0.1") as http:
        answer = http.post("/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.json()
    assert TOKENIZER.decode(answer.json()["tokens"]) == prompt


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "[2+3?] "),
        ({"reasoning_effort": None}, "[2+3?] "),
        ({"reasoning_effort": "low"}, "[2+3?] Effort: low. think "),
        ({"reasoning_effort": "none"}, "[2+3?] Effort: none. "),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "[2+3?] Effort: high. ",
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "any"}}, "[2+3?] Effort: any. "),
        ({"add_generation_prompt": False}, "[2+3?]"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "[2+3?"),
    ],
)
def test_prompt_options_reach_the_template(tmp_path: Path, options: dict[str, Any], prompt: str) -> None:
    template = (
        "[{{ messages[0].content }}]{% if add_generation_prompt %} "
        "{% if reasoning_effort %}Effort: {{ reasoning_effort }}. {% endif %}"
        "{% if enable_thinking %}think {% endif %}{% endif %}"
    )
    tokenizer = TOKENIZER.with_chat_template(template, where="test")
    save_checkpoint(tmp_path / "m", new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[text_routes(service)])
    with TestClient(app, base_url="http://127.0.0.1") as http:
        encoded = http.post("/tokenize", json={"messages": ASKED, **options}).json()
        body = {"model": "m", "messages": ASKED, "max_tokens": 1, "return_token_ids": True, **options}
        answer = http.post("/v1/chat/completions", json=body).json()
    assert TOKENIZER.decode(encoded["tokens"]) == prompt
    assert answer["choices"][0]["prompt_token_ids"] == encoded["tokens"]


# -- responses -------------------------------------------------------------------------------------------

FLAT: list[Any] = [{"type": "function", **ADD, "strict": False}]
RESPONSE: dict[str, Any] = {"model": "tools", "tools": FLAT, "temperature": 0, "max_output_tokens": 120}


def outputs(response: Any) -> list[tuple[str, str]]:
    """Type and text of each output item; every item must be completed."""
    assert all(item.status == "completed" for item in response.output)
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def test_response_calls_tool_and_continues_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(input="2+3?", **RESPONSE)
    assert outputs(first) == [("reasoning", "sum"), ("message", "I add."), ("function_call", '{"a": 2}')]
    assert (first.status, first.output_text) == ("completed", "I add.")
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens == len("sum")
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    call: Any = first.output[2]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    last = client.responses.create(previous_response_id=first.id, input=[result], **RESPONSE)
    assert outputs(last) == [("message", "It is 5.")]
    # The same conversation sent at once: output items are valid input items.
    items: Any = [{"role": "user", "content": "2+3?"}, *(item.model_dump() for item in first.output), result]
    assert outputs(client.responses.create(input=items, **RESPONSE)) == [("message", "It is 5.")]
    assert client.responses.retrieve(first.id).output_text == "I add."
    client.responses.delete(first.id)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(previous_response_id=first.id, input="2+3?", **RESPONSE),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.code == "previous_response_not_found"
    unstored = client.responses.create(input="2+3?", store=False, **RESPONSE)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_streamed_response_sends_events_of_each_item(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="2+3?", **RESPONSE)
    with client.responses.stream(input="2+3?", **RESPONSE) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert outputs(final) == outputs(whole)
    raw = list(client.responses.create(input="2+3?", stream=True, **RESPONSE))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    kinds = [event.type.removeprefix("response.") for event in raw]
    once = [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *text,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I add."
    assert [event.item.status for event in raw if event.type == "response.output_item.added"] == [
        "in_progress"
    ] * 3
    assert events[-1].type == "response.completed"


def test_response_applies_instructions_and_token_limit(client: openai.OpenAI, server: Served) -> None:
    short = client.responses.create(input="2+3?", **RESPONSE | {"max_output_tokens": 20})
    assert (short.status, short.output[-1].status) == ("incomplete", "incomplete")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    instructions = describe_tools([ADD])
    answer = client.responses.create(
        model="tools", input="2+3?", instructions=instructions, temperature=0, max_output_tokens=120
    )
    assert answer.output_text == f"I add.\n{CALL}"  # without tools a call is text
    assert answer.instructions == instructions
    again = client.responses.create(
        model="tools", input="2+3?", previous_response_id=answer.id, max_output_tokens=1
    )
    with server.http() as http:
        earlier = [*ASKED, {"role": "assistant", "content": answer.output_text}, *ASKED]
        prompt = http.post("/tokenize", json={"messages": earlier}).json()["count"]
    assert again.usage is not None
    assert again.usage.input_tokens == prompt  # the instructions are not repeated


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 400, "input: List should have at least 1 item"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, 400, "tools is missing"),
        ({"text": {"verbosity": "low"}}, 400, "verbosity is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ({"background": True}, 400, "background is not supported"),
        ({"reasoning": {"effort": "huge"}}, 400, "effort"),
        ({"temperature": -1}, 400, "temperature"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools"),
        ({"top_logprobs": 2}, 400, "log-probs need"),
        ({"model": "other"}, 404, "no model"),
        ({"mystery": 1}, 400, "mystery"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "more than 16"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ({"max_output_tokens": 10**6}, 400, "the context has"),
    ],
)
def test_server_refuses_invalid_response_requests(
    server: Served, body: dict[str, Any], status: int, message: str
) -> None:
    with server.http() as http:
        for stream in (False, True):
            asked = {"model": "tools", "input": "2+3?", "stream": stream} | body
            answer = http.post("/v1/responses", json=asked)
            assert answer.status_code == status
            assert message in answer.json()["error"]["message"]


def test_read_body_refuses_lone_surrogates_in_tool_schema() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"a": ["\ud800"]}}
    asked = {"model": "tools", "input": "2+3?", "tools": [tool], "tool_choice": "none"}
    with pytest.raises(ApiError) as refused:
        read_body(json.dumps(asked).encode(), ResponseBody)
    assert refused.value.detail == "tools.0.parameters: has half of a surrogate pair"


def test_conversations_evict_beyond_count_and_byte_limits() -> None:
    conversations = Conversations(max_bytes=4000, max_count=3)
    for number in range(5):
        conversations.add({"id": f"r{number}", "text": "x" * 300}, [])
    assert conversations.messages("r2") == b"[]"
    conversations.add({"id": "r5", "text": "x" * 300}, [])
    assert list(conversations._stored) == ["r4", "r2", "r5"]
    conversations.add({"id": "large", "text": "x" * 500}, [])  # adding it would evict too many others
    assert list(conversations._stored) == ["r4", "r2", "r5"]
    conversations = Conversations(max_bytes=4000, max_count=100)
    for number in range(20):
        conversations.add({"id": f"r{number}", "text": "x" * 450}, [])
    assert list(conversations._stored) == [f"r{number}" for number in range(12, 20)]
    assert 3600 < conversations._bytes <= 4000
    for number in range(12, 20):
        conversations.remove(f"r{number}")
    assert conversations._bytes == 0


def test_failed_response_ends_with_failed_event() -> None:
    answer = ResponseAnswer(
        {}, streams=True, keep=print, token_formatter=None, parts=None, new_id=str, count=len
    )
    events = answer.error_event(StoppedError("the server was paused")).decode().split("\n\n")
    assert [event.partition("\n")[0] for event in events] == [
        "event: response.created",
        "event: response.in_progress",
        "event: response.failed",
        "",
    ]
    response = json.loads(events[2].partition("data: ")[2])["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the server was paused"}


def test_reasoning_between_special_tokens_is_separated(tmp_path: Path) -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._backend.add_special_tokens([AddedToken(m, special=True) for m in ("<think>", "</think>")])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = tokenizer.with_chat_template(template, where="test")
    shape = PRESETS["tiny"].replace(initializer_range=0.1, max_position_embeddings=4096)
    save_checkpoint(tmp_path / "m", new_model(shape, tokenizer, seed=0), tokenizer)
    begin, end = (tokenizer._backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    asked: Any = {"model": "m", "messages": ASKED, "n": 8, "seed": 1, "max_tokens": 800}
    asked["logit_bias"] = {str(begin): 50, str(end): 4}
    with served(tmp_path / "m", "--slots", "8", "--reasoning") as server, server.client() as client:
        choices = client.chat.completions.create(**asked).choices
        assert all(choice.message.reasoning_content for choice in choices)  # type: ignore[attr-defined]
        constraint = {"structured_outputs": {"choice": ["a", "b"]}}
        choices = client.chat.completions.create(**asked, extra_body=constraint).choices
        complete = [choice for choice in choices if choice.finish_reason == "stop"]
        assert len(complete) > 4
        assert all(choice.message.content in ("a", "b") for choice in complete)
        assert any(getattr(choice.message, "reasoning_content", None) for choice in complete)
