"""The results of an experiment, from the summaries of its stages."""

from pathlib import Path

import pytest

from perilune.cli.train.results import next_steps, parent_change, print_results, results_document
from perilune.control.queries.lookup import StageStatus
from perilune.recipe.load import load_recipe

RECIPE = """\
name: climb
seed: 5
model: {preset: tiny}
environment: {id: reasoning_gym, task: gcd, prompt: compact}
stages:
  - {name: traces, task: collect, teacher: arithmetic}
  - {name: base, task: evaluate, checkpoint: model}
  - {name: sft, task: sft, data: traces}
  - {name: after_sft, task: evaluate, checkpoint: sft}
  - {name: rl, task: rl, checkpoint: sft}
  - {name: after_rl, task: evaluate, checkpoint: rl}
"""


def evaluation(passed: list[int]) -> dict:
    """Summary of an evaluation with 8 samples per task; `passed` counts the correct samples of each task."""
    rate = sum(passed) / len(passed) / 8
    return {
        "kind": "evaluation",
        "tasks": len(passed),
        "samples": 8,
        "pass@1": {"mean": rate, "low": rate - 0.1, "high": rate + 0.1},
        "pass@8": {"mean": 0.9, "low": 0.8, "high": 1.0},
        "greedy": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "length": {"mean": 12.25},
        "strategies": {"direct": {"share": 0.75, "accuracy": 0.25}},
        "tokens_per_second": 4321.0,
        "seconds": 3.21,
        "correct_per_task": [[f"t{i}", 8, c] for i, c in enumerate(passed)],
    }


@pytest.fixture
def document(tmp_path: Path) -> dict:
    path = tmp_path / "climb.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path)
    summaries = {
        "traces": {"kind": "dataset", "rows": 100},
        "base": evaluation([0, 0, 0, 0]),
        "sft": {"kind": "training"},
        "after_sft": evaluation([2, 2, 2, 2, 2]),
        "rl": {"kind": "training", "warnings": ["only 0.0% of answers have the form"]},
        "after_rl": evaluation([6, 6, 8, 8, 3])
        | {"correct_per_task": [["t1", 8, 6], ["t0", 8, 6], ["t2", 8, 8], ["t3", 8, 8], ["new", 8, 3]]},
    }
    stages = [
        StageStatus("X1", "climb", stage.name, stage.task, f"RUN-{stage.name}", "succeeded", "reachable",
                    "done", 1, tmp_path / stage.name, "digest", "", "", 0.0, 7.0, None, summaries[stage.name])
        for stage in recipe.stages
    ]  # fmt: skip
    return results_document(recipe, "X1", stages, seconds=12.34567, report=tmp_path / "report.html")


def test_results_list_evaluations_in_stage_order_with_intervals(document: dict) -> None:
    assert [entry["stage"] for entry in document["evaluations"]] == ["base", "after_sft", "after_rl"]
    assert document["evaluations"][1]["pass@1"] == {"mean": 0.25, "low": 0.15, "high": 0.35}
    assert all("correct_per_task" not in entry for entry in document["evaluations"])


def test_change_is_measured_against_the_starting_checkpoint(document: dict) -> None:
    base, after_sft, after_rl = document["evaluations"]
    assert "change" not in base
    assert after_sft["change"]["against"] == "base"
    assert after_sft["change"]["pass@1"]["mean"] == pytest.approx(0.25)
    assert after_rl["change"]["against"] == "after_sft"
    assert after_rl["change"]["tasks"] == 4  # tasks in both evaluations
    assert after_rl["change"]["pass@1"]["mean"] == pytest.approx(28 / 32 - 0.25)
    assert after_rl["change"]["pass@1"]["low"] > 0.4


