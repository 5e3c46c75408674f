"""Agent programs as environments: model calls are turns, and each program is confined to its episode."""

import errno
import json
import socket
import subprocess
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from perilune.environments import make_environment
from perilune.environments.core.protocol import (
    AgentTurn,
    EpisodeFailedError,
    Failure,
    Observation,
    Score,
    Transcript,
)
from perilune.environments.core.registry import file_fields
from perilune.environments.program.chat import ChatAnswer, RefusedCallError, read_request
from perilune.environments.program.conversations import Conversations
from perilune.environments.program.gateway import Call, Gateway
from perilune.errors import RequestError
from perilune.sandbox.landlock import can_limit_ports
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import RemoteSession, Sessions

AGENT = Path(__file__).parent / "agents" / "asks_twice.py"
CONFINED = can_limit_ports()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {n} ", "answer": str(n)} for n in range(10, 40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "tasks.jsonl"


def section(tasks: Path, mode: str = "", **more: Any) -> dict[str, Any]:
    variables = {"MODE": mode, **more.pop("variables", {})}
    own = {"id": "jsonl", "path": str(tasks)}
    fixed = {"id": "program", "file": str(AGENT), "confined": CONFINED}
    return fixed | {"tasks": own, "variables": variables, **more}


def play(spec: dict[str, Any], *replies: str, count: int = 1) -> list[RemoteSession]:
    environment = make_environment(spec)
    chosen = list(islice(environment.tasks("train", 0), count))
    with Scorer(spec) as scorer:
        sessions = Sessions(scorer.processes, environment)
        opened = sessions.open([(task, 5) for task in chosen])
        for reply in replies:
            going = [run for run in opened if isinstance(run.result, Observation) and not run.result.done]
            sessions.step([(run, [reply], True) for run in going])
        sessions.close(opened)
    return opened


def test_task_text_may_contain_a_placeholder(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"open({{file}}) {n}", "answer": "1"}) for n in range(40)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    command = ["python", "-c", "import sys; sys.exit(sys.argv[1])", "{task}"]
    environment: Any = make_environment(section(tmp_path / "tasks.jsonl", command=command))
    with pytest.raises(EpisodeFailedError, match=r"open\(\{file\}\)"):
        environment.reset(next(environment.tasks("train", 0)), 0)
    environment.close()


def processes() -> str:
    return subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout


def test_program_calls_become_turns_and_output_is_scored(tasks: Path) -> None:
    spec = section(tasks)
    environment = make_environment(spec)
    task = next(environment.tasks("train", 0))
    question = task.data["prompt"][0]["content"]
    assert task.prompt == () and file_fields(spec) == {"file": str(AGENT), "tasks.path": str(tasks)}
    session = environment.reset(task, 0)
    assert session.observation.messages == ({"role": "user", "content": question},)
    assert session.step(" first").messages == ({"role": "user", "content": " again "},)
    end = session.step(question.split()[1])
    assert end.done and end.rewards == (1.0,)
    scored = environment.score(task, Transcript("wrong", earlier=("first",)))
    assert isinstance(scored, Score) and scored.reward == 0.0
    environment.close()


def test_recipe_rewards_weight_scores_of_tasks(tasks: Path) -> None:
    spec = section(tasks, answer="reply", rewards={"verifier": 0.5, "match": 2.0})
    environment = make_environment(spec)
    task = next(environment.tasks("train", 0))
    scored = environment.score(task, Transcript(task.data["data"]["answer"], earlier=("x",)))
    assert isinstance(scored, Score) and scored.reward == 2.5
    environment.close()


@pytest.mark.parametrize(("mode", "cause"), [("crash", "crash"), ("hang", "timeout"), ("flood", "crash")])
def test_failed_program_gets_reward_0_and_does_not_affect_others(tasks: Path, mode: str, cause: str) -> None:
    spec = section(tasks, seconds=2.0 if mode == "hang" else 8.0)
    first = next(make_environment(spec).tasks("train", 0)).data["prompt"][0]["content"].strip()
    spec["variables"]["MODE"] = f"{mode}:{first}"
    broken, *others = play(spec, "a", "b", count=3)
    assert isinstance(broken.result, Observation)
    assert broken.result.rewards == (0.0,) and broken.result.metrics == {f"contained/{cause}": 1.0}
    for other in others:
        assert isinstance(other.result, Observation) and other.result.done and not other.result.metrics
    assert (
        "sleep 61.25" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    )
    (failed,) = play(spec | {"on_crash": "fail"}, "a", "b")
    assert isinstance(failed.result, Failure) and failed.result.boundary == "environment"


