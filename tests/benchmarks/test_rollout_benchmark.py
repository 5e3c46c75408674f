"""The rollout benchmark: equal work, the lower bound of time, merged records, and a smoke run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.rollout import run as running  # noqa: E402
from benchmarks.rollout.environments import Engine  # noqa: E402
from benchmarks.rollout.floor import Limits, floor  # noqa: E402
from benchmarks.rollout.outcome import Outcome, agreement, check, drawn_alike  # noqa: E402
from benchmarks.rollout.shapes import SHAPES, WORK, Case, Request  # noqa: E402
from benchmarks.rollout.store import Store  # noqa: E402
from benchmarks.rollout.view import view  # noqa: E402


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document that `--smoke` writes for two workloads."""
    folder = tmp_path_factory.mktemp("rollout")
    command = [sys.executable, "-m", "benchmarks.rollout", "--smoke", "--out", folder / "rollout.json"]
    environment = {**os.environ, "PERILUNE_BENCHMARKS": str(folder)}
    ran = subprocess.run(
        [*command, "--workloads", "ragged", "single"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dict(json.loads((folder / "rollout.json").read_text()))


@pytest.mark.thorough
def test_engines_do_the_same_work(smoke: dict[str, Any]) -> None:
    records = {(record["workload"], record["engine"]): record for record in smoke["records"]}
    assert len(records) == 4
    for workload in ("ragged", "single"):
        wanted = sum(r.n * r.new_tokens for r in Case("smoke", workload, "float32", 1).requests())
        for engine in ("perilune", "transformers"):
            record = records[workload, engine]
            assert record["tokens"] == wanted and not record["faults"]
            assert record["greedy"]["tokens"] == 1 and record["greedy"]["logprob_difference"] < 1e-4
            assert record["seconds"][0] > 0 and record["peak_mb"] > 50
            assert -6 < record["mean_logprob"] < -4, (
                "expected for random weights, 128 tokens and temperature 1"
            )
        assert records[workload, "perilune"]["split_ms"]["run"] > 0
    assert records["single", "perilune"]["first_token_seconds"][0] > 0


@pytest.mark.thorough
def test_view_shows_every_record(smoke: dict[str, Any]) -> None:
    page = view(smoke)
    assert [row["engine"] for row in page["ragged"]["one core"]] == ["perilune", "transformers"]
    assert "times as fast as `generate` of transformers" in page["lead"][1]


def test_floor_counts_flops_and_reads() -> None:
    """Computed by hand for one prompt of 3 tokens and 2 samples of 3 tokens."""
    shape, limits = SHAPES["smoke"], Limits({"float32": 1.0, "bfloat16": 1.0}, read=1e-9)
    least = floor(shape, [Request([1, 2, 3], 2, 3)], "float32", limits)
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    assert least.cache == pytest.approx(1e9 * kv * (2 * 4 + 2 * 5))
    assert least.decode == pytest.approx(1e9 * 2 * 4 * shape.parameters), "both steps read the weights"
    fast_memory = Limits(limits.product, read=1e30)
    least = floor(shape, [Request([1, 2, 3], 2, 3)], "float32", fast_memory)
    assert least.decode == pytest.approx(2 * shape.parameters * 2 * 2)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * (1 + 2 + 3)
    assert least.prefill == pytest.approx(
        2 * shape.layer_parameters * 3 + 2 * shape.head_parameters + attention
    )


def test_shapes_have_the_documented_parameter_counts() -> None:
    assert [round(SHAPES[name].parameters / 1e6, 1) for name in "TSM"] == [4.1, 88.9, 596.0]


@pytest.mark.parametrize("workload", ["group", "ragged", "single"])
def test_requests_are_deterministic_and_within_length_limits(workload: str) -> None:
    case = Case("T", workload, "float32", 1)
    assert case.requests() == case.requests()
    lengths = [request.new_tokens for request in case.requests()]
    assert min(lengths) >= WORK["T"].shortest and max(lengths) <= WORK["T"].longest


REQUESTS = [Request([1], 2, 2), Request([2], 1, 1)]
LOGPROBS = [[-1.0, -2.0], [-3.0, -4.0], [-5.0]]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "fault"),
    [
        ([[1, 2], [3, 4], [5]], LOGPROBS, None),
        ([[1, 2], [3], [5]], LOGPROBS, "too short"),
        ([[1, 2], [3, 4]], LOGPROBS, "2 samples of 3"),
        ([[1, 2], [1, 2], [5]], LOGPROBS, "the same"),
        ([[1, 2], [3, 9], [5]], LOGPROBS, "outside"),
        ([[1, 2], [3, 4], [5]], [[-1.0, -2.0], [-3.0, np.nan], [-5.0]], "log-probs"),
        ([[1, 2], [3, 4], [5]], [[-1.0, -2.0], [-3.0, 2.0], [-5.0]], "log-probs"),
        ([[1, 2], [3, 4], [5]], LOGPROBS[:2], "log-probs"),
    ],
)
def test_check_detects_unequal_work(tokens: Any, logprobs: Any, fault: str | None) -> None:
    faults, figures = check(REQUESTS, Outcome(tokens, logprobs), vocab=9)
    if fault is None:
        deviation = pytest.approx(2**0.5)
        assert not faults
        assert figures == {"tokens": 5, "mean_logprob": -3.0, "logprob_deviation": deviation}
    else:
        assert fault in " ".join(faults)


