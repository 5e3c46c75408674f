"""Time and memory estimates of `perilune run --plan`, and their calibration."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perilune.cli.train.plan import describe_time, print_estimate
from perilune.control.runs.experiments import Control
from perilune.control.runs.templates import Template
from perilune.data.sources import Row
from perilune.environments import Score, Transcript, make_environment
from perilune.models.checkpoints.loading import new_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.plan import calibration as calibration_module
from perilune.plan.calibration import (
    Calibration,
    Overhead,
    Speed,
    _fit_line,
    load_calibration,
    save_calibrations,
)
from perilune.plan.estimate import (
    Estimate,
    compare_with_estimate,
    estimate,
    load_estimate,
    save_estimate,
    sum_estimates,
)
from perilune.plan.lengths import ExpectedLengths, _use_last_run
from perilune.plan.trial import Lengths, child_processor_seconds, lengths_of_rows
from perilune.plan.work import count_work
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import Recipe, build_job

RECIPE = """name: pens
model: {preset: tiny}
environment: {id: jsonl, path: pens.jsonl, match: number}
resources: {device: cpu, threads: 1}
stages:
  - {name: traces, task: collect, teacher: gold, traces: 8}
  - {name: sft, task: sft, data: traces, steps: 10, batch_size: 4}
  - {name: untrained, task: evaluate, checkpoint: model, tasks: 4, samples: 2, max_tokens: 10}
  - name: rl
    task: rl
    checkpoint: sft
    steps: 5
    prompts: 4
    samples: 4
    max_tokens: 10
    eval: {tasks: 4}
  - {name: after, task: evaluate, checkpoint: rl, tasks: 4, samples: 2, max_tokens: 10}
"""
OWN = """name: own
model: {preset: tiny}
resources: {device: cpu, threads: 1}
stages:
  - {name: sft, task: sft, data: rows.jsonl, steps: 10, batch_size: 2}
  - {name: dpo, task: preference, checkpoint: sft, data: pairs.jsonl, steps: 10, batch_size: 2}
