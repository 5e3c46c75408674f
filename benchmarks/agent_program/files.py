"""Writes the tasks of the agent, and traces for a cold start, of which most guess instead of using the tool."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perilune.environments import make_environment

HERE = Path(__file__).resolve().parent
TASKS, TRACES, WITH_TOOL = 3000, 2000, 0.3


def write_files(folder: Path) -> Path:
    """Write everything the recipe needs into a folder; the path of the recipe."""
    draw = random.Random("agent_program")
    pairs = draw.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], TASKS)
    _write(folder / "tasks.jsonl", ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs))
    for name in ("agent.py", "recipe.yaml"):
        shutil.copy(HERE / name, folder / name)
    section = {
        "id": "program",
        "file": str(folder / "agent.py"),
        "preload": ["agents"],
        "tasks": {"id": "jsonl", "path": str(folder / "tasks.jsonl")},
    }
    environment: Any = make_environment(section)
    held_out = {task.data["prompt"][0]["content"] for task in environment.tasks("heldout", 0)}
    session = environment.reset(next(environment.tasks("train", 0)), 0)
    system = session.observation.messages[0]  # what the agent tells its model
    session.close()
    environment.close()
    trained = [(a, b) for a, b in pairs if f"{a}*{b}=" not in held_out]
    _write(folder / "traces.jsonl", (trace(system, *pair, draw) for pair in trained[:TRACES]))
    return folder / "recipe.yaml"


def trace(system: Any, a: int, b: int, draw: random.Random) -> dict[str, Any]:
    """A conversation as the agent holds it: with a call of the tool, or with a guess."""
    answer = {"role": "assistant", "content": str(a * b)}
    messages = [system, {"role": "user", "content": f"{a}*{b}="}]
    if draw.random() < WITH_TOOL:
        call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(a * b)}]
    return {"messages": [*messages, answer]}


def _write(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
