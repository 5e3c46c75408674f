"""Failing verifiers: recorded, excluded from the group, never scored as zero, and a stop if all fail."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, episodes, figures_of, metrics, run_task, summary
from task_environments import Digits

from perilune.errors import WorkFailedError
from perilune.files import read_json_lines

HALF = "02468ace"  # first hex digits of half of the task ids
TOLERANT = {**DIGITS, "episodes": {"max_failures": 1.0, "seconds": 0.4}}


def test_rl_records_verifier_failures_of_some_tasks(tmp_path: Path) -> None:
    environment = {**TOLERANT, "raises": HALF, "refuses": "1"}
    bundle = run_task(tmp_path / "rl", "rl", environment=environment, prompts=8)
    rows = episodes(bundle)
    failing = rows["task_id"].str[0].isin([*HALF, "1"])
    assert 0 < failing.sum() < len(rows)
    assert (rows["failure"] != "").equals(failing)
    assert rows["reward"].isna().equals(failing)
    assert set(rows["failure"][rows["task_id"].str[0].isin(list(HALF))]) == {
        "verifier: scorer raised ValueError: no idea what this is"
    }
    assert set(rows["failure"][rows["task_id"].str[0] == "1"]) <= {"environment: nobody can judge this"}
    for line, (_, step) in zip(metrics(bundle), rows.groupby("step"), strict=True):
        assert line["failures"] == (step["failure"] != "").sum()
        assert line["reward"] == pytest.approx(step["reward"].mean())  # over judged episodes
        assert line["dead_groups"] >= step[step["failure"] != ""]["group_id"].nunique() / line["groups"]
    assert summary(bundle)["failures"] == failing.sum()
    assert not any("advantage" in figures_of(pairs) for pairs in rows["metrics"][failing])


def test_failed_episode_is_excluded_from_its_group(tmp_path: Path) -> None:
    """The remaining episodes are compared with each other, and the failed episode has no advantage."""
    environment = {**TOLERANT, "raises_on": list("abcdefghijklmnopqrstuvwxyz")}
    bundle = run_task(tmp_path / "rl", "rl", environment=environment, steps=2, samples=8)
    rows = episodes(bundle)
    rows["advantage"] = [figures_of(pairs).get("advantage") for pairs in rows["metrics"]]
    failed = rows["failure"] != ""
    mixed = rows[
        failed.groupby(rows["group_id"]).transform("any") & ~failed.groupby(rows["group_id"]).transform("all")
    ]
    assert len(mixed)
    assert rows["advantage"].isna().equals(failed)
    for _, group in mixed.groupby("group_id"):
        judged = group[group["failure"] == ""]
        assert judged["advantage"].sum() == pytest.approx(0.0, abs=1e-5)
        if judged["reward"].std() > 1e-3:
            expected = (judged["reward"] - judged["reward"].mean()) / (judged["reward"].std() + 1e-4)
            assert judged["advantage"].to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-4)
    learned = rows[rows["advantage"].fillna(0) != 0]
    lengths = learned["token_ids"].map(len).groupby(learned["step"]).sum()
    assert [line["tokens"] for line in metrics(bundle)] == list(lengths)


def test_evaluate_excludes_hangs_and_refusals(tmp_path: Path) -> None:
    asked = [task.task_id[0] for task in islice(Digits({}).tasks("heldout", 1), 12)]
    rare = min(sorted(set(asked)), key=asked.count)
    others = "89abcdef".replace(rare, "")
    environment = {**TOLERANT, "hangs": rare, "refuses": others}
    bundle = run_task(tmp_path / "evaluate", "evaluate", environment=environment, tasks=12, samples=1)
    rows, report = episodes(bundle), summary(bundle)
    hung, refused = rows["task_id"].str[0] == rare, rows["task_id"].str[0].isin(list(others))
    assert 0 < hung.sum() < (hung | refused).sum() < 12
    assert set(rows["failure"][hung]) == {"verifier: no answer within 0.4 s"}
    assert report["tasks_without_verdict"] == (hung | refused).sum()
    assert report["tasks"] == 12 - report["tasks_without_verdict"]
    assert report["failures"] == 2 * report["tasks_without_verdict"]  # a sample and a greedy answer per task
    judged = {task for task, _, _ in report["correct_per_task"]}
    assert judged == set(rows["task_id"][~(hung | refused)])


def test_rejected_traces_are_stored_with_the_reason(tmp_path: Path) -> None:
    bundle = run_task(tmp_path / "collect", "collect", environment={**DIGITS, "raises": HALF})
    report = summary(bundle)
    reason = "verifier: scorer raised ValueError: no idea what this is"
    assert report["rows"] == 40
    assert report["reasons"] == {reason: report["rejected"]}
    rejected = list(read_json_lines(bundle / "artifacts" / "traces" / "rejected.jsonl"))
    assert len(rejected) == report["rejected"] > 0
    assert {row["reason"] for row in rejected} == {reason}
    kept = {row["task_id"] for row in read_json_lines(bundle / "artifacts" / "traces" / "records.jsonl")}
    assert not kept & {row["task_id"] for row in rejected}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("rl", "step 1: the verifier scored no episode; the first failure: verifier: .*ValueError: no idea"),
        ("evaluate", "digits: the verifier scored no answer; the first failure: .*ValueError: no idea"),
        ("collect", r"0 of 5 traces passed the verifier \(21 x verifier: scorer raised ValueError: no idea"),
    ],
)
def test_stage_stops_when_every_verdict_fails(task: str, said: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"traces": 5} if task == "collect" else {}
    with pytest.raises(WorkFailedError, match=said) as caught:
        run_task(tmp_path / task, task, environment={**DIGITS, "raises": "0123456789abcdef"}, **options)
    if task == "collect":
        assert caught.value.remedy.startswith("correct the verifier")
        rejected = tmp_path / task / "artifacts" / "traces" / "rejected.jsonl"
        assert len(list(read_json_lines(rejected))) == 21


@pytest.mark.parametrize(
    ("episodes", "said"),
    [
        ({}, r"1[7-9]|2\d of 32 episodes failed, and 50% are allowed; \d+ x verifier: scorer raised"),
        ({"on_failure": "stop", "max_failures": 1.0}, r"\d+ of 32 episodes failed, and none are allowed"),
    ],
)
def test_rl_stops_by_the_failure_policy_of_the_recipe(
    episodes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    environment = {**DIGITS, "raises": HALF + "13", "episodes": episodes}
    with pytest.raises(WorkFailedError, match=said):
        run_task(tmp_path / "rl", "rl", environment=environment, prompts=8)