"""
RENTED = {"name": "rented", "provider": "p", "kind": "k", "lease": {"max_lifetime": 60, "max_cost": 1}}
LENGTHS = Lengths(prompt=8.0, fed=5.0, sampled=3.0, longest=4.0, turns=2.0)


def calibration(**seconds: float) -> Calibration:
    """A calibration in which the named parts take these seconds and all others take none."""
    kinds = {"decode": "sampled", "update": "learned", "reinforce": "reinforced"}
    pairs = {kind: tuple(seconds.get(name, 1e-12) for name in (kind, token)) for kind, token in kinds.items()}
    stages = dict.fromkeys(("collect", "sft", "rl", "evaluate"), seconds.get("start", 0.0))
    overhead = Overhead(stages, seconds.get("step", 0.0), seconds.get("turn", 0.0), {"sft": 300 << 20}, 9.0)
    speeds = tuple(Speed(size, **pairs) for size in (1_000, 1_000_000))
    return Calibration("1", speeds, dict.fromkeys(kinds, 0.5), overhead, 0.0)


def load_pens_recipe(folder: Path) -> Recipe:
    rows = (f'{{"prompt": "{number}+1=", "answer": {number + 1}}}\n' for number in range(60))
    (folder / "pens.jsonl").write_text("".join(rows))
    (folder / "pens.yaml").write_text(RECIPE)
    return load_recipe(folder / "pens.yaml")


def test_work_of_counts_tokens_turns_and_passes(tmp_path: Path) -> None:
    recipe = load_pens_recipe(tmp_path)
    work = count_work(build_job(recipe, recipe.stage("rl")), LENGTHS, live=0.5)
    assert work is not None
    rollouts, judged = 5 * 16, 2 * 16  # 5 steps, and evaluations before and after
    assert work["sampled"] == (rollouts + judged) * 3
    assert work["turn"] == (rollouts + judged) * 2
    assert work["episode"] == rollouts + judged
    assert work["decode"] == (5 + 2) * 4  # episodes are decoded in one batch
    assert work["reinforced"] == 0.5 * (5 * 4 * 8 + rollouts * 5)
    assert work["forward"] == (5 + 2) * 4 * 8 + (rollouts + judged) * (2 + 16)  # prompts, observations

    sft = count_work(build_job(recipe, recipe.stage("sft")), LENGTHS, rows=8)
    assert sft == {"update": 10, "learned": 10 * 4 * 13, "row": 8, "forward": 0}


def test_line_fits_two_sizes() -> None:
    assert _fit_line((10, 30), lambda size: 2.0 + 0.5 * size) == pytest.approx((2.0, 0.5))
    constant, slope = _fit_line((10, 30), lambda size: 5.0 - 0.1 * size)  # noise
    assert 0 < slope < 1e-6 and constant == pytest.approx(4.0)


def test_calibration_interpolates_sizes_by_power_law() -> None:
    speeds = tuple(Speed(size, (1.0, size), (2.0, 2.0), (1.0, 1.0)) for size in (100, 10_000))
    fitted = Calibration("1", speeds, {"update": 0.5}, Overhead({}, 0.0, 0.0, {}, 0.0), 0.0)
    assert fitted.seconds("decode", 1_000) == pytest.approx((1.0, 1_000.0))
    assert fitted.seconds("decode", 1_000_000) == pytest.approx((1.0, 1_000_000.0))
    assert fitted.seconds("update", 12_345) == pytest.approx((2.0, 2.0))
    assert fitted.seconds("update", 12_345, "bfloat16") == pytest.approx((1.0, 1.0))


def test_estimate_has_a_range_when_lengths_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("perilune.plan.trial.processor_seconds", lambda: 0.0)  # the trial takes no time
    control, recipe = Control(), load_pens_recipe(tmp_path)
    assert estimate(control, recipe, {}) == {}
    saved = calibration(sampled=1.0, start=100.0)
    save_calibrations(control.home.root, [saved])
    assert load_calibration(control.home.root, "1") == saved
    assert load_calibration(control.home.root, "cuda") is None

    estimates = estimate(control, recipe, {})
    assert estimates.keys() == {"traces", "sft", "untrained", "rl", "after"}
    assert 100.0 <= estimates["traces"].seconds < 101.0
    untrained = estimates["untrained"]
    assert untrained.at_most and untrained.high == pytest.approx(100.0 + 12 * 10, abs=1.0)
    assert "at most 3:40" in str(untrained)
    # The teacher's answers have 2 or 3 tokens, including the end token.
    rl = estimates["rl"]
    assert 100.0 + 112 * 2 < rl.low < rl.seconds < rl.high < 100.0 + 112 * 3.01
    assert estimates["after"].low == pytest.approx(100.0 + 12 * (rl.low - 100) / 112, rel=0.02)
    memory = estimates["sft"].memory
    assert memory is not None and 300 << 20 < memory < 340 << 20
    total = sum_estimates(estimates)
    assert total.seconds == pytest.approx(sum(stage.seconds for stage in estimates.values()))


def test_estimate_uses_lengths_of_own_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    (tmp_path / "own.yaml").write_text(OWN)
    rows = [{"prompt": "1+1=", "completion": "2" * 9}, {"prompt": "1+2=", "completion": "2" * 29}]
    pairs = [{"prompt": f"{number}=", "chosen": "3" * 9, "rejected": "4" * 19} for number in range(40)]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    control = Control()
    save_calibrations(control.home.root, [calibration(learned=1.0)])
    estimates = estimate(control, load_recipe(tmp_path / "own.yaml"), {})
    assert estimates["sft"].seconds == pytest.approx(10 * 2 * (4 + 20), abs=0.1)
    reference = 40 * (2.75 + 10 + 20) / 3  # a forward pass over all pairs
    assert estimates["dpo"].seconds == pytest.approx(10 * 2 * (2.75 + 10 + 20) + reference, abs=0.1)
    assert estimates["sft"].basis == "rows of rows.jsonl"

    rounded = OWN.replace("batch_size: 2}", "batch_size: 2, precision: bfloat16}", 1)
    (tmp_path / "own.yaml").write_text(rounded)
    narrow = estimate(control, load_recipe(tmp_path / "own.yaml"), {})
    assert narrow["sft"].seconds == pytest.approx(estimates["sft"].seconds / 2, abs=0.1)


def test_lengths_of_rows_count_equal_prompts_once() -> None:
    rows = [Row(str(n), {"prompt": "1+1="[: 3 + n % 2], "completion": "2" * (1 + n)}) for n in range(8)]
    lengths = lengths_of_rows(rows, Tokenizer.characters())
    assert lengths is not None
    assert (lengths.prompt, lengths.distinct, lengths.longest, lengths.fed) == (3.5, 0.25, 9, 5.5)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel has no schedstat")
def test_times_of_child_processes_are_finer_than_ticks() -> None:
    """A tick of the kernel (10 ms) is as long as a hundred episodes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.2)
        spent = child_processor_seconds()
        child.communicate(b"\n")
    assert spent > 0 and abs(spent - round(spent, 2)) > 1e-6


