"""The GPU rollout benchmark, mostly tested without a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402


@pytest.fixture(autouse=True)
def own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_cuda.CACHE", tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    import rollout_cuda  # imports transformers, so not when the tests are collected

    monkeypatch.setattr(sys, "argv", ["rollout_cuda.py", *options])
    return rollout_cuda.main()


def test_rollout_cuda_exits_with_2_without_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.thorough
def test_rollout_cuda_measures_both_engines_on_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rollout_cuda.json"
    assert run(monkeypatch, "--smoke", "--workloads", "single", "--out", str(out)) == 0
    document = json.loads(out.read_text())
    ours, theirs = document["single"]
    assert (ours["engine"], theirs["engine"]) == ("perilune", "transformers, static cache")
    for row in (ours, theirs):
        assert row["steps"] == 8 and row["tokens_per_second"] > 0
        assert row["kernel_ms"] > 0 and 0 < row["share_of_floor"] < 1
        assert row["greedy_agreement"] == 1 and row["faults"] == []
    assert document["attention of a decoding step"][0]["context"] == 64
    page = report.page(ROOT / "benchmarks" / "results" / out.name, {"lead": [], **document})
    assert "| model | engine | tokens per second | step ms | kernel ms |" in page


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rollout_cuda_measures_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rollout_cuda.json"
    options = ("--models", "S", "--workloads", "single", "--repeats", "1", "--out", str(out))
    assert run(monkeypatch, *options) == 0
    assert all(row["kernel_ms"] > 0 for row in json.loads(out.read_text())["single"])
