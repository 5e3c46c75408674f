"""Comparison of runs: differences grouped by origin, and whether a run reproduced another."""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from perilune.bundle.compare import Change, compare_artifacts, compare_runs
from perilune.errors import RequestError

PRECHECK: dict[str, Any] = {
    "python": {"version": "3.11.7", "prefix": "/a"},
    "packages": {
        "yaml": {"file": "/a/yaml.py", "distribution": "PyYAML", "version": "6.0", "editable": False},
        "mine": {"file": "/a/mine.py", "distribution": None, "version": None, "editable": False},
    },
    "torch": {"version": "2.13.0", "threads": 2},
    "machine": {"processor": {"model": "A", "simd": ["avx2"]}},
    "git": {"commit": "abc", "dirty": False},
    "environment": ["PATH"],
}
SUMMARY = {"kind": "training", "seconds": 3.5, "tokens_per_second": 900.0, "last": {"reward": 0.5}}
ROWS = [{"step": step, "reward": step / 10, "kl_behaviour": 0.0} for step in range(1, 6)]


@pytest.fixture
def make_run(make_attempt: Callable[[str], Path]) -> Callable[[str], Path]:
    """Makes an attempt with all files that a run writes, by name."""

    def make(name: str) -> Path:
        run = make_attempt(name)
        artifacts = run / "artifacts"
        contents: dict[str, str | bytes] = {
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
            "timings.jsonl": f'{{"step": 1, "sampling": {len(name)}}}\n',
            "hardware.jsonl": f'{{"time": {len(name)}}}\n',
            "precheck.json": json.dumps(PRECHECK),
            "summary.json": json.dumps(SUMMARY),
            "task.log": name,
            "manifest.json": name,
            "episodes/step-000001.parquet": b"episodes",
            "dataset/train.jsonl": b"rows",
            f"checkpoints/step-{len(name)}/model.safetensors": b"on the way",
            "checkpoints/final/model.safetensors": b"weights",
        }
        for relative, content in contents.items():
            path = artifacts / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return run

    return make


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps(change(value) or value))


