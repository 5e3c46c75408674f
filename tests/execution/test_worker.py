"""The worker with real processes: its artifacts, its verdicts, and the end of all its processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drill_cases import (
    drill_bundle,
    drill_job,
    family,
    has_event,
    start_worker,
    verdict_of,
    wait_for,
)

from perilune.bundle.digest import BUNDLE_FILE, bundle_document, frozen_entries
from perilune.bundle.freeze import freeze
from perilune.bundle.verify import verify
from perilune.execution.claim import read_claim
from perilune.execution.processes import Presence
from perilune.files import read_json, read_json_lines

pytestmark = pytest.mark.xdist_group("worker")  # tests share one module fixture

ENDINGS: dict[str, tuple[str, int | None, int | None, str]] = {
    # how: cause, exit code, signal, a word of the message
    "raise": ("crashed", 1, None, "KeyError: 'no such thing' (drill_task.py:"),
    "request": ("request_error", 2, None, "data.jsonl:3"),
    "work": ("work_failed", 1, None, "nothing was learnt"),
    "exit7": ("user_exit", 7, None, "exited with code 7"),
    "stall": (
        "stalled",
        1,
        None,
        "a drill: nothing has happened for 0.3 s; the stacks of all threads are in runtime/stacks.txt",
    ),
    "stall_in_c": ("stalled", 1, None, "holds the interpreter's lock: nothing has happened; the stacks"),
    "quit0": ("artifact_missing", 0, None, "without a summary"),
    "segv": ("signalled", None, signal.SIGSEGV, "SIGSEGV"),
    "kill": ("killed", None, signal.SIGKILL, "SIGKILL"),
    "enospc": ("disk_full", 1, None, "the disk is full ("),
    "memory": ("out_of_memory", 1, None, "MemoryError"),
    "nothing": ("artifact_missing", 1, None, "without its output artifacts/data"),
    "link": ("artifact_invalid", 0, None, "plain file"),
    "": ("", 0, None, ""),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Run one bundle for each ending, all concurrently."""
    root = tmp_path_factory.mktemp("endings")
    bundles = {how: drill_bundle(root / (how or "well"), how=how, fail_at=1) for how in ENDINGS}
    workers = [start_worker(bundle, "--epoch", "1") for bundle in bundles.values()]
    for worker in workers:
        worker.communicate()
    yield bundles


@pytest.mark.parametrize("how", ENDINGS)
def test_verdict_names_cause_exit_code_and_signal(ended: dict[str, Path], how: str) -> None:
    cause, exit_code, number, word = ENDINGS[how]
    verdict = verdict_of(ended[how])
    assert (verdict["cause"], verdict["exit_code"], verdict["signal"]) == (cause, exit_code, number)
    assert word in verdict["message"]
    assert verdict["epoch"] == 1


def test_crash_traceback_is_in_log_and_not_in_message(ended: dict[str, Path]) -> None:
    log = (ended["raise"] / "artifacts" / "task.log").read_text()
    assert "Traceback" in log and "in _fail" in log
    assert "\n" not in verdict_of(ended["raise"])["message"]
    assert "Traceback" not in (ended["request"] / "artifacts" / "task.log").read_text()
    assert "Segmentation fault" in (ended["segv"] / "artifacts" / "task.log").read_text()


def test_successful_run_leaves_verified_artifacts(ended: dict[str, Path]) -> None:
    bundle = ended[""]
    assert verify(bundle) == []
    artifacts = bundle / "artifacts"
    assert [row["total"] for row in read_json_lines(artifacts / "metrics.jsonl")] == [2, 6, 12]
    assert read_json(artifacts / "summary.json") == {"kind": "dataset", "total": 12, "began_at": 0}
    assert read_json(artifacts / "precheck.json")["packages"]["drill_task"]["version"] == "1.0"
    assert (artifacts / "task.log").read_bytes() == (bundle / "runtime" / "runtime.log").read_bytes()
    assert (artifacts / "hardware.jsonl").stat().st_size > 0
    beat = read_json(bundle / "runtime" / "heartbeat.json")
    assert beat["epoch"] == 1 and 1 <= beat["count"] <= verdict_of(bundle)["seconds"] + 1
    assert not (bundle / "runtime" / ".reserve").exists()