def test_evaluation_that_states_inherited_settings_is_compared(tmp_path: Path) -> None:
    """The report compares the settings of jobs, which are equal."""
    path = tmp_path / "climb.yaml"
    plain = "{name: after_sft, task: evaluate, checkpoint: sft"
    assert plain in RECIPE
    path.write_text(RECIPE.replace(plain, f"{plain}, environment: {{prompt: compact}}"))
    recipe = load_recipe(path)
    summaries = {stage.name: {} for stage in recipe.stages}
    summaries |= {name: evaluation([2, 2]) for name in ("base", "after_sft", "after_rl")}
    changes = {
        name: parent_change(recipe, recipe.stage(name), summaries) for name in ("after_sft", "after_rl")
    }
    assert changes["after_sft"]["change"]["against"] == "base"
    assert changes["after_rl"]["change"]["against"] == "after_sft"


@pytest.mark.parametrize(
    ("low", "mean", "high", "sentence"),
    [
        (0.011, 0.047, 0.09, "rl gained 4.7 points of pass@1 (1.1 to 9.0) against before"),
        (-0.09, -0.047, -0.011, "rl lost 4.7 points of pass@1 (1.1 to 9.0) against before"),
        (-0.01, 0.02, 0.05, "rl: no clear change of pass@1 (+2.0 points, -1.0 to +5.0) against before"),
    ],
)
def test_change_says_gained_lost_or_no_clear_change(
    document: dict, capsys: pytest.CaptureFixture[str], low: float, mean: float, high: float, sentence: str
) -> None:
    change = {"against": "before", "tasks": 9, "pass@1": {"mean": mean, "low": low, "high": high}}
    last = document["evaluations"][-1]
    print_results(document | {"evaluations": [last | {"change": change}]})
    out = capsys.readouterr().out
    assert f"{sentence} on the same 9 tasks" in out
    assert ("on which less than 3.0 points would not show" in out) == (low < 0 < high)


