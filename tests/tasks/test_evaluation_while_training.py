"""Evaluation during training: figures, unchanged training, best checkpoint, and early stopping."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file
from task_cases import DIGITS, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.plugin import load_plugin
from perilune.errors import RequestError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines, sha256_file
from perilune.tasks.stage.training import TrainingLoop, _write_results

EVAL: Mapping[str, Any] = {"every": 2, "tasks": 6, "samples": 4}
ENDS = {"id": "factory", "factory": "task_environments:Ends"}
OTHERS = {"sets": {"prefixed": {"prefix": "7"}}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("collect") / "bundle", "collect") / "artifacts" / "traces"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An rl stage of four steps, evaluated on two sets at steps 0, 2 and 4."""
    root = tmp_path_factory.mktemp("rl") / "bundle"
    return run_task(root, "rl", environment=ENDS, eval={**EVAL, **OTHERS, "max_tokens": 9})


def weights_of(bundle: Path, name: str = "final") -> str:
    return sha256_file(bundle / "artifacts" / "checkpoints" / name / "model.safetensors")


def figures(bundle: Path, name: str) -> dict[int, Any]:
    return {line["step"]: line[name] for line in metrics(bundle) if name in line}


def test_evaluation_does_not_change_rl_training(evaluated: Path, tmp_path: Path) -> None:
    plain = run_task(tmp_path / "plain", "rl", environment=ENDS)
    assert weights_of(plain) == weights_of(evaluated)
    own = [
        {key: value for key, value in line.items() if not key.startswith("eval/")}
        for line in metrics(evaluated)
        if line["step"]
    ]
    assert own == metrics(plain)


@pytest.mark.parametrize("task", ["sft", "distill"])
def test_evaluation_does_not_change_sft_and_distill_training(task: str, traces: Path, tmp_path: Path) -> None:
    inputs = {"data": traces} if task == "sft" else {}
    options = {"steps": 3} if task == "sft" else {"steps": 2}
    plain = run_task(tmp_path / "plain", task, inputs=inputs, **options)
    measured = run_task(tmp_path / "measured", task, inputs=inputs, **options, eval={**EVAL, "every": 1})
    assert weights_of(plain) == weights_of(measured)
    assert list(figures(measured, "eval/heldout/pass@1")) == list(range(options["steps"] + 1))


def test_evaluation_figures_equal_those_of_an_evaluate_stage(evaluated: Path, tmp_path: Path) -> None:
    """Both sets, at the untrained model and the final checkpoint: the same tasks and answers."""
    final = {"checkpoint": evaluated / "artifacts" / "checkpoints" / "final"}
    for name, section in (("heldout", ENDS), ("prefixed", {**ENDS, "prefix": "7"})):
        for step, inputs in ((0, {}), (4, final)):
            options = {"environment": section, "inputs": inputs, "checkpoint": "rl" if inputs else "model"}
            apart = run_task(
                tmp_path / f"{name}{step}", "evaluate", tasks=6, max_tokens=9, temperature=0.8, **options
            )
            found = summary(apart)
            bounds = [figures(evaluated, f"eval/{name}/pass@1{end}")[step] for end in ("", "/low", "/high")]
            assert bounds == [found["pass@1"][end] for end in ("mean", "low", "high")]
            values = next(
                line
                for line in read_json_lines(evaluated / "artifacts" / "evaluations.jsonl")
                if (line["step"], line["set"]) == (step, name)
            )
            assert values["pass@1"] == {task: right / n for task, n, right in found["correct_per_task"]}
            assert figures(evaluated, f"eval/{name}/length")[step] == found["length"]["mean"]


