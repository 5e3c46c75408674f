"""The connect_four and connect_four_judge stages: exact resume, determinism, and recipes."""

from pathlib import Path

import pytest
import yaml
from task_cases import make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.cli.train.plan import derive_plans
from perilune.errors import RequestError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines, sha256_file
from perilune.games.connect_four.learning import Trainer
from perilune.recipe.load import load_recipe

FINAL = "artifacts/checkpoints/final"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("four") / "b", "connect_four")


def test_killed_connect_four_stage_resumes_exactly(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def killed(self: Trainer, progress: float) -> dict[str, float]:
        if self.step == 3:
            raise KeyboardInterrupt
        return advance(self, progress)

    broken = make_bundle(tmp_path / "broken", make_job("connect_four"))
    monkeypatch.setattr(Trainer, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        run_in(broken)
    monkeypatch.undo()
    assert len(metrics(broken)) == 3
    again = make_bundle(tmp_path / "again", make_job("connect_four"))
    restore_outputs(broken / "artifacts", again / "artifacts")
    run_in(again)
    events = list(read_json_lines(again / "runtime/events.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "resumed"] == [2]
    for name in (
        "artifacts/metrics.jsonl",
        f"{FINAL}/weights.safetensors",
        f"{FINAL}/optimizer/games.safetensors",
    ):
        assert sha256_file(again / name) == sha256_file(played / name)
    assert summary(again) == summary(played)
    assert summary(played)["moves"] == 4 * 16 * 8


@pytest.mark.thorough
def test_connect_four_judge_is_deterministic(played: Path, tmp_path: Path) -> None:
    first, second = (
        run_task(tmp_path / name, "connect_four_judge", inputs={"player": played / FINAL}) for name in "ab"
    )
    report = summary(first)
    assert report == summary(second)
    for result in report["simulations"].values():
        assert result["moves"]["positions"] > 20
        for opponent in ("random", "one_ply", "perfect", "mcts_100"):
            assert result[opponent]["games"] == 4
    assert report["simulations"]["0"]["perfect"]["won"] == 0


def recipe(tmp_path: Path, **sections: object) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "four", **sections}))
    return path


STAGES = [
    {"name": "player", "task": "connect_four", "steps": 2},
    {"name": "judged", "task": "connect_four_judge", "player": "player"},
]


def test_connect_four_recipe_needs_no_model(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, stages=STAGES))
    assert loaded.model is None
    assert [stage["name"] for stage in derive_plans(loaded)] == ["player", "judged"]


def test_other_stages_beside_connect_four_need_a_model(tmp_path: Path) -> None:
    sft = {"name": "traces", "task": "collect", "teacher": "gold", "traces": 4}
    with pytest.raises(RequestError, match="model is missing"):
        load_recipe(recipe(tmp_path, stages=[*STAGES, sft]))
    with pytest.raises(RequestError, match="needs a stage that makes a player"):
        load_recipe(recipe(tmp_path, stages=[{**STAGES[1], "player": "model"}]))