def test_results_report_loss_of_pass_at_8(document: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert document["evaluations"][1]["change"]["pass@8"]["mean"] == 1.0  # from no task to every task
    print_results(document)
    assert "points of pass@8" not in capsys.readouterr().out
    fell = {"pass@8": {"mean": -0.062, "low": -0.1, "high": -0.02}}
    last = document["evaluations"][-1]
    print_results(document | {"evaluations": [last | {"change": last["change"] | fell}]})
    out = " ".join(capsys.readouterr().out.split())
    sentence = "rl lost 6.2 points of pass@8 (2.0 to 10.0) against after_sft on the same 4 tasks"
    assert f"{sentence}: it solves fewer of them" in out


def test_results_document_lists_stages_bundles_and_report(document: dict, tmp_path: Path) -> None:
    assert document["experiment_id"] == "X1"
    assert (document["recipe"], document["seed"], document["seconds"]) == ("climb", 5, 12.346)
    assert document["report"] == str(tmp_path / "report.html")
    assert document["bundles"]["rl"] == str(tmp_path / "rl")
    assert document["stages"][4] == {
        "name": "rl", "task": "rl", "run": "RUN-rl", "state": "succeeded", "attempts": 1, "seconds": 7.0,
        "estimated": None, "memory": None, "compared": {},
        "warnings": ["only 0.0% of answers have the form"],
    }  # fmt: skip
    assert document["stages"][0]["warnings"] == []


def test_results_print_warnings_and_share_of_well_formed_answers(
    document: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = document["evaluations"]
    print_results(document | {"evaluations": [first | {"format": 0.125}, *others]})
    out = capsys.readouterr().out
    assert "warning: rl: only 0.0% of answers have the form" in " ".join(out.split())
    assert "in the expected form" in out and "12.5%" in out


def test_results_print_calibration_sentences(document: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert document["calibrations"] == []
    lines = ["what segments earn and play: Spearman -0.23 (-0.31 to -0.14)", "do not trust these [rewards]"]
    print_results(document | {"calibrations": [{"stage": "trust", "sentences": lines}]})
    out = capsys.readouterr().out
    assert f"trust: {lines[0]}" in out
    assert f"trust: {lines[1]}" in out


def test_results_tables_match_the_document(document: dict, capsys: pytest.CaptureFixture[str]) -> None:
    print_results(document)
    out = capsys.readouterr().out
    rows = {line.strip().split("  ")[0]: line for line in out.splitlines() if line.strip()}
    assert "25.0% (15.0 to 35.0)" in rows["pass@1"]
    assert rows["pass@8"].count("90.0% (80.0 to 100.0)") == 3
    assert "12.2" in rows["mean length"]
    assert "4,321" in rows["tokens/s"]
    assert "75.0% (25.0% right)" in rows["answers: direct"]
    assert "rl gained 62.5 points" in out
    assert document["report"] in out
    steps = next_steps(document, "perilune quickstart")
    assert "perilune quickstart --seed 6" in steps
    assert "perilune reproduce RUN-rl" in steps
    assert "sweep" not in steps
    steps = next_steps(document, "perilune run mine.yaml --set rl.lr=1e-4")
    assert "repeat it over three seeds perilune sweep mine.yaml --set rl.lr=1e-4 --seeds 3" in steps
    assert "sweep" not in next_steps(document, "perilune run mine.yaml --set 'rl.tags=[a, b]'")
    steps = next_steps(document, "perilune run mine.yaml --set rl.lr=1e-4 --set seed=5")
    assert "perilune run mine.yaml --set rl.lr=1e-4 --seed 6\n" in steps
    assert "perilune sweep mine.yaml --set rl.lr=1e-4 --seeds 3\n" in steps  # a sweep refuses --set seed=5


def test_results_print_losses_of_unevaluated_training(
    document: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {"stage": "sft", "first": {"loss": 9.0}, "last": {"loss": 8.0}}
    change = {"first": {"loss": 0.69, "accuracy": 0.5}, "last": {"loss": 0.25, "accuracy": 1.0}}
    validation = {"validation_loss": 0.3, "validation_accuracy": 0.875}
    pairs = {"stage": "dpo", **change, "validation": validation, "validation_pairs": 21}
    interval = {"accuracy": {"mean": 0.75, "low": 0.5, "high": 1.0}}
    scores = {"stage": "scores", **change, "validation": interval, "validation_pairs": 8}
    print_results(document | {"training": [seen, pairs, scores, {"stage": "rl", "first": {}, "last": {}}]})
    out = " ".join(capsys.readouterr().out.split())
    text = "loss 0.69 to 0.25, accuracy 50.0% to 100.0% (first to last steps)"
    assert f"dpo: {text}; on 21 held-out pairs loss 0.3, accuracy 87.5%" in out
    assert f"scores: {text}; on 8 held-out pairs accuracy 75.0% (50.0% to 100.0%)" in out
    assert "sft: loss" not in out  # after_sft evaluates it
    assert "rl: (first" not in out


def test_next_steps_suggest_chat_with_the_last_checkpoint(document: dict, tmp_path: Path) -> None:
    from perilune.models.text.tokenizer import Tokenizer

    assert "perilune chat" not in next_steps(document, "perilune run climb.yaml")
    Tokenizer.characters().save(tmp_path / "sft" / "artifacts" / "checkpoints" / "final")
    steps = next_steps(document, "perilune run climb.yaml")
    assert "perilune chat climb/sft --plain" in steps
    assert "read the model's answers" in steps
    supervised = [stage for stage in document["stages"] if stage["task"] == "sft"]
    assert "see the curves" in next_steps(
        document | {"evaluations": [], "stages": supervised}, "perilune run"
    )


def test_results_document_of_unfinished_experiment(tmp_path: Path) -> None:
    path = tmp_path / "climb.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path)
    stages = [
        StageStatus("X1", "climb", stage.name, stage.task, "", "waiting", "unknown", "none", 0,
                    None, "", "", "", None, None, None, {})
        for stage in recipe.stages
    ]  # fmt: skip
    document = results_document(recipe, "X1", stages, seconds=1.0, report=None)
    assert document["evaluations"] == []
    assert document["bundles"] == {}