def test_close_ends_processes_of_program(tasks: Path) -> None:
    environment = make_environment(section(tasks, "hang"))
    session = environment.reset(next(environment.tasks("train", 0)), 0)
    stepping = threading.Thread(target=session.step, args=("a",), daemon=True)
    stepping.start()
    until = time.monotonic() + 10
    while "sleep 61.25" not in processes() and time.monotonic() < until:
        time.sleep(0.02)
    environment.close()
    stepping.join(10)
    assert "sleep 61.25" not in processes()


def test_program_without_model_call_is_failure(tasks: Path) -> None:
    (silent,) = play(section(tasks, "silent"))
    assert silent.result == Failure("environment", "the program ended without a call of the model")
    (broken,) = play(section(tasks) | {"command": ["python", "-c", "import nowhere"], "file": None})
    assert isinstance(broken.result, Failure) and "No module named 'nowhere'" in broken.result.reason


def test_edited_history_starts_new_conversation(tasks: Path) -> None:
    environment = make_environment(section(tasks, "edit"))
    task = next(environment.tasks("train", 0))
    session = environment.reset(task, 0)
    turns = [("user", "something else"), ("assistant", " first"), ("user", " again ")]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    assert [*session.step(" first").due] == [AgentTurn("0", messages, "conversation")]
    assert session.step(task.data["data"]["answer"]).rewards == (1.0,)
    environment.close()
    (edited,) = play(section(tasks, "edit", branches=False), "first")
    assert isinstance(edited.result, Failure) and "changed earlier messages" in edited.result.reason


def test_parallel_calls_give_same_turns_in_any_order() -> None:
    def call(*contents: str) -> Call:
        roles = ["user", "assistant"] * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        return Call(read_request(request(messages=messages)))

    calls = [call("c"), call("a", "b", "more"), call("c")]
    turns = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        conversations = Conversations(branches=True)
        ((first, opening, turn),) = conversations.match_calls([call("a")])
        first.extend(ChatAnswer(opening.request, 0, " b\n"))
        assert turn == AgentTurn("", ({"role": "user", "content": "a"},), "conversation")
        turns.append([turn for _, _, turn in conversations.match_calls([calls[index] for index in order])])
    assert turns[0] == turns[1] == turns[2]
    assert [(turn.agent, turn.messages[0]["content"]) for turn in turns[0]] == [
        ("", "more"),
        ("0", "c"),
        ("1", "c"),
    ]


def test_call_of_the_player_receives_the_replies_before_it() -> None:
    def call(*contents: str) -> Call:
        roles = ["user", "assistant"] * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        return Call(read_request(request(messages=messages)))

    conversations = Conversations(branches=True)

    def answer(asked: Call) -> AgentTurn:
        ((conversation, _, turn),) = conversations.match_calls([asked])
        conversation.extend(ChatAnswer(asked.request, 0, "b"))
        return turn

    assert not answer(call("a")).results
    early = call("a", "b", "next")  # made before the reply to the sub-agent
    answer(call("c"))
    assert not answer(early).results
    assert answer(call("a", "b", "next", "b", "more")).results == ("0",)
    assert not answer(call("a", "b", "next", "b", "more", "b", "end")).results


def test_stop_texts_of_program_must_be_in_recipe(tasks: Path) -> None:
    (session,) = play(section(tasks, "stop"))
    assert isinstance(session.result, Failure) and "add it to environment.stop" in session.result.reason
    spec = section(tasks, "stop", stop=("##",), answer="reply")
    environment = make_environment(spec)
    task = next(environment.tasks("train", 0))
    right = task.data["data"]["answer"]
    assert environment.score(task, Transcript(f"{right}##", earlier=("x##",))).reward == 1.0  # type: ignore[union-attr]
    environment.close()


