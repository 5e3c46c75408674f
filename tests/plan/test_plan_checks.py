"""Refusals and warnings of `perilune run --plan`."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from perilune.cli.train.plan import derive_plans
from perilune.errors import RequestError
from perilune.plan.checks import check_weights
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import Recipe

RECIPE = """name: pens
model: {{preset: tiny}}
environment: {environment}
rewards: {rewards}
resources: {{device: {device}, threads: 1}}
stages:
  - {{name: traces, task: collect, teacher: {teacher}, traces: {traces}}}
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
BROKEN = """\
from perilune.environments import SingleTurn, Task

class Broken(SingleTurn):
    id = "broken"
    def __init__(self, section):
        pass
    def tasks(self, split, seed):
        yield Task(split, ({"role": "user", "content": "7?"},), {"answer": "7"})
    def score(self, task, transcript):
        return task.data["missing"]
"""
SWARM = """\
name: swarm
model: {preset: tiny}
environment: {id: wide_lookup, keys: [4]}
stages:
  - {name: rl, task: rl, checkpoint: model, steps: 5, auxiliary_rewards: {weights: {finish: 1.0, nope: 1.0}}}
"""
PENS = "{id: jsonl, path: pens.jsonl, match: number}"


def load_pens_recipe(tmp_path: Path, **changes: Any) -> Recipe:
    rows = (f'{{"prompt": "{number}+1=", "answer": {number + 1}}}\n' for number in range(60))
    (tmp_path / "pens.jsonl").write_text("".join(rows))
    options = {"environment": PENS, "rewards": "{}", "device": "cpu", "teacher": "gold", "lr": "0.003"}
    (tmp_path / "pens.yaml").write_text(
        RECIPE.format(**options | {"tasks": 4, "evaluated": 4, "traces": 8} | changes)
    )
    return load_recipe(tmp_path / "pens.yaml")


def test_plan_of_valid_recipe_has_no_warning(tmp_path: Path) -> None:
    lines = [
        name for stage in derive_plans(load_pens_recipe(tmp_path), check=True) for name in stage["derived"]
    ]
    assert not [name for name in lines if "warning" in name]


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"tasks": 500}, "stages.after: tasks", r"jsonl has \d+ held-out tasks, and the stage needs 500"),
        ({"tasks": 5000}, "stages.after: tasks", "held-out tasks, and the stage needs 5000"),
        ({"traces": 100}, "stages.traces: traces", r"has \d+ training tasks, and the stage needs 100"),
        ({"evaluated": 500}, r"stages.rl: eval.tasks \(set heldout\)", r"held-out tasks, and .* needs 500"),
        ({"teacher": "calculator"}, "stages.traces", "calculator"),
        ({"rewards": "{verifier: 1.0, fomat: 0.1}"}, "stages.traces: rewards", "no reward term 'fomat'"),
    ],
)
def test_plan_refuses_too_many_tasks_and_unknown_names(
    tmp_path: Path, changes: dict[str, Any], where: str, message: str
) -> None:
    recipe = load_pens_recipe(tmp_path, **changes)
    with pytest.raises(RequestError, match=message) as caught:
        derive_plans(recipe, check=True)
    assert re.match(where, caught.value.where)


def test_run_checks_held_out_tasks_before_the_first_stage(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="held-out tasks, and the stage needs 500"):
        derive_plans(load_pens_recipe(tmp_path, tasks=500))


def test_plan_and_run_report_the_same_errors_of_a_recipe_with_faults_in_two_stages(tmp_path: Path) -> None:
    recipe = load_pens_recipe(tmp_path, teacher="calculator", evaluated=300, tasks=500)
    for check in (True, False):
        with pytest.raises(RequestError, match="needs 300") as caught:
            derive_plans(recipe, check=check)
        assert [error.where for error in caught.value.others] == ["stages.after: tasks"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sft.restore_optimizer=true"], "has no optimizer state"),
        (["rl.restore_optimizer=true"], "has no optimizer state"),
        (["rl.restore_optimizer=true", "sft.keep.optimizer=true", "rl.lora={}"], "other parameters"),
    ],
)
def test_run_checks_that_an_earlier_stage_keeps_the_optimizer(
    tmp_path: Path, changes: list[str], message: str
) -> None:
    load_pens_recipe(tmp_path)
    with pytest.raises(RequestError, match=message):
        derive_plans(load_recipe(tmp_path / "pens.yaml", changes))
    kept = ["rl.restore_optimizer=true", "sft.keep.optimizer=true"]
    assert derive_plans(load_recipe(tmp_path / "pens.yaml", kept))


KUHN = "{id: open_spiel, game: kuhn_poker}"


@pytest.mark.parametrize(
    ("environment", "stage", "message"),
    [
        ("{id: calculator}", "task: pairs", "a pair is two answers to one prompt"),
        ("{id: calculator}", "task: rl, process_rewards: montecarlo", "supports one turn per episode"),
        ("{id: gymnasium, game: FrozenLake-v1}", "task: rl, process_rewards: answer", "states no right"),
        (KUHN, "task: calibrate", "states no right answer"),
        (KUHN, "task: rl, eval: {tasks: 2}", "has several players"),
    ],
)
def test_run_checks_that_a_stage_fits_its_environment(
    tmp_path: Path, environment: str, stage: str, message: str
) -> None:
    text = f"name: x\nmodel: {{preset: tiny}}\nenvironment: {environment}\nstages:\n"
    (tmp_path / "x.yaml").write_text(f"{text}  - {{name: x, {stage}, checkpoint: model, max_tokens: 8}}\n")
    with pytest.raises(RequestError, match=message):
        derive_plans(load_recipe(tmp_path / "x.yaml"))


