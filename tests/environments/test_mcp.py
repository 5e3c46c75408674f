"""The tools of an MCP server: each episode has its own server, and a crash of the server gives reward 0."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from perilune.environments import make_environment
from perilune.environments.core.protocol import Failure, Observation
from perilune.sandbox.landlock import can_limit_ports
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import RemoteSession, Sessions

pytest.importorskip("mcp.server.fastmcp")
SERVER = Path(__file__).parent / "agents" / "tool_server.py"
CONFINED = can_limit_ports()


def section(folder: Path, **more: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"id": "jsonl", "path": str(folder / "tasks.jsonl")}
    fixed = {"id": "mcp", "file": str(SERVER), "confined": CONFINED}
    return fixed | {"tasks": tasks, "preload": ["mcp.server.fastmcp"], **more}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(spec: dict[str, Any], *actions: list[str]) -> list[RemoteSession]:
    """One session for each list of actions."""
    environment = make_environment(spec)
    chosen = list(islice(environment.tasks("train", 0), len(actions)))
    with Scorer(spec) as scorer:
        sessions = Sessions(scorer.processes, environment)
        opened = sessions.open([(task, 0) for task in chosen])
        for turn in range(max(map(len, actions))):
            sessions.step(
                [(s, [a[turn]], True) for s, a in zip(opened, actions, strict=True) if turn < len(a)]
            )
        sessions.close(opened)
    return opened


def text(one: RemoteSession) -> str:
    assert isinstance(one.result, Observation), one.result
    return "|".join(message["content"] for message in one.result.messages)


def test_mcp_environment_lists_and_calls_tools_and_scores_answer(tmp_path: Path) -> None:
    spec = section(tmp_path)
    environment = make_environment(spec)
    task = next(environment.tasks("train", 0))
    session = environment.reset(task, 0)
    system, question = session.observation.messages
    number = int(question["content"].split()[0])
    assert system["role"] == "system" and '"name": "add", "description": "The sum."' in system["content"]
    seen = session.step("I add " + call("add", a=number, b=1) + call("add", a="x", b=1)).messages
    assert seen[0] == {"role": "tool", "content": str(number + 1)} and seen[1]["content"].startswith(
        "error: "
    )
    assert (
        session.step("<tool_call>add(1)</tool_call>")
        .messages[0]["content"]
        .startswith("error: a tool call is")
    )
    assert session.step(call("nothing")).messages[0]["content"].startswith("error: ")
    end = session.step(str(number + 1))
    assert end.done and end.rewards == (1.0,) and end.metrics["calls"] == 3.0
    environment.close()


def test_each_episode_has_own_server_and_crash_gives_reward_0(tmp_path: Path) -> None:
    spec = section(tmp_path, seconds=4.0)
    spec["tasks"]["match"] = None
    first, second = play(spec, [call("note", text="a"), call("note", text="b")], [call("note", text="c")])
    assert (text(first), text(second)) == ("a,b", "c")
    spec["tasks"]["match"] = "exact"
    crashed, hung, good = play(spec, [call("crash")], [call("hang")], [call("note", text="x"), "no"])
    for dead in (crashed, hung):
        assert isinstance(dead.result, Observation) and dead.result.done and dead.result.rewards == (0.0,)
        assert dead.result.metrics == {"contained/tools": 1.0}
    assert isinstance(good.result, Observation) and good.result.metrics == {"calls": 1.0}
    (failed,) = play(spec | {"on_crash": "fail"}, [call("crash")])
    assert failed.result == Failure("environment", "the server closed its socket")
    environment = make_environment(spec | {"variables": {"MODE": "broken"}})
    with pytest.raises(Exception, match="the server closed its socket: no notes today"):
        environment.reset(next(environment.tasks("train", 0)), 0)
    environment.close()
