"""A recipe of five stages through the control plane, with a kill, and all its artifacts."""

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import psutil
import pytest
import yaml
from task_cases import DIGITS, EVALUATE, RL, SFT, episodes, figures_of, metrics, run_in, summary

from perilune.bundle import storage
from perilune.bundle.compare import compare_artifacts
from perilune.bundle.freeze import copy_for_attempt
from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control, advance, open_experiment, plan_stages
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.progress import StageFailed, StageFinished, StageProgress, StageResumed
from perilune.data.episodes_file import read_episodes
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.processes import find_marked
from perilune.files import read_json_lines
from perilune.models.config.decoder_config import PRESETS
from perilune.models.memory import get_model_card
from perilune.recipe.load import load_recipe

pytestmark = pytest.mark.slow

STEPS, PROMPTS, SAMPLES = 12, 4, 4
RECIPE = {
    "name": "small",
    "seed": 3,
    "model": {"preset": "tiny"},
    "environment": {**DIGITS},
    "resources": {"device": "cpu", "threads": 1},
    "stages": [
        {"name": "traces", "task": "collect", "teacher": "gold", "traces": 60},
        {"name": "base", "task": "evaluate", **EVALUATE},
        {"name": "sft", "task": "sft", **SFT, "steps": 12, "keep": {"optimizer": True}},
        {
            "name": "rl", "task": "rl", **RL, "checkpoint": "sft", "steps": STEPS, "save_every": 2,
            "kl": 0.01, "restore_optimizer": True,
        },
        {"name": "after", "task": "evaluate", **EVALUATE, "checkpoint": "rl"},
    ],
}  # fmt: skip


@dataclass
class Story:
    """The results: attempt directory and frozen bundle of each stage, and the resume events."""

    attempts: dict[str, Path]
    bundles: dict[str, Path]
    resumed: list[StageResumed]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the recipe to its end, with one kill of the task process of stage rl after its first step."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    recipe = load_recipe(folder / "small.yaml")
    control = Control(Home.open(folder / "home"), RetryPolicy(base=0.01))
    runs: dict[str, str] = {}
    resumed = []
    killed = 0
    with closing(control.store), pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "LINK_BYTES", 1000)  # bytes; this model is small
        for event in advance(control, open_experiment(control, recipe), plan_stages(recipe), poll=0.02):
            assert not isinstance(event, StageFailed), event
            if isinstance(event, StageProgress) and event.stage == "rl" and not killed:
                killed = kill_task(control.directory(control.run(event.run_id)))
            if isinstance(event, StageResumed):
                resumed.append(event)
            if isinstance(event, StageFinished):
                runs[event.stage] = event.run_id
        attempts = {name: control.directory(control.run(run)) for name, run in runs.items()}
        yield Story(attempts, {name: control.home.bundle(run) for name, run in runs.items()}, resumed)


def kill_task(attempt: Path) -> int:
    """SIGKILL the task's process, as the kernel does when memory runs out. The worker survives.

    Returns:
        the number of killed processes.
    """
    claim = read_claim(attempt / "runtime")
    assert claim is not None
    killed = 0
    for process in find_marked(CLAIM_VARIABLE, claim.nonce):
        try:
            if "task_process" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                killed += 1
        except psutil.NoSuchProcess:  # the task had ended
            continue
    return killed


def test_large_stage_inputs_are_shared_and_not_copied(story: Story) -> None:
    name = "model.safetensors"
    left = story.attempts["sft"] / "artifacts" / "checkpoints" / "final" / name
    for folder in (story.bundles["rl"], story.attempts["rl"]):
        assert left.samefile(folder / "inputs" / "checkpoint" / name)
    assert left.stat().st_mode & 0o222 == 0


def test_every_stage_writes_its_output(story: Story) -> None:
    assert list(story.attempts) == ["traces", "base", "sft", "rl", "after"]
    kinds = {name: summary(attempt)["kind"] for name, attempt in story.attempts.items()}
    assert kinds == {
        "traces": "dataset", "base": "evaluation", "sft": "training", "rl": "training", "after": "evaluation",
    }  # fmt: skip
    for name in ("sft", "rl"):
        final = story.attempts[name] / "artifacts" / "checkpoints" / "final"
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in final.iterdir()
        }
        assert [path.name for path in final.parent.iterdir()] == ["final"]
        assert (final / "optimizer").exists() == (name == "sft"), "only where `keep` says so"
    assert "second moments restored" in (story.attempts["rl"] / "artifacts" / "task.log").read_text()