def test_error_of_a_stage_names_it_once(tmp_path: Path) -> None:
    load_pens_recipe(tmp_path)
    with pytest.raises(RequestError) as caught:
        derive_plans(load_recipe(tmp_path / "pens.yaml", ["rl.routing_replay=true"]))
    assert caught.value.where == "stages.rl: routing_replay"


def test_plan_reports_a_fault_that_stages_share_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs 500") as caught:
        derive_plans(load_pens_recipe(tmp_path, evaluated=500, tasks=500))
    assert not caught.value.others


def test_plan_warns_when_scoring_raises(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    text = 'name: broken\nmodel: {preset: tiny}\nenvironment: {id: "broken.py:Broken"}\nstages:\n'
    (tmp_path / "broken.yaml").write_text(text + "  - {name: rl, task: rl, checkpoint: model, steps: 5}\n")
    (rl,) = derive_plans(load_recipe(tmp_path / "broken.yaml"), check=True)
    warning = "broken.py:Broken fails to score the answer '0' to its first task: scorer raised KeyError"
    assert rl["derived"]["warning 1"].startswith(warning)


@pytest.mark.parametrize("answer_format, warns", [("last_number", True), ("answer_tags", False)])
def test_plan_warns_when_right_answers_do_not_fit_the_format(
    tmp_path: Path, answer_format: str, warns: bool
) -> None:
    section = f"{{id: calculator, prompting: {{format: {answer_format}}}}}"
    (tmp_path / "cut.yaml").write_text(
        f"name: cut\nmodel: {{preset: tiny}}\nenvironment: {section}\n"
        "stages:\n  - {name: rl, task: rl, checkpoint: model, steps: 5}\n"
    )
    (rl,) = derive_plans(load_recipe(tmp_path / "cut.yaml"), check=True)
    warning = "calculator gives no reward to its own right answers to the first 8 tasks in the format"
    assert any(str(value).startswith(warning) for value in rl["derived"].values()) is warns


def test_plan_warns_of_unknown_auxiliary_terms(tmp_path: Path) -> None:
    load_pens_recipe(tmp_path)
    changes = ["rl.auxiliary_rewards.weights.nope=1", "environment.prompting.format=boxed"]
    stages = derive_plans(load_recipe(tmp_path / "pens.yaml", changes), check=True)
    (text,) = (v for stage in stages for name, v in stage["derived"].items() if "warning" in name)
    assert "auxiliary_rewards.weights.nope: no episode has the reward term 'nope'; one of: format" in text


def test_plan_warns_of_unknown_auxiliary_terms_of_several_turns(tmp_path: Path) -> None:
    (tmp_path / "swarm.yaml").write_text(SWARM)
    (stage,) = derive_plans(load_recipe(tmp_path / "swarm.yaml"), check=True)
    (text,) = (v for name, v in stage["derived"].items() if "warning" in name)
    assert "no episode has the reward term 'nope'; one of: finish, parallel, performance" in text


def test_plan_warns_of_repeated_ids_and_long_prompts(tmp_path: Path) -> None:
    task = 'yield Task("same", ({"role": "user", "content": "7" * 5000},), {"answer": "7"})'
    source = BROKEN.replace("yield Task(split", f"{task}\n        yield Task('same'")
    (tmp_path / "broken.py").write_text(source)
    text = 'name: broken\nmodel: {preset: tiny}\nenvironment: {id: "broken.py:Broken"}\nstages:\n'
    (tmp_path / "broken.yaml").write_text(text + "  - {name: rl, task: rl, checkpoint: model, steps: 5}\n")
    (rl,) = derive_plans(load_recipe(tmp_path / "broken.yaml"), check=True)
    assert "2 of the first 2 training tasks" in rl["derived"]["warning 1"]
    assert "'same' has 5,0" in rl["derived"]["warning 2"]


def test_plan_refuses_absent_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.bundle.machine._nvidia_gpus", lambda: iter(()))
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RequestError, match="this machine has none"):
        derive_plans(load_pens_recipe(tmp_path, device="cuda"))


@pytest.mark.parametrize(
    ("lr", "text"),
    [("1.0", "lr 1 is 333 times the default of 0.003"), ("1.0e-5", "lr 1e-05 is 1/300 of the default")],
)
def test_plan_warns_about_unusual_learning_rate(tmp_path: Path, lr: str, text: str) -> None:
    stages = {stage["name"]: stage["derived"] for stage in derive_plans(load_pens_recipe(tmp_path, lr=lr))}
    assert stages["sft"]["warning"].startswith(text)
    assert "warning" not in stages["rl"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe with a pretrained model, whose files tests then damage."""
    from perilune.models.checkpoints.loading import new_model, save_checkpoint
    from perilune.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.characters()
    save_checkpoint(tmp_path / "mine", new_model("tiny", tokenizer, seed=0), tokenizer)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: {path: mine}\n"
        "stages: [{name: sft, task: sft, checkpoint: model, data: chats.jsonl, steps: 1}]\n"
    )
    return tmp_path / "mine"


def edit(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **keys}))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "no file model.safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 100_000), "not a safetensors file"),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "is a pickle"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "not a tokenizer"),
        (lambda path: edit(path / "config.json", num_hidden_layers=5), "layers.3.* is missing"),
        (lambda path: edit(path / "config.json", hidden_size=192), "requires .98, 192."),
        (lambda path: edit(path / "config.json", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    ],
)
def test_run_refuses_unusable_weights_before_it_begins(folder: Path, damage: Any, what: str) -> None:
    derive_plans(load_recipe(folder.parent / "mine.yaml"))
    check_weights.cache_clear()
    damage(folder)
    with pytest.raises(RequestError, match=what) as caught:
        derive_plans(load_recipe(folder.parent / "mine.yaml"))
    assert caught.value.where.startswith(f"stages.sft: {folder}")
