"""The record of an agent that answered questions through the MCP server."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mcp_questions import RESULT, grade  # noqa: E402
from perilune.cli.agents.actions import Actor  # noqa: E402
from perilune.cli.agents.reading import Reader  # noqa: E402


def test_recorded_agent_called_tools_that_still_exist() -> None:
    document = json.loads(RESULT.read_text())
    control: Any = None
    offered = {tool.__name__ for tool in (*Reader(control).tools, *Actor(control, Path()).tools)}
    assert {row["tool"] for row in document["calls of the agent"]} <= offered
    questions = [row["question"] for row in document["questions"]]
    assert [row["question"] for row in document["answers of an agent"]] == questions
    assert len(questions) == 20


def test_answers_are_graded_by_figure_or_message() -> None:
    assert grade("How many?", "8 experiments", 8)["right"]
    assert grade("How much?", "0.03646", 0.036458333)["right"]
    assert not grade("How much?", "0.0374", 0.036458333)["right"]
    assert not grade("How much?", "unknown", 0.0)["right"]
    assert grade("Which stages?", "only traces", ["traces"])["right"]
    assert not grade("Why?", "it failed", "killed from outside with SIGKILL")["right"]
