"""Runs stop without a learning signal, or when sampler and learner differ."""

from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, metrics, run_task

from perilune.engine.engine import Engine
from perilune.errors import WorkFailedError
from perilune.tasks.rl import update as policy_update
from perilune.tasks.rl.metrics import MAX_DEAD_STEPS


def test_ppo_stops_after_too_many_steps_whose_rewards_are_all_equal(tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompts": 2, "samples": 1, "max_tokens": 1, "save_every": 100, "steps": 50}
    with pytest.raises(WorkFailedError, match="nothing to learn from") as caught:
        run_task(tmp_path / "rl", "rl", environment={**DIGITS, "equal": 0.5}, algorithm="ppo", **options)
    assert caught.value.where == f"step {MAX_DEAD_STEPS}"


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_rl_stops_after_too_many_steps_of_equal_rewards(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompts": 2, "samples": 2, "max_tokens": 1, "save_every": 100, "steps": 50}
    with pytest.raises(WorkFailedError, match="nothing to learn from") as caught:
        run_task(tmp_path / "rl", "rl", environment={**DIGITS, "equal": 0.5}, algorithm=algorithm, **options)
    assert caught.value.where == f"step {MAX_DEAD_STEPS}"
    assert "lower lr" in caught.value.remedy
    lines = metrics(tmp_path / "rl")
    assert [line["dead_groups"] for line in lines] == [1.0] * MAX_DEAD_STEPS
    assert {line["grad_norm"] for line in lines} == {0.0}
    assert {line["tokens"] for line in lines} == {0.0}


def test_default_settings_pass_the_logprob_check(tmp_path: Path) -> None:
    """The control for the injected bugs below."""
    bundle = run_task(tmp_path / "rl", "rl", lr=2e-4, warmup=10, steps=3)
    assert max(line["logprob_gap_max"] for line in metrics(bundle)) <= 1e-6


def test_engine_with_stale_weights_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports the new version but samples with the old weights."""

    def claim_only(engine: Engine, state: None, version: int) -> None:
        engine.version = version

    monkeypatch.setattr(Engine, "update_weights", claim_only)
    with pytest.raises(WorkFailedError, match="its weights are stale"):
        run_task(tmp_path / "rl", "rl", lr=2e-4, warmup=10, steps=12)


def test_learner_without_temperature_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = policy_update.pack
    monkeypatch.setattr(policy_update, "pack", lambda groups, budget, temperature: pack(groups, budget))
    with pytest.raises(WorkFailedError, match="sampler and learner differ by") as caught:
        run_task(tmp_path / "rl", "rl", temperature=0.9)
    assert caught.value.where.startswith("step 1, episode")
    assert "the temperature 0.9 is missing from the learner's" in caught.value.what
    assert "bug in Perilune" in caught.value.remedy