def test_killed_rl_stage_resumes_exactly(story: Story, tmp_path: Path) -> None:
    assert len(story.resumed) == 1
    again = tmp_path / "again"
    copy_for_attempt(story.bundles["rl"], again)
    assert compare_artifacts(story.attempts["rl"], run_in(again)) == []


def test_rl_metrics(story: Story) -> None:
    lines = metrics(story.attempts["rl"])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    promised = {
        "step", "reward", "pass_rate", "reward_std", "dead_groups", "groups", "failures", "length",
        "truncated", "entropy", "kl_reference", "kl_behaviour", "clip_fraction", "logprob_gap_max",
        "logprob_gap_mean", "staleness", "grad_norm", "lr", "tokens", "loss",
    }  # fmt: skip
    for line in lines:
        assert promised <= line.keys()
        assert line["logprob_gap_max"] <= 1e-6
        assert line["staleness"] == 0
        assert line["groups"] == PROMPTS
        assert line["failures"] == 0
        strategies = [key for key in line if key.startswith("strategy/")]
        assert sum(line[key] for key in strategies) == pytest.approx(1.0)
        assert all(key.replace("strategy", "accuracy") in line for key in strategies)
    assert lines[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)  # the policy has not moved yet
    assert lines[-1]["kl_reference"] > 1e-6
    last = read_episodes(story.attempts["rl"] / "artifacts" / "episodes" / f"step-{STEPS:06d}.parquet")
    ratios = [e.logprobs - e.reference_logprobs for e in last if e.reference_logprobs is not None]
    ratio = np.concatenate(ratios).astype(np.float64)
    assert np.mean(np.exp(-ratio) - 1 + ratio) == pytest.approx(lines[-1]["kl_reference"], rel=1e-3)
    assert lines[0]["entropy"] > 0
    assert [line["lr"] for line in lines[:3]] == [5e-4, 1e-3, 1e-3]


