"""A program of others is trained: its episodes hold what the engine sampled, and repeat."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from task_cases import episodes, metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.sandbox.landlock import can_limit_ports

AGENT = Path(__file__).parents[1] / "environments" / "agents" / "asks_twice.py"
CONFINED = can_limit_ports()


def test_a_climb_of_an_agent_program_is_exact_and_repeats(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ", "answer": "x"} for n in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        "id": "program",
        "file": str(AGENT),
        "confined": CONFINED,
        "tasks": {"id": "jsonl", "path": str(tmp_path / "tasks.jsonl"), "match": "contains"},
        "variables": {"MODE": "crash:3"},
        "stop": ["i", "#", "7", "X"],  # so that a new model ends its turns
    }
    options = {"environment": environment, "steps": 2, "prompts": 4, "samples": 3, "max_tokens": 80}
    bundle, again = (run_task(tmp_path / name, "rl", **options) for name in ("one", "two"))
    assert not compare_artifacts(bundle, again)
    assert max(row["logprob_gap_max"] for row in metrics(bundle) if row["dead_groups"] < 1) < 1e-5
    played = episodes(bundle)
    figures = [dict(one) for one in played.metrics]
    assert not played.failure.any()
    crashed = [one for one in figures if "contained/crash" in one]
    finished = played[[one["turns"] == 2 and "contained/crash" not in one for one in figures]]
    assert crashed and len(finished)
    one = finished.iloc[0]
    turns = np.flatnonzero(np.diff(one.loss_mask.astype(int))) + 1
    assert len(turns) == 2  # the program's text between two turns is not learned
    assert [message["role"] for message in one.messages] == ["user", "assistant"] * 2
    assert one.messages[2]["content"] == " again "
