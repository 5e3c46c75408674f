"""Report sections of training stages: warnings, self-play, length dynamics, calibration, forgetting."""

import json
from pathlib import Path

from make_experiment import AFTER_RL, AFTER_SFT, SyntheticExperiment

from perilune.ui.collect import collect_report
from perilune.ui.report import render_report


def rewrite(folder: Path, **changes: object) -> None:
    """Change fields of a stage's summary."""
    path = folder / "artifacts" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def experiment_with_rl(tmp_path: Path, **summary: object) -> SyntheticExperiment:
    made = SyntheticExperiment(tmp_path)
    made.evaluate("before", "sft", AFTER_SFT, 20)
    made.rl(steps=4, prompts=2)
    made.evaluate("after", "rl", AFTER_RL, 20)
    (stage,) = [stage for stage in made.view().stages if stage.task == "rl"]
    assert stage.attempt_dir is not None
    rewrite(stage.attempt_dir, **summary)
    return made


def test_curve_description_shows_stop_recommendation_collapse_and_warnings(tmp_path: Path) -> None:
    gold = {"recommended_stop": 3, "at_recommended_stop": 0.41, "best": 0.5, "best_step": 2, "last": 0.1}
    warnings = ["the reward collapsed by step 4."]
    data = collect_report(experiment_with_rl(tmp_path, gold=gold, collapse_step=2, warnings=warnings).view())
    (training,) = [curve for curve in data.training if curve.task == "rl"]
    assert (
        "recommended to stop at step 3: the gold score was 0.410 there, 0.500 at best (step 2)"
        in training.description
    )
    assert "From step 2 on, even the chosen answers" in training.description
    assert "Warning: the reward collapsed by step 4. From" in training.description


def test_curve_description_shows_self_play_champion_and_alarms(tmp_path: Path) -> None:
    alarm = {
        "name": "illegal",
        "kind": "collapse",
        "message": "30% of games ended badly",
        "step": 3,
        "until": 4,
    }
    for alarms, text in (([], "No sign of a collapse"), ([alarm], "30% of games ended badly (from step 3)")):
        made = experiment_with_rl(tmp_path / str(len(alarms)), league={"champion": 2, "alarms": alarms})
        (training,) = [curve for curve in collect_report(made.view()).training if curve.task == "rl"]
        assert "the champion, the policy of step 2." in training.description
        assert text in training.description


def test_report_includes_length_dynamics(tmp_path: Path) -> None:
    row = {
        "difficulty": "3",
        "correct": True,
        "before": {"count": 2, "length": 9.0, "truncated": 0.0},
        "after": None,
    }
    change = {"before": 9.0, "after": 12.0, "behaviour": 2.0, "composition": 1.0, "table": [row]}
    data = collect_report(experiment_with_rl(tmp_path, length_dynamics=change).view())
    assert [(entry.stage, entry.found["behaviour"]) for entry in data.length_dynamics] == [("rl", 2.0)]
    assert '"composition":1.0' in render_report(data).replace(" ", "")


def test_report_includes_calibration(tmp_path: Path) -> None:
    made = experiment_with_rl(
        tmp_path,
        kind="calibration",
        sentences=["what segments earn and play: Spearman -0.23", "do not trust these"],
        by_place=[{"place": 0, "count": 4, "value": 0.25, "played": 0.5, "spearman": None}],
        reliability=[{"count": 4, "value": 0.25, "played": 0.5}],
    )
    data = collect_report(made.view())
    assert [calibration.stage for calibration in data.calibrations] == ["rl"]
    assert "do not trust these" in render_report(data)


def test_report_includes_forgetting(tmp_path: Path) -> None:
    forgetting = {
        "text": {
            "perplexity": {"before": 20.0, "after": 25.0},
            "bits_per_byte": {"before": 1.0, "after": 1.1, "change": {"mean": 0.1, "low": 0.0, "high": 0.2}},
        },
        "warnings": ["the perplexity rose"],
    }
    data = collect_report(experiment_with_rl(tmp_path, forgetting=forgetting).view())
    (entry,) = data.forgetting
    assert (entry.stage, entry.note) == ("rl", "Warning: the perplexity rose.")
    assert entry.rows[0] == ("perplexity of English text", "20.00", "25.00", "+25.0%")
    assert "Warning: the perplexity rose." in data.training[-1].description
    assert "bits per byte of English text" in render_report(data)


def test_report_omits_sections_without_data(tmp_path: Path) -> None:
    data = collect_report(experiment_with_rl(tmp_path).view())
    assert data.length_dynamics == []
    assert data.calibrations == []
    assert data.forgetting == []
    assert "recommended" not in data.training[-1].description


def test_training_is_compared_with_its_starting_checkpoint(tmp_path: Path) -> None:
    """Two arms start from one checkpoint. Each is compared with that checkpoint, not with the other arm."""
    made = SyntheticExperiment(tmp_path)
    made.evaluate("of_sft", "sft", AFTER_SFT, 20)
    made.rl(steps=3, prompts=2)
    made.evaluate("of_other", "other", AFTER_RL, 20)
    made.evaluate("of_rl", "rl", AFTER_RL, 20)
    data = collect_report(made.view())
    assert data.climb is not None
    assert (data.climb.before, data.climb.after) == ("of_sft", "of_rl")
    assert [(pair.before, pair.after) for pair in data.comparisons] == [("of_sft", "of_rl")], (
        "compared with a sibling arm"
    )


def test_report_includes_pass_at_1_of_each_environment(tmp_path: Path) -> None:
    made = experiment_with_rl(tmp_path)
    parts = {
        "sums": {"tasks": 10, "pass@1": {"mean": 0.75, "low": 0.5, "high": 0.9}},
        "silent": {"tasks": 0},  # no answer was scored
    }
    stages = {stage.name: stage.attempt_dir for stage in made.view().stages}
    assert stages["after"] is not None
    rewrite(stages["after"], by_environment=parts)
    data = collect_report(made.view())
    assert [evaluation.by_environment for evaluation in data.evaluations] == [{}, {"sums": (0.75, 0.5, 0.9)}]
    assert '"sums":[0.75,0.5,0.9]' in render_report(data).replace(" ", "")