def test_best_checkpoint_is_kept_and_can_be_the_output(tmp_path: Path) -> None:
    """With a learning rate that destroys the policy, the best evaluation is an early one."""
    ruin = {"environment": ENDS, "steps": 6, "lr": 0.3, "warmup": 0, "save_every": 1, "kl": 0.0}
    last = run_task(tmp_path / "last", "rl", **ruin, eval={**EVAL, "every": 1})
    best = run_task(tmp_path / "best", "rl", **ruin, eval={**EVAL, "every": 1, "output": "best"})
    curve = figures(last, "eval/heldout/pass@1")
    chosen = max(curve, key=lambda step: (curve[step], -step))
    assert chosen != 6, "the learning rate must be high enough to ruin the policy"
    for bundle, checkpoint, output in ((last, "best", "last"), (best, "final", "best")):
        report = summary(bundle)
        assert report["best"]["figure"] == "eval/heldout/pass@1"
        assert (report["best"]["step"], report["best"]["checkpoint"]) == (chosen, checkpoint)
        assert report["best"]["interval"]["mean"] == curve[chosen]
        assert (report["held_out"]["best"], report["held_out"]["output"]) == (chosen, output)
        state = bundle / "artifacts" / "checkpoints" / f"step-{chosen:06d}" / "weights.safetensors"
        written = load_file(bundle / "artifacts" / "checkpoints" / checkpoint / "model.safetensors")
        assert all(np.array_equal(written[name], tensor) for name, tensor in load_file(state).items())
    assert weights_of(last, "best") == weights_of(best)
    assert weights_of(last) != weights_of(best)
    assert not (best / "artifacts" / "checkpoints" / "best").exists()


def test_stop_after_ends_training_without_a_new_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal rewards give no gradient, so no evaluation is better than the first."""
    same = {"environment": {**DIGITS, "equal": 0.0}, "steps": 12, "save_every": 3}
    bundle = run_task(tmp_path / "bundle", "rl", **same, eval={**EVAL, "stop_after": 2})
    report = summary(bundle)
    assert [line["step"] for line in metrics(bundle)] == [0, 1, 2, 3, 4]
    assert report["steps"] == 4
    assert report["held_out"]["stopped"] == (
        "2 evaluations in a row were not better than that of step 0 by heldout/pass@1"
    )
    assert "step 4: stopped: 2 evaluations in a row" in capsys.readouterr().out
    assert report["best"]["step"] == 0

    again = make_bundle(tmp_path / "again", make_job("rl", **same, eval={**EVAL, "stop_after": 2}))
    restore_outputs(bundle / "artifacts", again / "artifacts")
    (again / "artifacts" / "summary.json").unlink()
    run_in(again)
    assert compare_artifacts(bundle, again) == []


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["rl", "sft"])
def test_run_killed_between_evaluations_resumes_exactly(
    stage: str, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kill comes between the best evaluation and its checkpoint."""
    saves = TrainingLoop._save_when_due
    inputs = {"data": traces} if stage == "sft" else {}
    options: dict[str, Any] = {"steps": 6, "save_every": 3, "inputs": inputs, "eval": {**EVAL, **OTHERS}}
    options |= {"validation": 0.3} if stage == "sft" else {}
    options |= {"eval": {**options["eval"], "output": "best"}}
    whole = run_task(tmp_path / "whole", stage, **options)
    previous: Path | None = None
    for died_at in (0, 2, 5):
        bundle = make_bundle(tmp_path / f"died{died_at}", make_job(stage, **options), inputs)
        if previous:
            restore_outputs(previous / "artifacts", bundle / "artifacts")

        def dies(loop: TrainingLoop, step: int, died_at: int = died_at) -> None:
            if step == died_at:
                raise KeyboardInterrupt
            saves(loop, step)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TrainingLoop, "_save_when_due", dies)
            run_in(bundle)
        previous = bundle
    last = make_bundle(tmp_path / "last", make_job(stage, **options), inputs)
    assert previous is not None
    restore_outputs(previous / "artifacts", last / "artifacts")
    run_in(last)
    assert compare_artifacts(whole, last) == []
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert (whole / "artifacts" / name).read_bytes() == (last / "artifacts" / name).read_bytes()


