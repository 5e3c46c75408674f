"""The flywheel stage: rounds, early stop, exact resume, and verifier quality."""

from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.data.records import read_records
from perilune.errors import WorkFailedError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json, sha256_file
from perilune.tasks.flywheel.loop import Rounds
from perilune.tasks.stage.training import StepReport

ENDS = {**DIGITS, "factory": "task_environments:Ends"}
NEVER = {**DIGITS, "equal": 0.0}
UNJUDGED = {**DIGITS, "equal": 1.0, "episodes": {"max_failures": 1.0}}
LABELLED = {**DIGITS, "factory": "task_environments:HalfRight"}
WEIGHTS = "artifacts/checkpoints/final/model.safetensors"


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("wheel") / "b", "flywheel", environment=ENDS)


def test_each_round_learns_new_right_answers_and_raises_pass_rate(turned: Path) -> None:
    lines, report = metrics(turned), summary(turned)
    assert [line["step"] for line in lines] == [0, 1, 2] and report["rounds"] == 2
    assert lines[-1]["pass_rate"] > lines[0]["pass_rate"]
    assert all(line["pass_rate_low"] <= line["pass_rate"] <= line["pass_rate_high"] for line in lines)
    assert report["gain"]["mean"] > 1 and report["pass_rates"][0]["mean"] == lines[0]["pass_rate"]
    for number in (1, 2):
        records = read_records(turned / f"artifacts/traces/round-{number:03d}.jsonl")
        assert len(records) == lines[number]["rows"]
        assert len({record.task_id for record in records}) == len(records)
        assert all(record.score >= 1 for record in records)
    first, second = (
        {record.task_id for record in read_records(turned / f"artifacts/traces/round-00{number}.jsonl")}
        for number in (1, 2)
    )
    assert not first & second


@pytest.mark.thorough
def test_flywheel_killed_between_rounds_resumes_exactly(
    turned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("flywheel", environment=ENDS)
    broken = make_bundle(tmp_path / "one", job)
    evaluate = Rounds.evaluate

    def dies(self: Rounds, number: int, *rest: Any) -> StepReport:
        if number == 2:
            raise KeyboardInterrupt
        return evaluate(self, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rounds, "evaluate", dies)
        run_in(broken)
    again = make_bundle(tmp_path / "two", job)
    restore_outputs(broken / "artifacts", again / "artifacts")
    run_in(again)
    assert (again / "artifacts/metrics.jsonl").read_bytes() == (
        turned / "artifacts/metrics.jsonl"
    ).read_bytes()
    assert sha256_file(again / WEIGHTS) == sha256_file(turned / WEIGHTS)


def test_flywheel_stops_when_a_round_shows_no_gain(tmp_path: Path) -> None:
    bundle = run_task(tmp_path / "b", "flywheel", environment=ENDS, lr=1e-7, steps=5)
    report = summary(bundle)
    assert report["rounds"] < 5 and report["stopped"] == "a round may have gained nothing"
    assert report["steps"] == report["rounds"]
    assert metrics(bundle)[-1]["gain_low"] <= 1
    assert (bundle / WEIGHTS).exists()


def test_summary_covers_all_rounds_although_an_earlier_one_is_best(turned: Path, tmp_path: Path) -> None:
    kept = run_task(tmp_path / "b", "flywheel", environment=ENDS, keep={"best": "tokens_per_row"})
    report, expected = summary(kept), summary(turned)
    assert report["best"]["step"] == 1
    assert (report["rounds"], report["gain"]) == (expected["rounds"], expected["gain"])


def test_flywheel_without_right_answers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkFailedError, match="none of 96 answers passed"):
        run_task(tmp_path / "b", "flywheel", environment=NEVER)


def test_answers_without_a_verdict_are_not_wrong(tmp_path: Path) -> None:
    """The pass rate leaves out the tasks of which no answer was scored, as in an evaluate stage."""
    failing = "02468ace"
    bundle = run_task(
        tmp_path / "b", "flywheel", environment={**UNJUDGED, "refuses": failing}, steps=1,
        keep={"optimizer": True},
    )  # fmt: skip
    state = read_json(bundle / "artifacts/checkpoints/final/optimizer/state.json")
    before, after = state["memory"]["rates"]
    assert 0 < len(before) < 48 and before.keys() == after.keys()
    assert not {task[0] for task in before} & {*failing}
    assert metrics(bundle)[0]["pass_rate"] == pytest.approx(sum(before.values()) / len(before))


def test_verifier_is_measured_against_independent_labels(tmp_path: Path) -> None:
    lines = metrics(run_task(tmp_path / "b", "flywheel", environment=LABELLED, tasks=64, steps=1))
    assert (
        lines[1]["verifier_ratio_low"] < 1 < lines[1]["verifier_ratio_high"]
    )  # the labels are independent of the verifier
