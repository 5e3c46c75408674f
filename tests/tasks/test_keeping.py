"""Checkpoint retention: the newest, the best by a metric, and always a checkpoint to resume from."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from task_cases import make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.plugin import load_plugin
from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines
from perilune.learn.checkpoints import is_complete
from perilune.recipe.load import load_recipe
from perilune.tasks.stage import retention as keeping
from perilune.tasks.stage import training
from perilune.tasks.stage.retention import (
    Keep,
    TrainingSpec,
    best_step,
    prune_checkpoints,
    saved_steps,
    step_directory,
)

OPTIONS: dict[str, Any] = {"steps": 8, "save_every": 2, "kl": 0.05}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keep = {"last": 2, "best": "entropy"}
    return run_task(tmp_path_factory.mktemp("kept") / "bundle", "rl", keep=keep, **OPTIONS)


def names(bundle: Path) -> set[str]:
    return {path.name for path in (bundle / "artifacts" / "checkpoints").iterdir()}


def workspace_of(tmp_path: Path, figures: list[float], spec: TrainingSpec, name: str = "reward") -> Workspace:
    """A workspace with one metric per step and a checkpoint at every due step."""
    workspace = Workspace(make_bundle(tmp_path / "bundle", make_job("rl")))
    for step, value in enumerate(figures, 1):
        workspace.metric(step, **{name: value})
        if step % spec.save_every == 0:
            step_directory(workspace, step).mkdir(parents=True)
            prune_checkpoints(workspace, spec)
    return workspace


def test_newest_and_best_checkpoints_are_kept(kept: Path) -> None:
    best = summary(kept)["best"]
    figures = {line["step"]: line["entropy"] for line in metrics(kept)}
    means = {end: (figures[end - 1] + figures[end]) / 2 for end in (2, 4, 6, 8)}
    assert best["step"] == max(means, key=lambda end: means[end])
    assert best["step"] != 8, "choose a seed whose best checkpoint is not the last"
    assert best["interval"]["mean"] == pytest.approx(means[best["step"]])
    assert best["interval"]["low"] <= best["interval"]["mean"] <= best["interval"]["high"]
    assert best["last"]["mean"] == pytest.approx(means[8])
    assert names(kept) == {"final", "best", "step-000006", f"step-{best['step']:06d}"}

    folder = kept / "artifacts" / "checkpoints"
    state = load_file(folder / f"step-{best['step']:06d}" / "weights.safetensors")
    written = load_file(folder / "best" / "model.safetensors")
    assert (written["model.norm.weight"] == state["model.norm.weight"]).all()
    assert (
        written["model.norm.weight"] != load_file(folder / "final" / "model.safetensors")["model.norm.weight"]
    ).any()
    assert summary(kept)["disk_bytes"] == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )
    sizes = [event["disk_bytes"] for event in read_json_lines(kept / "runtime" / "events.jsonl")
            if event["kind"] == "checkpoint"]  # fmt: skip
    assert len(sizes) == 3
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("name", "figures", "last", "stay"),
    [
        ("reward", [0, 0, 9, 9, 1, 1, 2, 2], 1, [4, 8]),
        ("reward", [0, 0, 9, 9, 1, 1, 2, 2], 2, [4, 6, 8]),
        ("reward", [0, 0, 1, 9, 5, 5, 2, 2], 1, [4, 8]),  # the earlier of equal means
        ("validation_nll", [3, 3, 9, 9, 4, 4, 5, 5], 1, [2, 8]),
    ],
)
def test_prune_keeps_the_best_and_last_checkpoints(
    tmp_path: Path, name: str, figures: list[float], last: int, stay: list[int]
) -> None:
    spec = TrainingSpec(steps=100, save_every=2, keep=Keep(last=last, best=name))
    assert saved_steps(workspace_of(tmp_path, figures, spec, name)) == stay


def test_plan_states_the_disk_space_of_checkpoints(kept: Path) -> None:
    options: dict[str, Any] = OPTIONS | {"keep": {"last": 2, "best": "entropy"}}
    line = load_plugin("rl").plan(make_job("rl", **options))["checkpoints"]
    match = re.fullmatch(
        r"every 2 steps; the newest 2 and the best by entropy kept, about (\d+) MB at most", line
    )
    assert match is not None
    assert summary(kept)["disk_bytes"] <= int(match[1]) * 1e6 <= 2 * summary(kept)["disk_bytes"]


def test_missing_best_metric_keeps_only_the_newest_checkpoint(tmp_path: Path) -> None:
    spec = TrainingSpec(steps=100, save_every=2, keep=Keep(best="no_such_figure"))
    workspace = workspace_of(tmp_path, [1.0] * 6, spec)
    assert saved_steps(workspace) == [6]
    assert best_step(workspace, spec, [2, 4, 6]) is None


@pytest.mark.thorough
def test_kill_during_prune_leaves_complete_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after deleting 1 or 4 files of an old checkpoint."""
    whole = run_task(tmp_path / "whole", "rl", **OPTIONS)
    for died_at in (1, 4):
        bundle = make_bundle(tmp_path / f"killed{died_at}", make_job("rl", **OPTIONS))

        def half(path: Path, died_at: int = died_at) -> None:
            for file in sorted(path.iterdir())[:died_at]:
                file.unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(keeping, "shutil", SimpleNamespace(rmtree=half))
            run_in(bundle)
        visible = [path for path in (bundle / "artifacts" / "checkpoints").iterdir() if path.name[0] != "."]
        assert [path.name for path in visible] == ["step-000004"]
        assert all(map(is_complete, visible))
        again = make_bundle(tmp_path / f"again{died_at}", make_job("rl", **OPTIONS))
        restore_outputs(bundle / "artifacts", again / "artifacts")
        run_in(again)
        assert names(again) == {"final"}
        assert (again / "artifacts/metrics.jsonl").read_bytes() == (
            whole / "artifacts/metrics.jsonl"
        ).read_bytes()


