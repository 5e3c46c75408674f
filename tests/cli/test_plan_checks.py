"""What `perilune run --plan` refuses or warns about, and the times that it estimates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perilune.cli.start.calibration import Calibration, Speed, load, save
from perilune.cli.train.estimate import Lengths, _work, compared, estimate, keep_estimate
from perilune.cli.train.plan import derive
from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import Recipe, job_for

RECIPE = """name: pens
model: {{preset: tiny}}
environment: {environment}
rewards: {rewards}
resources: {{device: {device}, threads: 1}}
stages:
  - {{name: traces, task: collect, teacher: {teacher}, traces: 8}}
  - {{name: sft, task: sft, data: traces, steps: 10, batch_size: 4, lr: {lr}}}
  - name: rl
    task: rl
    checkpoint: sft
    steps: 5
    prompts: 4
    samples: 4
    max_tokens: 10
    eval: {{tasks: {evaluated}}}
  - {{name: after, task: evaluate, checkpoint: rl, tasks: {tasks}, samples: 2, max_tokens: 10}}
"""
PENS = "{id: jsonl, path: pens.jsonl, match: number}"


def loaded(tmp_path: Path, **changes: Any) -> Recipe:
    rows = (f'{{"prompt": "{one}+1=", "answer": {one + 1}}}\n' for one in range(60))
    (tmp_path / "pens.jsonl").write_text("".join(rows))
    options = {"environment": PENS, "rewards": "{}", "device": "cpu", "teacher": "gold", "lr": "0.003"}
    (tmp_path / "pens.yaml").write_text(RECIPE.format(**options | {"tasks": 4, "evaluated": 4} | changes))
    return load_recipe(tmp_path / "pens.yaml")


def test_a_recipe_that_fits_has_no_warning(tmp_path: Path) -> None:
    lines = [name for stage in derive(loaded(tmp_path), check=True) for name in stage["derived"]]
    assert not [name for name in lines if "warning" in name]


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"tasks": 500}, "stages.after: tasks", r"jsonl has \d+ held-out tasks, and the stage needs 500"),
        ({"evaluated": 500}, r"stages.rl: eval.tasks \(set heldout\)", r"held-out tasks, and .* needs 500"),
        ({"teacher": "calculator"}, "stages.traces", "calculator"),
        ({"rewards": "{verifier: 1.0, fomat: 0.1}"}, "stages.traces: rewards", "no reward term 'fomat'"),
    ],
)
def test_what_does_not_exist_is_refused(
    tmp_path: Path, changes: dict[str, Any], where: str, message: str
) -> None:
    recipe = loaded(tmp_path, **changes)
    with pytest.raises(RequestError, match=message) as found:
        derive(recipe, check=True)
    assert re.match(where, found.value.where)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.bundle.machine._nvidia_gpus", lambda: iter(()))
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RequestError, match="this machine has none"):
        derive(loaded(tmp_path, device="cuda"))


@pytest.mark.parametrize(
    ("lr", "text"),
    [("1.0", "lr 1 is 333 times the default of 0.003"), ("1.0e-5", "lr 1e-05 is 1/300 of the default")],
)
def test_a_learning_rate_far_from_the_default_is_a_warning(tmp_path: Path, lr: str, text: str) -> None:
    stages = {stage["name"]: stage["derived"] for stage in derive(loaded(tmp_path, lr=lr))}
    assert stages["sft"]["warning"].startswith(text)
    assert "warning" not in stages["rl"]


def test_the_time_is_that_of_the_tokens(tmp_path: Path) -> None:
    """With a second per sampled token, and half of one per trained token, of a model of any size."""
    recipe = loaded(tmp_path)
    speeds = (Speed(1_000, 1.0, 0.5), Speed(1_000_000, 1.0, 0.5))
    assert estimate(recipe, tmp_path) == {}
    save(tmp_path, [Calibration(1, 100.0, speeds, 0.0)])
    kept = load(tmp_path, 1)
    assert kept == Calibration(1, 100.0, speeds, 0.0)
    assert load(tmp_path, 7) is None

    found = estimate(recipe, tmp_path)
    assert found.keys() == {"sft", "rl", "after"}
    work = _work(job_for(recipe, recipe.stage("rl")), Lengths(8.0, 3.0))
    assert work is not None
    # 5 steps of 4 x 4 answers; 2 evaluations of 4 x 4 answers
    assert (work.sampled, work.learned, work.forward) == (
        5 * 16 * 3 + 2 * 16 * 3,
        5 * 4 * 8 + 5 * 16 * 3,
        5 * 4 * 8 + 2 * 4 * 8,
    )
    prompt = found["sft"] - 100.0  # 10 steps of 4 traces, half of a second per token
    assert 40 * 0.5 * 5 <= prompt <= 40 * 0.5 * 40


def test_a_power_law_joins_the_measured_sizes() -> None:
    found = Calibration(1, 0.0, (Speed(100, 1.0, 2.0), Speed(10_000, 10.0, 2.0)), 0.0)
    assert found.per_token("sampling", 1_000) == pytest.approx(10**0.5)
    assert found.per_token("sampling", 1_000_000) == pytest.approx(100.0)
    assert found.per_token("learning", 12_345) == pytest.approx(2.0)


def test_the_error_of_an_estimate_is_told_once_the_stage_has_ended(tmp_path: Path) -> None:
    summary = {"seconds": 120.0, "memory": {"planned_bytes": 2 << 30, "peak_bytes": 1 << 30}}
    assert compared(tmp_path, "rl", summary).keys() == {"memory"}
    keep_estimate(tmp_path, {"rl": 100.0})
    assert compared(tmp_path, "rl", summary) == {
        "time": "estimated 100 s, took 120 s (+20%)",
        "memory": "planned 2.00 GiB, peak 1.00 GiB (-50%)",
    }
    assert compared(tmp_path, "rl", {}) == {}
