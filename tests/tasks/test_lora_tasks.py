"""Stages that train a LoRA adapter: outputs, later stages, exact resume, and sharding limits."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from task_cases import SFT, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.plugin import load_plugin
from perilune.errors import RequestError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json, sha256_file
from perilune.learn import training_settings
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.loading import load_decoder, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

FRUGAL: dict[str, Any] = {
    "keep": {"optimizer": True},
    "lora": {"rank": 4, "base": "int8"}, "precision": "bfloat16", "kl": 0.05, "lr": 1e-2,
}  # fmt: skip


def final(bundle: Path) -> Path:
    return bundle / "artifacts" / "checkpoints" / "final"


def run_until_killed(attempt: Path) -> None:
    """Run until a SIGKILL in the third step, after two checkpoints."""
    from perilune.tasks.rl import update as policy_update

    right = policy_update.PolicyUpdater._update

    def make(self: Any, groups: Any, step: int) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(self, groups, step)

    policy_update.PolicyUpdater._update = make  # type: ignore[method-assign]
    run_in(attempt)


@pytest.mark.thorough
def test_killed_lora_run_resumes_exactly(tmp_path: Path) -> None:
    whole = run_task(tmp_path / "whole", "rl", **FRUGAL)
    attempt = make_bundle(tmp_path / "1", make_job("rl", **FRUGAL))
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(attempt,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (attempt / "artifacts" / "checkpoints" / "step-000002").is_dir()
    again = make_bundle(tmp_path / "2", make_job("rl", **FRUGAL))
    restore_outputs(attempt / "artifacts", again / "artifacts")
    run_in(again)
    assert compare_artifacts(whole, again) == []
    files = {file.relative_to(final(whole)) for file in final(whole).rglob("*") if file.is_file()}
    assert {Path("adapter/adapter_model.safetensors"), Path("optimizer/weights.safetensors")} <= files
    assert all(sha256_file(final(whole) / file) == sha256_file(final(again) / file) for file in files)
    assert [line["logprob_gap_max"] for line in metrics(whole)] == [0.0] * 4


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model after a short sft stage with an adapter."""
    folder = tmp_path_factory.mktemp("taught")
    traces = run_task(folder / "collect", "collect") / "artifacts" / "traces"
    keep = {"optimizer": True}
    return run_task(folder / "sft", "sft", inputs={"data": traces}, lora={"rank": 4}, lr=1e-2, keep=keep)


def test_lora_stage_saves_merged_policy_and_adapter(taught: Path, tmp_path: Path) -> None:
    from perilune.models.checkpoints.loading import new_model
    from perilune.models.text.tokenizer import Tokenizer

    base = new_model("tiny", Tokenizer.characters(), seed=1)
    expected = Adapter.load(final(taught) / "adapter").merge(base).state_dict()
    for name, tensor in load_decoder(Decoder, final(taught)).state_dict().items():
        assert torch.equal(tensor, expected[name])
    moments = load_file(final(taught) / "optimizer" / "second_moments.safetensors")
    assert all(".lora_" in name for name in moments)
    assert summary(taught)["trained_parameters"] == sum(tensor.numel() for tensor in moments.values())


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (
            "rl",
            {"lora": {"rank": 4}, "kl": 0.05, "activation_checkpointing": True, "restore_optimizer": True},
        ),
        ("rl", {"algorithm": "ppo"}),
        ("distill", {"lora": {"rank": 2, "base": "bfloat16"}}),
        ("evaluate", {}),
    ],
)
def test_later_stages_start_from_the_merged_policy(
    taught: Path, tmp_path: Path, task: str, options: dict[str, Any]
) -> None:
    inputs = {"checkpoint": final(taught)} | ({"teacher": final(taught)} if task == "distill" else {})
    kept = {} if task == "evaluate" else {"keep": {"optimizer": True}}
    bundle = run_task(tmp_path / task, task, inputs=inputs, **kept, **options)
    if task != "evaluate":
        state = read_json(final(bundle) / "optimizer" / "state.json")
        restored = state["optimizer_step"] - state["version"]
        assert restored == (SFT["steps"] if options.get("restore_optimizer") else 0)
    if task == "rl":
        assert all(line["logprob_gap_max"] == 0 for line in metrics(bundle))
        assert metrics(bundle)[0].get("kl_reference", 0.0) == 0.0


def test_plan_describes_adapter_and_precision() -> None:
    lora = {"rank": 4, "alpha": 8, "base": "int8"}
    job = make_job("rl", lora=lora, precision="bfloat16", activation_checkpointing=True)
    line = "adapter of rank 4, alpha 8, base in int8, bfloat16 products, layers recomputed"
    assert load_plugin("rl").plan(job)["learning"] == line
    assert "learning" not in load_plugin("rl").plan(make_job("rl"))


@pytest.mark.parametrize(
    ("spec", "model", "message"),
    [
        ({"lora": {"rank": 2}}, {"preset": "tiny"}, "LoRA trains only an adapter"),
        ({}, {"path": "mixture"}, "a mixture of experts cannot be sharded"),
    ],
)
def test_plan_refuses_sharding_of_lora_and_experts(
    tmp_path: Path, spec: dict[str, Any], model: dict[str, str], message: str
) -> None:
    if "path" in model:
        tokenizer = Tokenizer.characters()
        mixture = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(4, 2, 16))
        save_checkpoint(tmp_path / "mixture", new_model(mixture, tokenizer, seed=0), tokenizer)
        model = {"path": str(tmp_path / "mixture")}
    job = make_job("rl", **spec)
    sharded = job.model_copy(
        update={
            "model": model,
            "resources": job.resources.model_copy(update={"processes": 2, "sharded": True}),
        }
    )
    with pytest.raises(RequestError, match=message):
        load_plugin("rl").plan(sharded)


@pytest.mark.parametrize(
    ("installed", "resources", "refused"),
    [
        ("2.7.1+cu126", {"processes": 2, "device": "cuda"}, True),
        ("2.7.1", {"processes": 2, "device": "cpu", "sharded": True}, True),
        ("2.7.1", {"processes": 2, "device": "cuda", "sharded": False}, False),
        ("2.7.1", {"processes": 1, "device": "cuda"}, False),
        ("2.10.0", {"processes": 2, "device": "cuda"}, False),
    ],
)
def test_plan_refuses_sharding_with_old_torch(
    monkeypatch: pytest.MonkeyPatch, installed: str, resources: dict[str, Any], refused: bool
) -> None:
    monkeypatch.setattr(training_settings, "version", lambda name: installed)
    job = make_job("rl")
    job = job.model_copy(update={"resources": job.resources.model_copy(update=resources)})
    if refused:
        with pytest.raises(RequestError, match=r"sharding needs torch 2\.8 or newer, and torch 2\.7\.1"):
            load_plugin("rl").plan(job)
    else:
        load_plugin("rl").plan(job)