def test_sft_metrics(story: Story) -> None:
    lines = metrics(story.attempts["sft"])
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all({"loss", "lr", "grad_norm", "tokens"} <= line.keys() for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    report = summary(story.attempts["sft"])
    assert report["tokens"] == sum(line["tokens"] for line in lines)
    assert report["last"]["loss"] < report["first"]["loss"]


def test_timings_are_stored_apart_from_metrics(story: Story) -> None:
    rows = list(read_json_lines(story.attempts["rl"] / "artifacts" / "timings.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert {"sampling", "scoring", "learning", "other", "processor", "tokens_per_second"} <= row.keys()
        assert min(row.values()) >= 0 and row["processor"] > 0
        assert row["prefix_hits"] <= 1


def test_rl_summary(story: Story) -> None:
    report = summary(story.attempts["rl"])
    assert report["algorithm"] == "grpo"
    assert report["steps"] == STEPS
    assert report["parameters"] == get_model_card(PRESETS["tiny"]).parameters
    assert report["logprob_gap_max"] <= 1e-6
    assert report["seconds"] > 0
    for edge in ("first", "last"):
        assert report[edge].keys() == {"reward", "pass_rate", "length"}
    curve = dict(map(tuple, report["implicit_objective"]))
    assert curve[0.5] > 0  # GRPO: the group of two right and two wrong answers has the largest weight
    assert curve[0.5] == max(curve.values()) or curve[0.5] == pytest.approx(max(curve.values()), rel=0.2)


def test_episodes_are_readable_with_pandas(story: Story) -> None:
    rows = episodes(story.attempts["rl"])
    assert len(rows) == STEPS * PROMPTS * SAMPLES
    assert rows["episode_id"].is_unique
    assert set(rows.groupby("group_id").size()) == {SAMPLES}
    for row in rows.itertuples():
        step = int(row.step.removeprefix("step-"))
        assert set(row.policy_version) == {step - 1}  # the weights after step - 1 updates
        assert len(row.token_ids) == len(row.logprobs) == len(row.loss_mask) == len(row.policy_version) <= 6
        assert row.finish_reason in ("stop", "length")
        assert (row.logprobs <= 0).all()
        assert figures_of(row.reward_terms) == {"digits": row.reward}


def test_advantages_are_stored_and_centred(story: Story) -> None:
    rows = episodes(story.attempts["rl"])
    rows["advantage"] = [figures_of(pairs)["advantage"] for pairs in rows["metrics"]]
    for _, group in rows.groupby("group_id"):
        assert group["advantage"].sum() == pytest.approx(0.0, abs=1e-5)
        if group["reward"].std() > 1e-3:
            best = group["reward"].idxmax()
            assert group["advantage"][best] == group["advantage"].max() > 0
        else:
            assert (group["advantage"] == 0).all()


def test_metrics_can_be_recomputed_from_the_episodes(story: Story) -> None:
    """Read with DuckDB, independently of our reader."""
    pattern = story.attempts["rl"] / "artifacts" / "episodes" / "step-*.parquet"
    computed = duckdb.sql(
        f"""select episode_id.split('/')[1]::int as step, avg(reward) as reward,
        avg(len(token_ids)) as length, avg(truncated::int) as truncated,
        avg((metrics['strategy/digits'] is not null)::int) as digits
        from '{pattern}' group by step order by step"""
    ).df()
    reported = pd.DataFrame(metrics(story.attempts["rl"]))
    for name in ("reward", "length", "truncated"):
        assert computed[name].to_numpy() == pytest.approx(reported[name].to_numpy())
    assert computed["digits"].to_numpy() == pytest.approx(reported["strategy/digits"].fillna(0).to_numpy())


def test_evaluate_summary(story: Story) -> None:
    for name in ("base", "after"):
        report = summary(story.attempts[name])
        assert report["environment"] == "digits"
        assert (report["tasks"], report["samples"], report["failures"]) == (6, 4, 0)
        for measure in ("pass@1", "pass@2", "pass@4", "greedy"):
            assert 0 <= report[measure]["low"] <= report[measure]["mean"] <= report[measure]["high"] <= 1
        assert "pass@8" not in report
        assert report["pass@4"]["mean"] >= report["pass@1"]["mean"]
        assert [row["difficulty"] for row in report["by_difficulty"]] == [0.0, 1.0]
        assert sum(row["tasks"] for row in report["by_difficulty"]) == 6
        assert sum(strategy["share"] for strategy in report["strategies"].values()) == pytest.approx(1.0)
        counted = pd.DataFrame(report["correct_per_task"], columns=["task", "n", "c"])
        assert (counted["c"] / counted["n"]).mean() == pytest.approx(report["pass@1"]["mean"])
        assert report["seconds"] > 0
        assert report["tokens_per_second"] > 0
    assert (
        summary(story.attempts["after"])["correct_per_task"]
        != summary(story.attempts["base"])["correct_per_task"]
    )


def test_evaluate_summary_agrees_with_its_episodes(story: Story) -> None:
    attempt = story.attempts["after"]
    samples, greedy = episodes(attempt), episodes(attempt, "greedy.parquet")
    report = summary(attempt)
    assert list(samples.groupby("task_id", sort=False).size()) == [4] * 6
    assert len(greedy) == 6
    assert report["greedy"]["mean"] == pytest.approx((greedy["reward"] >= 1).mean())
    right = (samples["reward"] >= 1).groupby(samples["task_id"], sort=False).sum()
    assert [[task, 4, c] for task, c in right.items()] == report["correct_per_task"]


def test_held_out_tasks_were_never_trained_on(story: Story) -> None:
    traces = list(read_json_lines(story.attempts["traces"] / "artifacts" / "traces" / "records.jsonl"))
    trained = {row["task_id"] for row in traces} | set(episodes(story.attempts["rl"])["task_id"])
    judged = [
        [task for task, _, _ in summary(story.attempts[name])["correct_per_task"]]
        for name in ("base", "after")
    ]
    assert judged[0] == judged[1]  # paired comparisons need the same tasks for every checkpoint
    assert len(trained) == 60  # RL uses a prefix of the same task order
    assert not trained & set(judged[0])


def test_traces_are_verified_answers(story: Story) -> None:
    folder = story.attempts["traces"] / "artifacts" / "traces"
    rows: list[dict[str, Any]] = list(read_json_lines(folder / "records.jsonl"))
    report = summary(story.attempts["traces"])
    assert (report["rows"], report["rejected"], report["sources"]) == (60, 0, {"gold/direct": 60})
    assert {row["score"] for row in rows} == {1.0}
    assert all(row["messages"][-1]["content"] == row["messages"][0]["content"][-2::-1] for row in rows)


@pytest.mark.parametrize("stage", ["base", "sft", "rl"])
def test_peak_memory_is_close_to_the_plan(story: Story, stage: str) -> None:
    """Measured in the task's own process, because the peak covers the whole process."""
    memory = summary(story.attempts[stage])["memory"]
    # The plan assumes full batches, and these batches hold few traces.
    assert 0.4 < memory["peak_bytes"] / memory["planned_bytes"] < 1.5
