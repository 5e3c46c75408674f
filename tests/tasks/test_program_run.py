"""RL on external agent programs: episodes hold the sampled tokens and are reproducible."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from task_cases import episodes, metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.sandbox.landlock import can_limit_ports

AGENT = Path(__file__).parents[1] / "environments" / "agents" / "asks_twice.py"
CONFINED = can_limit_ports()


def section(folder: Path, mode: str) -> dict[str, Any]:
    rows = [{"prompt": f"{n} ", "answer": "x"} for n in range(40)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "id": "program",
        "file": str(AGENT),
        "confined": CONFINED,
        "tasks": {"id": "jsonl", "path": str(folder / "tasks.jsonl"), "match": "contains"},
        "variables": {"MODE": mode},
        "stop": ["i", "#", "7", "X"],  # so that an untrained model ends its turns
    }


def test_rewritten_conversations_of_a_program_are_trained(tmp_path: Path) -> None:
    environment = section(tmp_path, "edit")
    options = {"environment": environment, "steps": 2, "prompts": 4, "samples": 3, "max_tokens": 80}
    bundle = run_task(tmp_path / "run", "rl", train_sub_agents=True, **options)
    assert max(row.get("logprob_gap_max", 0.0) for row in metrics(bundle)) < 1e-5
    played = episodes(bundle)
    agents = played[played.group_id.str.endswith("/agents")]
    assert any(dict(figures)["advantage"] for figures in agents.metrics)
    for row in agents.itertuples():
        assert [message["role"] for message in row.messages] == ["user", "assistant", "user", "assistant"]
        assert row.loss_mask.all() and not row.failure


def test_rl_on_an_agent_program_is_deterministic(tmp_path: Path) -> None:
    environment = section(tmp_path, "crash:3")
    options = {"environment": environment, "steps": 2, "prompts": 4, "samples": 3, "max_tokens": 80}
    bundle, again = (run_task(tmp_path / name, "rl", **options) for name in ("one", "two"))
    assert not compare_artifacts(bundle, again)
    assert max(row["logprob_gap_max"] for row in metrics(bundle) if row["dead_groups"] < 1) < 1e-5
    played = episodes(bundle)
    figures = [dict(pairs) for pairs in played.metrics]
    assert not played.failure.any()
    crashed = [row for row in figures if "contained/crash" in row]
    finished = played[[row["turns"] == 2 and "contained/crash" not in row for row in figures]]
    assert crashed and len(finished)
    row = finished.iloc[0]
    turns = np.flatnonzero(np.diff(row.loss_mask.astype(int))) + 1
    assert len(turns) == 2  # the program's text between turns is masked
    assert [message["role"] for message in row.messages] == ["user", "assistant"] * 2
    assert row.messages[2]["content"] == " again "