def test_gap_between_training_and_held_out_tasks_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training tasks always pass and held-out tasks never pass, so the run warns."""
    split = {"id": "factory", "factory": "task_environments:OnlyTraining"}
    bundle = run_task(
        tmp_path / "bundle", "rl", environment=split, steps=3, eval={**EVAL, "every": 1, "tasks": 20}
    )
    (warning,) = summary(bundle)["held_out"]["warnings"]
    assert warning.startswith(
        "training passes 100.0% (51.0% to 100.0%) and held-out tasks 0.0% (0.0% to 16.1%)"
    )
    out = capsys.readouterr().out
    assert out.count("warning: step 2: training passes 100.0%") == 1
    assert "warning: step 3" not in out
    assert [row["training"] and row["training"]["mean"] for row in summary(bundle)["held_out"]["curve"]] == [
        None, 1.0, 1.0, 1.0,
    ]  # fmt: skip


def test_validation_traces_are_not_trained_on(traces: Path, tmp_path: Path) -> None:
    only = {"every": 3, "tasks": 0}
    inputs = {"data": traces}
    bundle = run_task(tmp_path / "bundle", "sft", inputs=inputs, validation=0.3, eval=only, lr=0.02)
    report = summary(bundle)
    assert report["traces"] + report["validation_traces"] == 40
    loss = figures(bundle, "eval/data/loss")
    assert list(loss) == [0, 3, 6]
    assert loss[6] < loss[0]
    assert report["best"]["figure"] == "eval/data/loss"
    assert report["held_out"]["sets"]["data"]["change"]["high"] < 0
    values = [
        line["loss"]
        for line in read_json_lines(bundle / "artifacts" / "evaluations.jsonl")
        if not line["step"]
    ]
    assert len(values[0]) == report["validation_traces"]
    assert np.mean(list(values[0].values())) == pytest.approx(loss[0])
    uniform = np.log(
        load_file(bundle / "artifacts/checkpoints/final/model.safetensors")[
            "model.embed_tokens.weight"
        ].shape[0]
    )
    assert loss[0] == pytest.approx(uniform, rel=0.2)  # an untrained model is near uniform


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("rl", {"eval": {}, "keep": {"best": "reward"}}, "Remove keep.best"),
        ("sft", {"validation": 0.1}, "Set eval, or validation: 0"),
        ("selfplay", {"eval": {}}, "selfplay evaluates by matches"),
        ("selfplay", {"asynchronous": {}}, "selfplay cannot sample asynchronously"),
        ("rl", {"eval": {"sets": {"data": {}}}}, "a set cannot be called 'data'"),
        ("rl", {"eval": {"best": "heldout/loss/more"}}, "should match pattern"),
    ],
)
def test_contradictory_evaluation_options_are_refused(
    task: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_job(task, **options)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("sft", {"validation": 0.1, "eval": {"best": "data/accuracy"}}),
        ("preference", {"validation": 0, "eval": {"best": "data/accuracy"}}),
        ("rl", {"eval": {"best": "heldout/loss"}}),
    ],
)
def test_best_metric_that_no_evaluation_measures_is_refused(task: str, options: dict[str, Any]) -> None:
    """Otherwise `output: best` and `stop_after` would have no effect."""
    with pytest.raises(RequestError, match="the evaluations measure heldout/pass@1, heldout/reward"):
        load_plugin(task).plan(make_job(task, **options))
    load_plugin("preference").plan(make_job("preference", eval={"best": "data/accuracy"}))


def test_too_few_held_out_tasks_fail_before_training(tmp_path: Path) -> None:
    few = {**DIGITS, "limit": 12}
    with pytest.raises(RequestError, match=r"digits gave \d of 100 held-out tasks"):
        run_task(tmp_path / "bundle", "rl", environment=few, eval={**EVAL, "tasks": 100})
    assert metrics(tmp_path / "bundle") == []


def test_plan_describes_evaluations_and_their_memory() -> None:
    job = make_job("sft", steps=25, eval={**EVAL, **OTHERS, "every": 10, "stop_after": 3})
    plan = load_plugin("sft").plan(job)
    assert plan["evaluation"] == (
        "every 10 steps, 4 times; 6 tasks x 4 of heldout, prefixed: 192 answers; best by heldout/pass@1;"
        " output: the last checkpoint; stops after 3 evaluations without a new best"
    )
    assert "engine" in plan["memory"].persistent  # type: ignore[attr-defined]
    assert "engine" not in load_plugin("sft").plan(make_job("sft", steps=25))["memory"].persistent  # type: ignore[attr-defined]


def test_follower_finishes_without_the_checkpoint_of_the_best_step(tmp_path: Path) -> None:
    """Only the first process writes checkpoints, which another machine does not have."""
    compared: list[tuple[str, str]] = []
    ranks = SimpleNamespace(
        sharded=False, broadcast=lambda *_: "4", check_same=lambda *pair: compared.append(pair)
    )
    learner: Any = SimpleNamespace(ranks=ranks, version=9, save_state=lambda *_: None)
    workspace: Any = SimpleNamespace(leads=False, checkpoints=tmp_path, metrics=list)
    spec: Any = SimpleNamespace(steps=9, eval=SimpleNamespace(output="best"))
    assert _write_results(workspace, SimpleNamespace(), learner, spec, lambda *_: None) == {}  # type: ignore[arg-type]
    assert compared == [("last version", "9")]
