"""Comparisons of experiments: differing settings, paired differences, notes, curves and the HTML page."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from drill_cases import Command

from perilune.control.queries.comparison import (
    ABSENT_SETTING,
    Arm,
    _keep_differing_settings,
    compare_experiments,
    describe_difference,
    lower_is_better,
)
from perilune.control.record.store import Attempt, Run, Stage
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, register_experiment
from perilune.errors import RequestError
from perilune.files import write_json
from perilune.metrics.across_seeds import compare_over_seeds
from perilune.ui.experiment_comparison import build_comparison, comparison_charts

RATES = {
    1e-5: {0: [2, 4, 0, 2], 1: [2, 2, 2, 2], 2: [4, 0, 0, 4]},
    3e-5: {0: [4, 6, 2, 4], 1: [4, 6, 4, 4], 2: [6, 4, 2, 6]},
}


def experiment(
    control: Control, lr: float, seed: int, passed: list[int] | None, tasks: str = "{seed}"
) -> str:
    """Register a finished experiment: RL training with a curve, and an evaluation with 8 samples a task."""
    stages = [("rl", "rl"), ("after", "evaluate")]
    document = {
        "name": "words", "seed": seed, "model": {"preset": "tiny"},
        "stages": [
            {"name": "rl", "task": "rl", "environment": {}, "spec": {"lr": lr, "steps": 4}},
            {"name": "after", "task": "evaluate", "environment": {}, "spec": {"tasks": 4}},
        ],
    }  # fmt: skip
    experiment = register_experiment(control, "words", document, stages, [f"rl.lr={lr}", f"seed={seed}"])
    for name, _ in stages if passed is not None else ():
        run_id = f"{name}-{lr}-{seed}".upper()
        with control.store.transaction() as session:
            run = Run(
                id=run_id, submit_key=run_id, experiment_id=experiment, stage=name, task=name,
                bundle_digest=run_id, current_epoch=1, created=0.0, ended=1.0,
            )  # fmt: skip
            session.add(run)
            session.flush()
            run.state = RunState.ACTIVE.value
            run.state = RunState.SUCCEEDED.value
            where = {"placement": "local", "launcher": "process"}
            session.add(Attempt(run_id=run_id, number=1, created=0.0, ended=1.0, **where))
            stage = session.query(Stage).filter_by(experiment_id=experiment, name=name).one()
            stage.run_id = run_id
        write_json(
            control.home.attempt(run_id, 1) / "artifacts" / "summary.json",
            _summary(name, passed or [], tasks.format(seed=seed)),
        )
        lines = [{"step": step, "reward": lr * step * (seed + 1)} for step in range(1, 5)]
        for line in lines[1::2]:
            line |= {"eval/heldout/pass@1": 1e4 * lr, "eval/heldout/pass@1/low": 0.0}
        if name == "rl":
            path = control.home.attempt(run_id, 1) / "artifacts" / "metrics.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return experiment


def _summary(stage: str, passed: list[int], pool: str) -> dict:
    if stage == "rl":
        return {"kind": "training", "last": {"reward": 0.5}}
    mean = fmean(passed) / 8
    rows = [[f"{pool}/{number}", 8, right] for number, right in enumerate(passed)]
    return {
        "kind": "evaluation",
        "pass@1": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
        "correct_per_task": rows,
    }


def all_of(control: Control, seeds: tuple[int, ...], tasks: str = "{seed}") -> list[str]:
    return [experiment(control, lr, seed, RATES[lr][seed], tasks) for lr in RATES for seed in seeds]


def test_seeds_of_one_setting_form_one_arm_with_paired_differences(control: Control) -> None:
    result = compare_experiments(control, all_of(control, (0, 1, 2)))
    assert result.metric == "after.pass@1" and result.keys == ("rl.lr",) and result.best == 1
    low, high = result.arms
    assert (low.label, high.label) == ("rl.lr=1e-05", "rl.lr=3e-05")
    means = {lr: [fmean(RATES[lr][seed]) / 8 for seed in range(3)] for lr in RATES}
    assert low.figure is not None and low.figure.mean == pytest.approx(fmean(means[1e-5]))
    differences = [b - a for a, b in zip(means[1e-5], means[3e-5], strict=True)]
    assert low.difference is None and high.difference is not None
    assert high.difference.seeds == compare_over_seeds({"1": differences})["1"]
    assert high.difference.task_count == 12  # four of each seed
    assert high.difference.tasks is not None
    assert high.difference.tasks.mean == pytest.approx(fmean(differences))
    assert "no claim" not in describe_difference(high.difference, is_share=True)
    assert any("is biased" in note for note in result.notes) and not any(
        "fewer than" in note for note in result.notes
    )


def test_name_stands_for_all_experiments_that_have_it(control: Control) -> None:
    ids = all_of(control, (0, 1))
    assert compare_experiments(control, ["words"]) == compare_experiments(control, ids)


def test_default_figure_is_that_of_the_last_stage_though_it_has_not_finished_everywhere(
    control: Control,
) -> None:
    first, second = experiment(control, 1e-5, 0, None), experiment(control, 1e-5, 1, [2, 2, 2, 2])
    with control.store.transaction() as session:  # of the first, only the training has finished
        run = Run(
            id="RL", submit_key="RL", experiment_id=first, stage="rl", task="rl", bundle_digest="RL",
            current_epoch=1, created=0.0,
        )  # fmt: skip
        session.add(run)
        session.flush()
        session.add(Attempt(run_id="RL", number=1, created=0.0, placement="local", launcher="process"))
        session.query(Stage).filter_by(experiment_id=first, name="rl").one().run_id = "RL"
    write_json(
        control.home.attempt("RL", 1) / "artifacts" / "summary.json",
        {"kind": "evaluation", "pass@1": {"mean": 0.5, "low": 0.4, "high": 0.6}},
    )
    assert compare_experiments(control, [first, second]).metric == "after.pass@1"


def test_difference_of_figures_on_different_tasks_is_noted(control: Control) -> None:
    ids = [
        experiment(control, lr, seed, [2, 2, 3, 2], tasks=f"{lr}") for lr in (1e-5, 3e-5) for seed in range(3)
    ]
    notes = " ".join(compare_experiments(control, ids).notes)
    assert "rl.lr=3e-05 and rl.lr=1e-05 were evaluated on different tasks" in notes
    assert "on different tasks:" not in " ".join(compare_experiments(control, ids[:3]).notes)


@pytest.mark.parametrize(("best", "edge"), [(1e-5, "lowest rl.lr"), (3e-5, ""), (1e-4, "highest rl.lr")])
def test_best_value_at_edge_of_tried_range_is_noted(control: Control, best: float, edge: str) -> None:
    names = [
        experiment(control, lr, seed, [6, 6, 5, 6] if lr == best else [2, 2, 3, 2])
        for lr in (1e-5, 3e-5, 1e-4)
        for seed in range(3)
    ]
    notes = " ".join(compare_experiments(control, names).notes)
    assert (f"The best arm has the {edge} that was tried." in notes) == bool(edge)
    assert ("was tried" in notes) == bool(edge)


def test_interval_of_pass_rate_stays_between_0_and_100_percent(control: Control, perilune: Command) -> None:
    names = [experiment(control, 1e-5, 0, [8, 8, 8, 8]), experiment(control, 1e-5, 1, [0, 0, 1, 0])]
    _, out, _ = perilune("compare", *names)
    assert "51.6% (0.0% to 100.0%)" in out
    (arm,) = json.loads(perilune("compare", *names, "--json")[1])["arms"]
    assert (arm["figure"]["low"], arm["figure"]["high"]) == (0.0, 1.0)
    assert [seed["experiment_id"] for seed in arm["seeds"]] == names


def test_one_seed_makes_no_claim_about_settings(control: Control, perilune: Command) -> None:
    ids = all_of(control, (0,))
    result = compare_experiments(control, ids)
    difference = result.arms[1].difference
    assert difference is not None and difference.seeds.conclusion == "too few seeds"
    assert describe_difference(difference, is_share=True) == (
        "+25.0 points (+25.0 to +25.0 over 4 tasks; 1 seed: no claim)"
    )
    assert any("no claim about the settings is possible" in note for note in result.notes)
    code, out, _ = perilune("compare", *ids)
    assert code == 0 and "no claim about the settings is possible" in out.replace("\n", " ")


def test_compare_reports_missing_figures_and_unknown_metrics(control: Control, perilune: Command) -> None:
    ids = [experiment(control, 1e-5, 0, RATES[1e-5][0]), experiment(control, 3e-5, 1, None)]
    result = compare_experiments(control, ids)
    assert result.best is None and result.arms[1].figure is None
    assert result.notes[0] == "rl.lr=3e-05, seed 1 has no final figure: rl is not started."
    assert "so nothing is paired" in result.notes[1]
    with pytest.raises(RequestError, match="no stage is called 'sft'"):
        compare_experiments(control, ids, metric="sft.last.loss")
    with pytest.raises(RequestError, match=r"there is no figure after\.pass; after has pass@1"):
        compare_experiments(control, ids[:1], metric="after.pass")
    assert "rl is not started" in str(compare_experiments(control, ids[1:], metric="after.pass").notes)
    code, _, err = perilune("compare", ids[0])
    assert code == 2 and "there is only one experiment" in err
    assert perilune("compare", *ids, "--baseline", "3")[0] == 2


def test_damaged_recipe_is_named_and_damaged_sweep_affects_only_itself(
    control: Control, perilune: Command
) -> None:
    ids = all_of(control, (0,))
    control.home.sweeps.mkdir()
    (control.home.sweeps / "words-1.json").write_text("[]")
    assert perilune("compare", *ids)[0] == 0
    code, _, err = perilune("compare", "words-1")
    assert code == 2 and "words-1.json: not a sweep" in err
    path = control.home.experiment(ids[0]) / "recipe.json"
    for document in ([], {"name": "words", "seed": [1], "stages": []}, {"seed": 0, "stages": 3}):
        write_json(path, document)
        code, _, err = perilune("compare", *ids)
        assert code == 2 and "not the recipe of an experiment" in err


def test_tasks_shared_by_all_seeds_are_noted(control: Control) -> None:
    result = compare_experiments(control, all_of(control, (0, 1, 2), tasks="pool"))
    assert result.arms[1].difference is not None and result.arms[1].difference.task_count == 4
    assert any("mostly the same held-out tasks" in note for note in result.notes)


def test_missing_stage_and_changed_environment_count_as_one_setting_each() -> None:
    sums = {"environment.id": "calculator", "environment.digits": 2, "sft.task": "sft", "sft.steps": 20}
    words = {"environment.id": "jsonl", "environment.path": "a.jsonl", "sft.task": "sft", "sft.steps": 40}
    before = {"before.task": "evaluate", "before.tasks": 64}
    first, second = _keep_differing_settings([Arm("a", sums | before, (), None), Arm("b", words, (), None)])
    assert list(first.settings) == ["environment.id", "sft.steps", "before.task"]
    assert second.settings["before.task"] == ABSENT_SETTING


def test_other_metrics_have_their_own_direction(control: Control) -> None:
    assert lower_is_better("sft.last.loss") and not lower_is_better("after.pass@1")
    assert lower_is_better("rl.last.dead_groups") and not lower_is_better("after.live_groups")
    result = compare_experiments(control, all_of(control, (0, 1)), metric="rl.last.reward")
    assert [arm.figure.mean for arm in result.arms if arm.figure] == [0.5, 0.5]
    assert result.best is None and "figure of 2 arms" not in " ".join(result.notes)  # a tie
    assert result.arms[1].difference is not None and result.arms[1].difference.tasks is None
    assert describe_difference(result.arms[1].difference, is_share=False) == "too few seeds for a claim (+0)"


def test_curves_show_mean_and_interval_over_seeds(
    control: Control, tmp_path: Path, perilune: Command
) -> None:
    ids = all_of(control, (0, 1, 2))
    held_out, chart = comparison_charts(compare_experiments(control, ids))
    assert (held_out.title, held_out.curves[0].step) == ("heldout/pass@1", [2, 4])
    assert (chart.stage, chart.metric, len(chart.curves)) == ("rl", "reward", 2)
    assert chart.curves[0].step == [1, 2, 3, 4]
    assert chart.curves[0].mean == pytest.approx([2e-5, 4e-5, 6e-5, 8e-5])
    half = 4.302652729911275 * 1e-5 / 3**0.5  # t(0.975, 2) times the standard error of 1e-5, 2e-5, 3e-5
    assert chart.curves[0].low[0] == pytest.approx(2e-5 - half)
    _, alone = comparison_charts(compare_experiments(control, ids[:3]))  # seeds of one setting
    assert alone.curves == [chart.curves[0]]
    code, out, _ = perilune("report", *ids, "--out", str(tmp_path / "page.html"))
    assert code == 0 and "page.html" in out
    page = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in page and "rl.lr=3e-05" in page
    out = perilune("compare", *ids)[1]
    assert "heldout/pass@1 of rl" in out and "▁" in out and "█" in out


def test_comparison_page_escapes_html_in_recipe_values(control: Control, tmp_path: Path) -> None:
    ids = all_of(control, (0,))
    path = control.home.experiment(ids[0]) / "recipe.json"
    document = json.loads(path.read_text())
    document["stages"][0]["spec"]["system"] = "</script><img src=x>"
    write_json(path, document)
    page = build_comparison(compare_experiments(control, ids), tmp_path / "page.html").read_text()
    assert "<img" not in page
