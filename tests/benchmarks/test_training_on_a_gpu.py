"""The GPU training benchmarks, tested without a GPU.

They import transformers, so the tests import them when they run: every test process collects all tests.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", ["grpo_cuda", "passes_cuda"])
def test_training_benchmarks_exit_with_2_without_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    assert import_module(name).main() == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_passes_cuda_measures_training_and_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "passes_cuda.json"
    monkeypatch.setattr(sys, "argv", ["passes_cuda.py", "--smoke", "--out", str(out)])
    assert import_module("passes_cuda").main() == 0
    document = json.loads(out.read_text())
    assert [row["adapter"] for row in document["training"]] == [False, True]
    for row in (*document["training"], *document["decoding"]):
        assert row["tokens_per_second"] > 0 and row["share_of_best_rate"] >= 0


def test_adapter_training_needs_two_thirds_of_the_flops() -> None:
    import grpo_cuda

    step = {"fed_tokens": 800, "tokens": 800}
    whole, adapter = (
        grpo_cuda.learning_flops(grpo_cuda.Case("M", 2, 4, 100, 4096, lora=lora), step)
        for lora in (False, True)
    )
    assert 4 / 6 < adapter / whole < 0.7  # attention has no weights
    assert 6 * 596e6 * 800 < whole < 6.1 * 596e6 * 800


@pytest.mark.thorough
def test_grpo_cuda_measures_the_steps_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "grpo_cuda.json"
    monkeypatch.setattr("grpo_cuda.CACHE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo_cuda.py", "--smoke", "--out", str(out)])
    assert import_module("grpo_cuda").main() == 0
    for row in json.loads(out.read_text())["cases"].values():
        assert row["logprob_gap_max"] == 0 and 0 < row["mfu_of_learning"] < 1
        assert row["peak_gib"] <= row["planned_gib"]