def test_drawn_alike_detects_another_distribution() -> None:
    """Tokens drawn uniformly from 8, or only from the first 4."""
    whole = {"tokens": 1000, "mean_logprob": -np.log(8) + 0.01, "logprob_deviation": 0.2}
    half = {"tokens": 1000, "mean_logprob": -np.log(4), "logprob_deviation": 0.2}
    assert drawn_alike(whole, {**whole, "mean_logprob": -np.log(8)})
    assert not drawn_alike(half, whole)
    assert drawn_alike({**whole, "mean_logprob": None}, half), "nothing to compare"


def test_contestant_records_why_its_engine_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CACHE", tmp_path)
    monkeypatch.setattr(running, "ENGINES", {"broken": Engine("not_there", prepares=True)})
    setup = {"checkpoint": str(tmp_path), "model": "smoke", "dtype": "float32", "threads": 1, "requests": []}
    broken = running.Contestant("broken", setup, here=True)
    broken.enter()
    broken.play(1)
    broken.finish()
    broken.close()
    assert broken.failed is not None and "not_there" in broken.failed
    assert not broken.rounds


def test_agreement_stops_at_the_first_different_token() -> None:
    reference = {"tokens": [[1, 2, 3], [4, 5, 6]], "logprobs": [[-1.0] * 3, [-1.0] * 3]}
    sample = {"tokens": [[1, 2, 3], [4, 9, 6]], "logprobs": [[-1.0, -1.5, -1.0], [-1.25, -8.0, -8.0]]}
    assert agreement(sample, reference) == {"tokens": 4 / 6, "logprob_difference": 0.5}


def record(engine: str, seconds: list[float], **changes: Any) -> dict[str, Any]:
    """A record of a benchmark run."""
    return {
        "model": "T",
        "workload": "group",
        "weights": "float32",
        "cores": 1,
        "engine": engine,
        "measured_at": "2026-01-01T00:00:00+00:00",
        "load_average": [0.0],
        "kv_cache": "float32",
        "versions": {engine: "1"},
        "peak_mb": 100.0,
        "tokens": 100,
        "seconds": seconds,
        "processor_seconds": seconds,
        "first_token_seconds": [None] * len(seconds),
        "mean_logprob": -1.0,
        "faults": [],
        "greedy": None,
        "floor": {"prefill": 0.1, "decode": 0.2, "cache": 0.2},
        "limits": {"product": {"float32": 1e9}, "read": 1e9},
    } | changes


def test_store_merges_runs(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    Store(path, ["--engines", "perilune"]).keep(record("perilune", [2.0]))
    Store(path, ["--engines", "openvino"]).keep(record("openvino", [1.0]))
    later = record("perilune", [1.5], measured_at="2026-01-02T00:00:00+00:00")
    Store(path, []).keep(later)
    records = json.loads(path.read_text())["records"]
    assert [(row["engine"], row["seconds"]) for row in records] == [("openvino", [1.0]), ("perilune", [1.5])]
    assert [row["command"] for row in records] == [
        "python -m benchmarks.rollout --engines openvino",
        "python -m benchmarks.rollout",
    ]


def document(*records: dict[str, Any]) -> dict[str, Any]:
    return {"about": "About.", "models": {"T": "small"}, "records": list(records)}


def test_view_lists_slower_cases_with_reasons() -> None:
    split = {"steps": 10, "schedule": 1.0, "run": 6.0, "draw": 2.0, "rest": 1.0}
    ours = record("perilune", [2.0, 3.0, 2.0], split_ms=split)
    small = record("perilune-int8", [1.0, 1.0, 2.0], kv_cache="int8")
    peer = record("openvino", [1.0, 1.0, 1.0], kv_cache="u8", peak_mb=50.0)
    slow = record("transformers", [8.0, 9.0, 8.0])
    page = view(document(ours, small, peer, slow))
    assert page["lead"][1].startswith(
        "Perilune's engine is 4.00 times as fast as `generate` of transformers, and 0.50"
    )
    text = page["findings"]
    assert "at least 3 times as fast as `generate` in 1 of 1" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| T group, float32, one core |"))
    assert row.split(" | ")[1:] == ["openvino", "0.50", "10.00", "0.83", "1.00", "20%", "", "25%", "50% |"]
    assert "by a factor of at most 2.0" in text


def test_view_reports_busy_machine() -> None:
    ours = record("perilune", [2.0], processor_seconds=[1.7])
    text = view(document(ours, record("transformers", [2.0])))["findings"]
    assert "In 1 of 2 measurements on one core, other processes" in text


def test_measurements_on_two_cores_do_not_count_as_disturbed() -> None:
    records = [record(name, [2.0], processor_seconds=[1.7]) for name in ("perilune", "transformers")]
    text = view(document(*({**one, "cores": 2} for one in records)))["findings"]
    assert "measurements on one core" not in text


def test_view_shows_wrong_and_failed_records_without_comparing() -> None:
    failed = {**record("llama.cpp", []), "failed": "out of memory"}
    del failed["faults"]
    wrong = record("openvino", [0.1], faults=["samples that are the same"])
    page = view(document(record("perilune", [1.0]), record("transformers", [2.0]), wrong, failed))
    rows = {row["engine"]: row for row in page["group"]["one core"]}
    assert rows["llama.cpp"]["KV cache"] == "failed: out of memory"
    assert rows["openvino"]["wrong"] == "samples that are the same"
    assert page["lead"][1] == "Perilune's engine is 2.00 times as fast as `generate` of transformers."