def test_compare_ignores_times_logs_and_machine(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("first"), make_run("second attempt")
    edit_json(b / "artifacts" / "precheck.json", lambda check: check["environment"].append("HOME"))
    edit_json(b / "artifacts" / "summary.json", lambda summary: summary.update(seconds=9.0))
    assert compare_artifacts(a, b) == []


def test_compare_ignores_peak_memory_but_not_planned_memory(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    for run, planned, peak in ((a, 500, 400), (b, 500, 410)):
        memory = {"planned_bytes": planned, "peak_bytes": peak}
        edit_json(
            run / "artifacts" / "summary.json", lambda summary, memory=memory: summary.update(memory=memory)
        )
    assert compare_artifacts(a, b) == []
    difference = compare_runs(a, b)
    assert difference.results == ()
    assert [change.key for change in difference.timings] == ["memory.peak_bytes"]
    edit_json(b / "artifacts" / "summary.json", lambda summary: summary["memory"].update(planned_bytes=501))
    (changed,) = compare_artifacts(a, b)
    assert changed.place == "memory.planned_bytes"


@pytest.mark.parametrize(
    "name", ["episodes/step-000001.parquet", "dataset/train.jsonl", "checkpoints/final/model.safetensors"]
)
def test_compare_finds_any_changed_or_missing_result_file(name: str, make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    (b / "artifacts" / name).write_bytes(b"other")
    (difference,) = compare_artifacts(a, b)
    assert (difference.path, difference.kind) == (f"artifacts/{name}", "changed")
    (b / "artifacts" / name).unlink()
    assert [difference.kind for difference in compare_artifacts(a, b)] == ["missing"]
    assert [difference.kind for difference in compare_artifacts(b, a)] == ["extra"]


def test_compare_names_first_differing_step_and_key_with_both_values(
    make_run: Callable[[str], Path],
) -> None:
    a, b = make_run("a"), make_run("b")
    rows = [dict(row) for row in ROWS]
    rows[2]["reward"] = 0.25
    rows[3]["kl_behaviour"] = 1.0
    (b / "artifacts" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (difference,) = compare_artifacts(a, b)
    assert difference.path == "artifacts/metrics.jsonl"
    assert difference.place == "metrics at step 3, reward"
    assert (difference.expected, difference.actual) == ("0.3", "0.25")
    assert "step 3, reward" in str(difference) and "0.25" in str(difference)


def test_compare_names_missing_step(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    lines = (b / "artifacts" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "artifacts" / "metrics.jsonl").write_text("".join(lines[:-1]))
    (difference,) = compare_artifacts(a, b)
    assert (difference.place, difference.actual) == ("metrics at step 5", "absent")


def test_compare_reports_equal_values_written_in_different_bytes(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    text = (b / "artifacts" / "metrics.jsonl").read_text()
    (b / "artifacts" / "metrics.jsonl").write_text(text.replace(": ", ":"))
    assert [difference.path for difference in compare_artifacts(a, b)] == ["artifacts/metrics.jsonl"]


def test_compare_names_changed_key_of_summary(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    edit_json(b / "artifacts" / "summary.json", lambda summary: summary.update(last={"reward": 0.75}))
    (difference,) = compare_artifacts(a, b)
    assert (difference.place, difference.expected, difference.actual) == ("last.reward", "0.5", "0.75")


def test_compare_rejects_run_without_artifacts(make_run: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no artifacts"):
        compare_artifacts(make_run("a"), tmp_path / "absent")


def test_compare_runs_finds_no_differences_between_equal_runs(make_run: Callable[[str], Path]) -> None:
    diff = compare_runs(make_run("a"), make_run("b"))
    assert all(changes == () for changes in diff.parts().values())


def test_compare_runs_groups_differences_by_origin(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")

    def job(value: Any) -> None:
        value["spec"]["lr"] = 0.01
        value["inputs"][1]["digest"] = "0" * 64

    def precheck(value: Any) -> None:
        value["packages"]["yaml"]["version"] = "6.1"
        value["packages"]["mine"]["file"] = "/b/mine.py"
        value["machine"]["processor"]["simd"].append("avx512f")
        value["torch"]["threads"] = 4
        value["git"] = {"commit": "abc", "dirty": True, "patch": {"sha256": "f00"}}
        value["code"] = {"differs_from_bundle": ["perilune/learn/losses.py"]}

    edit_json(b / "job.json", job)
    edit_json(b / "artifacts" / "precheck.json", precheck)
    edit_json(b / "artifacts" / "summary.json", lambda value: value.update(seconds=7.0, last={"reward": 0.6}))
    (b / "artifacts" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.2, "kl_behaviour": 0.0}\n')
    keys = {name: [change.key for change in changes] for name, changes in compare_runs(a, b).parts().items()}
    assert keys == {
        "recipe": ["spec.lr"],
        "code": ["differs_from_bundle", "git.dirty", "git.patch"],
        "packages": ["PyYAML", "mine"],
        "machine": ["machine.processor.simd", "torch.threads"],
        "inputs": ["data"],
        "results": ["metrics at step 1, reward", "last.reward"],
        "timings": ["seconds"],
    }
    json.dumps(asdict(compare_runs(a, b)))


def test_compare_runs_names_changed_source_files(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    (wheel,) = (bundle / "scripts").glob("*.whl")
    changed = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            suffix = b"# edited\n" if member.filename == "perilune/errors.py" else b""
            new.writestr(member, old.read(member) + suffix)
    wheel.chmod(0o644)
    shutil.copyfile(changed, wheel)
    assert [change.key for change in compare_runs(pristine, bundle).code] == ["source.perilune/errors.py"]


def test_compare_runs_names_damaged_file(make_run: Callable[[str], Path]) -> None:
    a, b = make_run("a"), make_run("b")
    (b / "artifacts" / "precheck.json").write_text("{")
    with pytest.raises(RequestError, match=r"precheck\.json:1"):
        compare_runs(a, b)


def test_change_counts_differences_of_long_values_in_text_only() -> None:
    long, other = list(range(200)), [*range(199), 7]
    change = Change("correct_per_task", long, other)
    assert str(change) == "correct_per_task: 1 of 200 values differ"
    assert change.a == long
    assert str(Change("pass@1.mean", 0.2290039, 1.0)) == "pass@1.mean: 0.229004 -> 1"
