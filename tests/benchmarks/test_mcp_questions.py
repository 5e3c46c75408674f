"""The record of an agent that answered questions through the MCP server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mcp_questions import RESULT, grade  # noqa: E402
from perilune.cli.agents.actions import Actor  # noqa: E402
from perilune.cli.agents.reading import Reader  # noqa: E402
from perilune.cli.agents.server import Tools  # noqa: E402


def test_recorded_calls_still_fit_the_tools() -> None:
    control: Any = None
    tools = Tools(Reader(control), Actor(control, Path()))
    arguments = {tool.name: tool.inputSchema["properties"].keys() for tool in tools.list()}
    document = json.loads(RESULT.read_text())
    for call in document["calls of the agent"]:
        assert json.loads(call["arguments"]).keys() <= arguments[call["tool"]]
    assert len(document["answers of an agent"]) == len(document["questions"]) == 20


@pytest.mark.parametrize(
    ("question", "answer", "expected", "right"),
    [
        ("How much?", "0.03646", 0.036458333, True),
        ("How much?", "0.0374", 0.036458333, False),
        ("How much?", "unknown", 0.0, False),
        ("How many?", "2 of 8: no, 3", 2, False),
        ("Which stages?", "['traces']", ["traces"], True),
        ("Which stages?", "traces, sft", ["traces"], False),
        ("Which stage?", "traces? no, sft", "traces", False),
        ("Why did it fail?", "attempt 1 was killed with SIGKILL", "killed with SIGKILL", True),
        ("Why did it fail?", "it was killed", "killed with SIGKILL", False),
    ],
)
def test_answers_are_graded_exactly(question: str, answer: str, expected: Any, right: bool) -> None:
    assert grade(question, answer, expected)["right"] is right
