"""Default settings of stages: they depend on the origin and size of the model, and plans give the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, DUEL, OPTIONS, make_job, metrics, run_task

from perilune.bundle.plugin import complete_spec, load_plugin, plugin_names
from perilune.learn.training_settings import OptimizerSettings
from perilune.models.adapters.files import save_policy
from perilune.models.checkpoints.loading import new_model
from perilune.models.config.decoder_config import PRESETS, find_preset
from perilune.models.memory import get_model_card
from perilune.models.text.tokenizer import Tokenizer
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job
from perilune.tasks.stage.defaults import RATES
from perilune.tasks.stage.memory_plan import section_config

RECIPE = """\
name: one
model: {MODEL}
environment: {id: reasoning_gym, task: basic_arithmetic}
stages:
  - {name: sft, task: sft, data: traces, steps: 45}
  - {name: traces, task: collect, teacher: gold}
  - {name: rl, task: rl, checkpoint: sft, steps: 45, token_budget: 700}
  - {name: eval, task: evaluate, checkpoint: rl}
"""
LEARNERS = [name for name in plugin_names() if issubclass(load_plugin(name).spec, OptimizerSettings)]


def config_folder(path: Path, **shape: int) -> Path:
    """A folder with only a config.json: the shape of SmolLM2-135M changed by `shape`."""
    small = {"hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    tables = {"intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
    config = PRESETS["tiny"].replace(**{**small, **tables, **shape})
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_folder(tmp_path_factory.mktemp("model") / "m")


def jobs(tmp_path: Path, model: str, device: str = "auto") -> dict[str, dict[str, Any]]:
    text = RECIPE.replace("{MODEL}", model) + f"resources: {{device: {device}}}\n"
    (tmp_path / "r.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "r.yaml")
    return {stage.name: build_job(recipe, stage).spec for stage in recipe.stages}


def test_warmup_of_flywheel_depends_on_the_updates_of_a_round(folder: Path) -> None:
    spec = {"steps": 4, "updates": 100, "warmup": None}
    warmup = load_plugin("flywheel").spec.defaults("flywheel", spec, {"path": str(folder)}, "cpu")["warmup"]
    assert warmup == (10, "a tenth of the updates of a round, at most 20")


def test_every_training_task_has_default_rates() -> None:
    assert sorted(RATES) == LEARNERS


def test_new_model_gets_field_defaults(tmp_path: Path) -> None:
    specs = jobs(tmp_path, "{preset: tiny}")
    sft, rl = specs["sft"], specs["rl"]
    assert (sft["lr"], sft["warmup"], sft["batch_size"], sft["token_budget"]) == (3e-3, 20, 64, 4096)
    assert (rl["lr"], rl["warmup"], rl["kl"], rl["prompts"], rl["max_tokens"]) == (2e-4, 10, 0.0, 32, 64)
    assert rl["token_budget"] == 700 and specs["eval"]["max_tokens"] == 64


def test_pretrained_model_gets_defaults_by_size(tmp_path: Path, folder: Path) -> None:
    specs = jobs(tmp_path, f"{{path: {folder}}}")
    sft, rl = specs["sft"], specs["rl"]
    assert (sft["lr"], sft["warmup"], sft["batch_size"]) == (2e-5, 5, 16)
    assert (rl["lr"], rl["warmup"], rl["kl"], rl["prompts"], rl["max_tokens"]) == (5e-6, 5, 0.0, 16, 256)
    assert rl["token_budget"] == 700 and specs["eval"]["max_tokens"] == 256
    larger = config_folder(tmp_path / "large", hidden_size=2048, num_layers=24, intermediate_size=8192)
    large = jobs(tmp_path, f"{{path: {larger}}}")
    assert large["rl"]["lr"] == 1e-6 and large["sft"]["token_budget"] < sft["token_budget"]


def test_gpu_gets_a_larger_token_budget(tmp_path: Path, folder: Path) -> None:
    on_cpu, on_gpu = (jobs(tmp_path, f"{{path: {folder}}}", device) for device in ("cpu", "cuda"))
    assert on_gpu["sft"]["token_budget"] >= 4 * on_cpu["sft"]["token_budget"]
    assert on_gpu["rl"] == on_cpu["rl"]  # the recipe sets token_budget
    assert {**on_gpu["sft"], "token_budget": None} == {**on_cpu["sft"], "token_budget": None}


def test_very_small_model_folder_counts_as_new(tmp_path: Path) -> None:
    save_policy(tmp_path / "m", new_model("tiny", Tokenizer.characters(), seed=0), Tokenizer.characters())
    assert jobs(tmp_path, f"{{path: {tmp_path / 'm'}}}") == jobs(tmp_path, "{preset: tiny}")


@pytest.mark.parametrize("task", LEARNERS)
def test_plan_explains_the_learning_rate(task: str, folder: Path) -> None:
    def line(model: dict[str, str] | None = None, **options: Any) -> str:
        environment = DUEL if task == "selfplay" else DIGITS
        chosen = {} if model is None else {"model": model}
        plan = load_plugin(task).plan(make_job(task, environment=environment, **chosen, **options))
        return plan["learning rate"]

    pretrained = {"path": str(folder)}
    made_here = line(lr=None)
    assert f"{RATES[task].fresh:g} after" in made_here
    assert made_here.endswith("the default for a new model (preset tiny)")
    assert f"{RATES[task].small:g} after" in line(pretrained, lr=None)
    assert line(pretrained, lr=None).endswith("full fine-tuning of a pretrained model of 135M parameters")
    assert line(pretrained, lr=0.0123).endswith("set in the recipe")
    if "lora" in load_plugin(task).spec.model_fields:
        adapter = line(pretrained, lr=None, lora={"rank": 2})
        assert f"{10 * RATES[task].small:g} after" in adapter
        assert "an adapter (LoRA) of a pretrained model of 135M parameters" in adapter


def test_plan_explains_other_defaults_and_set_values(folder: Path) -> None:
    fields = {**OPTIONS["rl"], "kl": None, "max_tokens": None, "token_budget": None, "prompts": 4}
    fields["forgetting"] = None
    model = {"path": str(folder)}
    kind = load_plugin("rl").spec
    spec = complete_spec(kind, "rl", kind.model_construct(**fields).model_dump(), model, "cpu")
    plan = load_plugin("rl").plan(make_job("rl", model=model, **spec))
    assert plan["kl"].startswith("0; no reference policy")
    assert plan["max_tokens"].startswith("256; room for written-out work")
    assert plan["token_budget"].endswith("GiB")
    assert plan["prompts"] == "4; set in the recipe"
    assert plan["forgetting"].endswith(
        "; a pretrained model can lose other abilities while it learns one task"
    )
    chosen = make_job("rl", model=model, **spec | {"forgetting": {"tasks": 8}})
    assert load_plugin("rl").plan(chosen)["forgetting"].endswith("; set in the recipe")
    assert "kl" not in load_plugin("rl").plan(make_job("rl"))  # nothing to explain for a new model


def test_run_uses_and_logs_the_default_learning_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = run_task(tmp_path / "b", "rl", lr=None, steps=3, warmup=2)
    assert [line["lr"] for line in metrics(bundle)] == [1e-4, 2e-4, 2e-4]
    logged = capfd.readouterr().out
    assert "learning rate: 0.0002 after 2 warm-up steps, then constant; the default for a new model" in logged
    rate = load_plugin("rl").plan(make_job("rl", lr=2e-4, steps=3, warmup=12))["learning rate"]
    assert rate.startswith("rises to 5e-05 in 3 steps, because the warm-up to 0.0002 takes 12;")


@pytest.mark.parametrize(("preset", "millions"), [("base", 3), ("medium", 10), ("large", 30)])
def test_wider_preset_gets_a_lower_learning_rate(preset: str, millions: int, tmp_path: Path) -> None:
    specs = jobs(tmp_path, f"{{preset: {preset}}}")
    width = PRESETS[preset].hidden_size
    assert specs["sft"]["lr"] == 3e-3 * 128 / width and specs["rl"]["lr"] == 2e-4 * 128 / width
    assert specs["sft"]["batch_size"] == 64 and specs["eval"]["max_tokens"] == 64
    parameters = get_model_card(
        section_config({"preset": preset, "tokenizer": "bpe", "vocab_size": 2048})
    ).parameters
    assert 0.9 < parameters / (millions * 1e6) < 1.2


def test_folder_with_a_preset_config_counts_as_new(tmp_path: Path) -> None:
    config = PRESETS["large"].replace(vocab_size=777, eos_token_ids=(1,))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config.to_hf()))
    assert jobs(tmp_path, f"{{path: {tmp_path / 'm'}}}") == jobs(tmp_path, "{preset: large}")
    assert find_preset(config) == "large" and find_preset(config.replace(num_layers=9)) is None


def test_stage_defaults_follow_the_new_model_stage_it_trains(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        RECIPE.replace("{MODEL}", "{preset: tiny}").replace(
            "data: traces", "checkpoint: larger, data: traces"
        )
        + "  - {name: larger, task: new_model, preset: large}\n"
    )
    recipe = load_recipe(tmp_path / "r.yaml")
    jobs = {stage.name: build_job(recipe, stage) for stage in recipe.stages}
    assert jobs["traces"].model["preset"] == "tiny"
    for name in ("larger", "sft", "rl", "eval"):
        assert jobs[name].model["preset"] == "large"
    assert jobs["sft"].spec["lr"] == 7.5e-4