def test_estimate_takes_lengths_from_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build_job(recipe := load_pens_recipe(tmp_path), recipe.stage("rl"))
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    (artifacts / "summary.json").write_text("{}")
    steps = [{"step": number, "length": 6.0, "tokens": 24} for number in (1, 2)]
    lines = [{"step": 0, "eval/heldout/pass@1": 0.5}, *steps]
    (artifacts / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("perilune.plan.lengths.find_finished_run", lambda *_: tmp_path)
    control: Any = SimpleNamespace()
    last = _use_last_run(control, "pens", job, ExpectedLengths(LENGTHS, LENGTHS, (0.5, 1.0)))
    assert (last.low, last.low.sampled, last.low.fed, last.low.longest) == (last.high, 6.0, 8.0, 8.0)
    assert last.live == (0.25, 0.25)  # training used 24 of 4 x 4 x 6 tokens


def test_compared_reports_estimation_errors_of_a_finished_stage(tmp_path: Path) -> None:
    summary = {"memory": {"planned_bytes": 2 << 30, "peak_bytes": 1 << 30}}
    assert compare_with_estimate(None, 120.0, summary) == {"memory": "planned 2.00 GiB, peak 1.00 GiB (-50%)"}
    assert load_estimate(tmp_path) == {}
    save_estimate(tmp_path, {"rl": Estimate(100.0, 90.0, 110.0, 1 << 30, "")})
    assert compare_with_estimate(load_estimate(tmp_path)["rl"], 120.0, summary) == {
        "time": "estimated 100 s, took 120 s (+20%)",
        "memory": "estimated 1.00 GiB, peak 1.00 GiB (+0%)",
    }


def test_print_estimate_names_missing_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    print_estimate(load_pens_recipe(tmp_path), {}, None, sys.stdout)
    assert "unknown: no calibration of this device. Run `perilune doctor`" in capsys.readouterr().out


def test_times_on_other_machines_are_not_estimated(tmp_path: Path) -> None:
    recipe = load_pens_recipe(tmp_path)
    far = Template.model_validate({"placement": {"name": "ssh", "host": "box"}})
    assert "perilune simulate" in describe_time(recipe, {}, far)
    assert "perilune doctor" in describe_time(recipe, {}, Template())


def test_print_estimate_converts_seconds_to_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    recipe, estimates = load_pens_recipe(tmp_path), {"sft": Estimate(1800.0, 900.0, 3600.0, None, "")}
    print_estimate(recipe, estimates, Template(price=2.0), sys.stdout)
    assert "cost     about 1 (0.5 to 2), at 2 per hour" in capsys.readouterr().out
    with pytest.raises(ValueError, match="a provider states its own"):
        Template.model_validate({"price": 1, "placement": RENTED})


def test_calibration_recipe_is_valid_and_its_rewards_differ(tmp_path: Path) -> None:
    """Stage names match the overhead keys, and rewards differ within a group."""
    (tmp_path / "calibration.yaml").write_text(calibration_module.RECIPE)
    (tmp_path / "sums.py").write_text(calibration_module.ENVIRONMENT)
    recipe = load_recipe(tmp_path / "calibration.yaml")
    stages = {stage.name: stage.task for stage in recipe.stages}
    assert stages.pop("many") == "evaluate" and all(name == task for name, task in stages.items())
    answers = [(stage.spec["samples"] + 1) * stage.spec["tasks"] for stage in recipe.stages[-2:]]
    assert tuple(answers) == calibration_module.ANSWER_COUNTS
    environment = make_environment(calibration_module.SECTION)
    task = next(environment.tasks("train", 0))
    scores = [environment.score(task, Transcript(text)) for text in ("1", "a", "b")]
    assert [isinstance(score, Score) and score.reward for score in scores] == [1.0, 6 / 7, 0.0]


def test_calibration_of_the_simulator_has_turns_that_end_and_rewards_that_differ(tmp_path: Path) -> None:
    section = {"id": calibration_module.TURNS, "source": calibration_module.ENVIRONMENT}
    environment = make_environment(section)
    task = next(environment.tasks("train", 0))
    scores = [environment.score(task, Transcript(text, earlier=("0", "0"))) for text in ("a", "b")]
    assert [isinstance(score, Score) and score.reward for score in scores] == [6 / 7, 0.0]


def test_calibration_measures_steps_of_a_real_model() -> None:
    model = new_model("tiny", Tokenizer.characters(), seed=0)
    for measure in (
        calibration_module._decode_seconds,
        calibration_module._update_seconds,
        calibration_module._rl_seconds,
    ):
        small, large = (measure(model, 0.0, time.process_time, size) for size in (192, 1536))
        assert 0 < small < large
