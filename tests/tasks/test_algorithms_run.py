"""Algorithms in rl stages: critic, reference, refills, several updates, off-policy correction, resume."""

from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, episodes, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.compare import compare_artifacts
from perilune.errors import WorkFailedError
from perilune.files import read_json
from perilune.tasks.rl.metrics import StepRecorder
from perilune.tasks.stage.training import StepReport

ENDS = {**DIGITS, "factory": "task_environments:Ends"}
DECOUPLED = {"proximal": "learner", "weight": "truncate", "bounds": [0.0, 2.0], "ess_target": 1.0}

# Each algorithm exercises another part of a step: critic, reference, refills, or state of earlier steps.
DEMANDING: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {
            "name": "ppo", "critic_lr": 1e-2, "bootstrap_truncated": True, "entropy_bonus": 0.01,
        },
        "updates_per_batch": 2, "epochs_per_batch": 2, "off_policy": DECOUPLED,
    },
    "dgpo": {"algorithm": "dgpo", "lr": 1e-2, "warmup": 0},
    "rloo": {
        "algorithm": {"name": "rloo", "ratio": "sequence-product"}, "updates_per_batch": 2,
        "kl": 0.05, "kl_estimator": "k1_reward",
    },
    "dapo": {"algorithm": {"name": "dapo", "max_refills": 3}, "environment": ENDS, "max_tokens": 2},
    "toggle": {"algorithm": {"name": "toggle", "period": 1}, "environment": ENDS, "max_tokens": 2},
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        name if name in {"dapo", "ppo"} else pytest.param(name, marks=pytest.mark.thorough)
        for name in DEMANDING
    ],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, run_task(folder, "rl", keep={"optimizer": True}, **DEMANDING[request.param])


def test_algorithm_writes_its_metrics(whole: tuple[str, Path]) -> None:
    name, bundle = whole
    lines = metrics(bundle)
    assert summary(bundle)["algorithm"] == name
    if name == "ppo":
        assert lines[0]["value_error"] > 0
        assert [line["staleness_max"] for line in lines] == [3.0] * 4  # two parts, two epochs each
        state = read_json(bundle / "artifacts" / "checkpoints" / "final" / "optimizer" / "state.json")
        assert state["version"] == 4 * 2 * 2
        assert all(line["truncated"] > 0 for line in lines)  # so that values are bootstrapped
        # Sampler and learner agree, so there is nothing to correct.
        assert all(line["off_policy/ess"] == pytest.approx(1, abs=1e-6) for line in lines)
        assert all(line["off_policy/weight_max"] == pytest.approx(1, abs=1e-5) for line in lines)
    if name == "dgpo":
        spread = [line["dgpo_weight_std"] for line in lines]
        assert spread[0] == pytest.approx(0, abs=1e-6)  # the policy is the reference
        assert spread[-1] > 0
    if name == "rloo":
        assert lines[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
        assert lines[-1]["kl_reference"] > 1e-6
    if name == "dapo":
        assert any(line["groups"] > 4 for line in lines)
        assert all(line["groups_learned"] <= 4 for line in lines)
        ids = list(episodes(bundle)["task_id"].drop_duplicates())
        assert len(ids) == sum(line["groups"] for line in lines)  # every task exactly once


def test_interrupted_run_equals_uninterrupted_run(
    whole: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, expected = whole
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", keep={"optimizer": True}, **DEMANDING[name]))
    record = StepRecorder.record

    def interrupted(self: StepRecorder, step: int, *rest: Any) -> StepReport:
        if step == 3:
            raise WorkFailedError("pulled the plug")
        return record(self, step, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(StepRecorder, "record", interrupted)
        with pytest.raises(WorkFailedError, match="pulled"):
            run_in(bundle)
    run_in(bundle)
    assert compare_artifacts(expected, bundle) == []


def test_second_update_of_a_batch_is_clipped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "warmup": 0, "lr": 2e-2, "algorithm": "dr_grpo"}
    once = run_task(tmp_path / "once", "rl", **options)
    twice = run_task(tmp_path / "twice", "rl", updates_per_batch=2, **options)
    assert [line["clip_fraction"] for line in metrics(once)] == [0, 0]
    assert metrics(twice)[0]["clip_fraction"] > 0
    assert metrics(twice)[0]["kl_behaviour_k3"] > metrics(once)[0]["kl_behaviour_k3"]
    assert metrics(twice)[0]["tokens"] == metrics(once)[0]["tokens"]


def test_spec_refuses_too_few_samples_for_pkpo() -> None:
    with pytest.raises(ValueError, match="samples is 4, and pkpo needs at least 5"):
        make_job("rl", algorithm={"name": "pkpo", "k": 4})
    make_job("rl", algorithm="ppo", samples=1)


def test_learned_groups_exclude_dead_ones(tmp_path: Path) -> None:
    lines = metrics(run_task(tmp_path, "rl", environment=ENDS, max_tokens=2))
    assert any(line["dead_groups"] for line in lines)
    for line in lines:
        assert line["groups_learned"] == line["groups"] * (1 - line["dead_groups"])


@pytest.mark.parametrize("estimator", ["k3", "k1_reward"])
def test_episodes_have_the_log_probs_of_the_reference(estimator: str, tmp_path: Path) -> None:
    bundle = run_task(tmp_path, "rl", steps=1, algorithm="rloo", kl=0.05, kl_estimator=estimator)
    for _, row in episodes(bundle).iterrows():  # at the first step the policy is the reference
        assert row["reference_logprobs"] == pytest.approx(row["logprobs"], abs=1e-5)