@pytest.mark.skipif(not CONFINED, reason="needs Landlock of Linux 6.7")
def test_program_reaches_only_gateway(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "x")
    outside = tasks.parent / "outside"
    outside.write_text("answers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = {"OUTSIDE": str(outside), "PORT": str(server.getsockname()[1])}
        spec = section(tasks, "reach", variables=variables)
        spec["tasks"]["match"] = "contains"
        tasks.write_text(
            json.dumps({"prompt": "p", "answer": "PermissionError PermissionError PermissionError HTTPError"})
            + "\n"
            + json.dumps({"prompt": "q", "answer": "x", "split": "heldout"})
            + "\n"
        )
        environment = make_environment(spec, checked=False)
        every = [*environment.tasks("train", 0), *environment.tasks("heldout", 0)]
        task = next(task for task in every if task.data["prompt"][0]["content"] == "p")
        session = environment.reset(task, 0)
        session.step("a")
        assert session.step("b").rewards == (1.0,)
        environment.close()
    assert outside.read_text() == "answers"


def test_program_rejects_section_without_file_or_with_multi_turn_tasks(tasks: Path) -> None:
    with pytest.raises(RequestError, match="set file"):
        make_environment(section(tasks) | {"file": None})
    with pytest.raises(RequestError, match="one answer"):
        make_environment(section(tasks) | {"tasks": {"id": "calculator"}})


def request(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_read_request_rejects_unsupported_options() -> None:
    assert read_request(request(temperature=0, max_tokens=3, n=1, stop="x")).stop == ("x",)
    for bad in (b"{", b"[]", request(n=2), request(logprobs=True), request(messages=[]), request(tools=[1])):
        with pytest.raises(RefusedCallError):
            read_request(bad)
    with pytest.raises(RefusedCallError, match="end with"):
        read_request(request(messages=[{"role": "assistant", "content": "x"}]))


def test_openai_client_calls_tools_and_sends_calls_back() -> None:
    openai = pytest.importorskip("openai")
    gateway = Gateway()
    calls: list[Call] = []
    replies = iter(['so <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>', "3", "three"])

    def answer(call: Call) -> None:
        calls.append(call)
        call.reply.put(ChatAnswer(call.request, len(calls), next(replies)))

    key = gateway.open(answer)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/{key}/v1", api_key="none")
    messages: list[Any] = [{"role": "developer", "content": "You add."}, {"role": "user", "content": "1+2"}]
    chosen = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0]
    assert chosen.finish_reason == "tool_calls" and chosen.message.content == "so "
    call = chosen.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [
        chosen.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    seen = calls[1].request.messages
    assert [message.role for message in seen] == ["system", "user", "assistant", "tool"]
    assert (
        seen[2]
        == ChatAnswer(
            calls[0].request, 1, 'so <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        ).message
    )
    assert '"name": "add"' in seen[0].content and seen[0].content.startswith("You add.")
    options = {"include_usage": True}
    pieces = list(
        client.chat.completions.create(model="m", messages=messages, stream=True, stream_options=options)
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "three"
    assert pieces[-1].usage.total_tokens == 0
    assert [model.id for model in client.models.list()] == ["policy"]
    gateway.close_session(key)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="m", messages=messages)
    gateway.close()


def test_gateway_answers_hostile_requests_with_error_status() -> None:
    gateway = Gateway()
    key = gateway.open(lambda call: call.reply.put(ChatAnswer(call.request, 0, "fine")))
    path = f"POST /{key}/v1/chat/completions HTTP/1.1\r\n"

    def send(text: str) -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.port), 5) as connection:
            connection.settimeout(5)
            try:
                connection.sendall(text.encode())
                connection.shutdown(socket.SHUT_WR)
                return connection.makefile("rb").readline()
            except OSError as error:  # the server closed the connection before it read all bytes
                if error.errno not in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE):
                    raise
                return b" 413 431 "

    assert b" 413 " in send(f"{path}Content-Length: 99999999999\r\n\r\n")
    assert b" 413 " in send(f"{path}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert b" 413 " in send(f"{path}Content-Length: \u00b2\r\n\r\n")
    assert b" 400 " in send(f"{path}Content-Length: 9\r\n\r\n{{")
    nested = "[" * 200_000
    assert b" 400 " in send(f"{path}Content-Length: {len(nested)}\r\n\r\n{nested}")
    assert b" 431 " in send(f"{path}X: {'x' * 100_000}\r\n\r\n")
    assert b" 404 " in send("GET /../../etc/passwd HTTP/1.1\r\n\r\n")
    assert b" 404 " in send("POST /0/v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    good = request().decode()
    assert b" 200 " in send(f"{path}Content-Length: {len(good)}\r\n\r\n{good}")
    gateway.close()


def test_waiting_call_is_rejected_when_session_closes() -> None:
    openai = pytest.importorskip("openai")
    gateway = Gateway()
    waiting = threading.Event()
    key = gateway.open(lambda call: waiting.set())
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/{key}/v1", api_key="none", max_retries=0
    )
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        except openai.BadRequestError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    waiting.wait(10)
    time.sleep(0.05)
    gateway.close_session(key)
    thread.join(10)
    assert len(raised) == 1
    gateway.close()


def test_answer_to_a_call_without_tools_is_text() -> None:
    for choice, finish in (("auto", "tool_calls"), ("none", "stop")):
        call = {
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": choice,
        }
        request = read_request(json.dumps(call).encode())
        answer = json.loads(ChatAnswer(request, 0, '<tool_call>{"name": "f"}</tool_call>').document())
        assert answer["choices"][0]["finish_reason"] == finish