@pytest.mark.thorough
def test_damaged_checkpoint_does_not_replace_the_resumable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a kill would lose all steps."""
    bundle = run_task(tmp_path / "1", "rl", **OPTIONS, keep={"last": 4})
    again = make_bundle(tmp_path / "2", make_job("rl", **OPTIONS))
    restore_outputs(bundle / "artifacts", again / "artifacts")
    folder = again / "artifacts" / "checkpoints"
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "step-000004")
    weights = folder / "step-000006" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    there: list[list[int]] = []

    def watched(workspace: Workspace, spec: TrainingSpec, *, saved_elsewhere: int = 0) -> None:
        prune_checkpoints(workspace, spec, saved_elsewhere=saved_elsewhere)
        there.append([s for s in saved_steps(workspace) if is_complete(step_directory(workspace, s))])

    monkeypatch.setattr(training, "prune_checkpoints", watched)
    run_in(again)
    assert there == [[4], [6], []]  # resumed after step 2; the final checkpoint replaces them


def test_unknown_best_metric_is_reported_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = run_task(tmp_path / "bundle", "rl", keep={"best": "rewrad"}, steps=1)
    assert summary(bundle)["best"]["step"] is None
    assert "no step has a metric 'rewrad'" in capsys.readouterr().out


def test_unknown_best_metric_stops_the_run_at_its_first_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no step so far has a metric 'rewrad'") as caught:
        run_task(tmp_path / "bundle", "rl", keep={"best": "rewrad"}, steps=6, save_every=2)
    assert caught.value.remedy == "did you mean 'reward'?"
    assert len(metrics(tmp_path / "bundle")) == 2


@pytest.mark.parametrize("option", ["best: pass@1", "optimizer: true"])
@pytest.mark.parametrize(
    "stage",
    [
        "{name: games, task: connect_four, keep: {%s}}",
        "{name: second, task: speech_codec, data: texts, keep: {%s}}",
        "{name: voice, task: speech_voice, data: texts, codec: codec, keep: {%s}}",
    ],
)
def test_stages_without_evaluations_refuse_other_options_of_keep(
    tmp_path: Path, stage: str, option: str
) -> None:
    path = tmp_path / "recipe.yaml"
    made = "- {name: texts, task: utterances}\n- {name: codec, task: speech_codec, data: texts}\n"
    path.write_text(f"name: kept\nseed: 0\nstages:\n{made}- {stage % option}\n")
    with pytest.raises(RequestError, match=r"Set only keep\.last"):
        load_recipe(str(path), [])
    path.write_text(path.read_text().replace(option, "last: 2"))
    load_recipe(str(path), [])