def test_precheck_of_a_failed_run_lists_what_was_loaded_last(ended: dict[str, Path]) -> None:
    for how, is_loaded in (("work", True), ("raise", False)):
        packages = read_json(ended[how] / "artifacts" / "precheck.json")["packages"]
        assert ("yaml" in packages) == is_loaded


def test_failed_runs_have_verified_artifacts_and_manifest_digest(ended: dict[str, Path]) -> None:
    for how in ("raise", "kill", "segv"):
        assert verify(ended[how]) == []
        assert verdict_of(ended[how])["manifest_digest"]
    (ended["kill"] / "artifacts" / "metrics.jsonl").write_text("{}\n")
    assert [difference.path for difference in verify(ended["kill"])] == ["artifacts/metrics.jsonl"]


def test_worker_rejects_modified_bundle_before_running(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle")
    job = bundle / "job.json"
    job.chmod(0o644)
    job.write_bytes(job.read_bytes().replace(b'"seed":1', b'"seed":2'))
    assert start_worker(bundle).wait() == 1
    verdict = verdict_of(bundle)
    assert verdict["cause"] == "bundle_rejected" and "job.json" in verdict["message"]
    assert not (bundle / "runtime" / "runtime.log").exists()


def test_worker_rejects_bundle_with_unexpected_digest(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle")
    (bundle / "runtime" / "run.json").write_text(json.dumps({"bundle_digest": "0" * 64}))
    start_worker(bundle).wait()
    assert verdict_of(bundle)["cause"] == "bundle_rejected"


def test_worker_leaves_a_verdict_for_a_job_that_it_cannot_read(tmp_path: Path) -> None:
    """For example one of another version, whose digest is right."""
    bundle = drill_bundle(tmp_path / "bundle")
    for name, content in (("job.json", b"{}"), (BUNDLE_FILE, b"")):
        (bundle / name).chmod(0o644)
        (bundle / name).write_bytes(content or bundle_document(frozen_entries(bundle)))
    assert start_worker(bundle).wait() == 1
    verdict = verdict_of(bundle)
    assert verdict["cause"] == "request_error" and "job.json" in verdict["message"]


def test_secret_reaches_task_and_no_file_or_command_line(tmp_path: Path) -> None:
    value = 'sparrow-"5d1e'
    bundle = tmp_path / "bundle"
    freeze(drill_job(secrets=("DRILL_TOKEN",), tell="DRILL_TOKEN", steps=1), {}, bundle)
    worker = start_worker(bundle, DRILL_TOKEN=value)
    wait_for(lambda: family(bundle), "a task process")
    commands = b"".join(
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.is_dir()
    )
    worker.wait()
    assert verdict_of(bundle)["cause"] == ""
    assert "the secret is [DRILL_TOKEN]." in (bundle / "artifacts" / "task.log").read_text()
    assert value.encode() not in commands
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"sparrow" not in path.read_bytes(), path


def test_worker_reports_missing_secret_before_running(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    freeze(drill_job(secrets=("DRILL_ABSENT",)), {}, bundle)
    start_worker(bundle).wait()
    verdict = verdict_of(bundle)
    assert verdict["cause"] == "request_error" and "export DRILL_ABSENT" in verdict["message"]


def test_task_environment_contains_only_allowed_variables(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", steps=1)
    start_worker(bundle, STRANGE_VARIABLE="1", HF_TOKEN="hf_x", HF_HOME="/tmp/hf").wait()
    names = read_json(bundle / "artifacts" / "precheck.json")["environment"]
    assert {"PATH", "HF_HOME", "OMP_NUM_THREADS", "PYTHONHASHSEED"} <= set(names)
    assert not {"STRANGE_VARIABLE", "HF_TOKEN"} & set(names)


def test_second_worker_is_refused_while_first_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    bundle = drill_bundle(tmp_path / "bundle", gate=str(gate))
    first = start_worker(bundle, "--epoch", "1")
    wait_for(lambda: read_claim(bundle / "runtime"), "a claim")
    for epoch in ("1", "2"):
        second = start_worker(bundle, "--epoch", epoch)
        _, output = second.communicate()
        assert second.returncode == 2 and f"worker {first.pid} (attempt 1) is running this bundle" in output
    gate.touch()
    assert first.wait() == 0


def test_exactly_one_of_concurrent_workers_claims_the_bundle(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", steps=1)
    workers = [start_worker(bundle, "--epoch", "1") for _ in range(4)]
    for worker in workers:
        worker.communicate()
    assert sorted(worker.returncode for worker in workers) == [0, 2, 2, 2]
    assert verdict_of(bundle)["cause"] == ""


def test_worker_refuses_old_or_used_epoch_and_newer_one_resumes(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", steps=4, fail_at=2, how="hang", fresh_only=True)
    first = start_worker(bundle, "--epoch", "2")
    wait_for(lambda: has_event(bundle, "hangs"), "the hang")
    first.kill()
    first.wait()
    for epoch, words in (("1", "out of date"), ("2", "already been claimed")):
        refused = start_worker(bundle, "--epoch", epoch)
        _, output = refused.communicate()
        assert refused.returncode == 2 and words in output
    assert (
        start_worker(bundle).wait() == 0
    )  # started by hand: the next epoch resumes from the last checkpoint
    assert verdict_of(bundle)["epoch"] == 3
    assert read_json(bundle / "artifacts" / "summary.json")["began_at"] == 2
    again = start_worker(bundle)
    _, output = again.communicate()
    assert again.returncode == 2 and "has already run to its end (attempt 3)" in output


def test_task_dies_with_its_worker(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="hang")
    worker = start_worker(bundle)
    wait_for(lambda: has_event(bundle, "hangs"), "the hang")
    assert len(family(bundle)) == 1
    worker.kill()
    worker.wait()
    wait_for(lambda: not family(bundle), "the task's death")
    assert not (bundle / "runtime" / "result.json").exists()
    claim = read_claim(bundle / "runtime")
    assert claim is not None and claim.process.presence() is Presence.ABSENT


@pytest.mark.parametrize("how", ["hang", "stubborn", "daemon"])
def test_stop_ends_every_process_of_the_task(tmp_path: Path, how: str) -> None:
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how=how)
    worker = start_worker(bundle, "--grace", "0.5")
    wait_for(lambda: has_event(bundle, "hangs"), "the hang")
    assert len(family(bundle)) == (2 if how == "daemon" else 1)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait() == 1
    assert not family(bundle)
    verdict = verdict_of(bundle)
    assert verdict["cause"] == "stopped"
    assert verdict["signal"] == (signal.SIGKILL if how == "stubborn" else None)
    assert verify(bundle) == []  # finished artifacts are complete


def test_end_remaining_processes_kills_daemon_of_a_dead_worker(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="daemon")
    worker = start_worker(bundle)
    wait_for(lambda: has_event(bundle, "hangs"), "the hang")
    worker.kill()
    worker.wait()
    daemon = int((bundle / "runtime" / "daemon.pid").read_text())
    claim = read_claim(bundle / "runtime")
    assert claim is not None and daemon in family(bundle)
    assert claim.end_remaining_processes(grace=0.1)
    assert not family(bundle)


FULL_DISK = """
mount -t tmpfs -o size=$5 none "$1" && cp -r "$2" "$1/bundle" && chmod 444 "$1"/bundle/job.json
"$3" -m perilune.execution.worker "$1/bundle"; cp "$1/bundle/runtime/result.json" "$4"
"""


def test_task_that_fills_the_disk_gets_disk_full_verdict(tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="fill")
    disk, copy = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) + (1 << 19)
    places = [str(disk), str(bundle), sys.executable, str(copy), str(size)]
    subprocess.run([*isolated, "sh", "-c", FULL_DISK, "sh", *places], check=True, env=dict(os.environ))
    verdict: dict[str, Any] = read_json(copy)
    assert (verdict["cause"], verdict["exit_code"]) == ("disk_full", 1)
