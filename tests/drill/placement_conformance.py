"""Conformance tests for placements: a subclass of `PlacementConformance` has a fixture `placement`.

All attempts run on this machine, even for remote placements, so that the tests can inspect their processes.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drill_cases import PATIENCE, drill_bundle

from perilune.bundle.digest import recorded_digest
from perilune.bundle.verify import verify
from perilune.errors import RequestError
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Assignment, Placement, StagingRequest
from perilune.execution.processes import Presence, find_marked
from perilune.files import read_json, read_json_lines


def assigned(folder: Path, epoch: int = 1, run_id: str = "01DRILL") -> Assignment:
    return Assignment(run_id, epoch, folder / "attempts" / str(epoch))


def stage(
    placement: Placement, attempt: Assignment, bundle: Path, previous: Assignment | None = None
) -> Assignment:
    order = {"run": attempt.run_id, "epoch": attempt.epoch, "bundle_digest": recorded_digest(bundle)}
    placement.stage(attempt, StagingRequest(bundle, order, previous))
    return attempt


def look(placement: Placement, attempt: Assignment) -> Observation:
    seen = placement.observe(attempt)
    assert not seen.unseen
    return seen


def until(happened: Callable[[], Any], what: str) -> Any:
    """Wait, polling at an interval suitable for remote machines."""
    deadline = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE:.0f} s"
        time.sleep(0.2)
    return found


def home_has(placement: Placement, attempt: Assignment, path: str) -> None:
    """Wait until a file is fetched."""

    def pulled() -> bool:
        placement.pull(attempt)
        return (attempt.directory / path).exists()

    until(pulled, path)


def ended(placement: Placement, attempt: Assignment) -> Observation:
    def with_verdict() -> Observation | None:
        seen = look(placement, attempt)
        return seen if seen.verdict is not None else None

    seen: Observation = until(with_verdict, "a verdict")
    return seen


def working(attempt: Assignment) -> list[int]:
    """Live processes of the attempt's task."""
    claim = read_claim(attempt.directory / "runtime")
    assert claim is not None
    return [process.pid for process in find_marked(CLAIM_VARIABLE, claim.nonce)]


class PlacementConformance:
    """The tests that every placement passes."""

    def test_attempt_lifecycle_from_staging_to_removal(self, placement: Placement, tmp_path: Path) -> None:
        bundle = drill_bundle(tmp_path / "bundle", steps=3, gate=str(tmp_path / "gate"), say="hello")
        attempt = assigned(tmp_path)
        assert look(placement, attempt).claim is None
        for _ in range(2):  # staging is repeated when its response is lost
            stage(placement, attempt, bundle)
        assert look(placement, attempt).claim is None
        placement.start(attempt)
        claim = until(lambda: look(placement, attempt).claim, "a claim")
        placement.start(attempt)  # start is repeated when its response is lost
        seen = look(placement, attempt)
        assert (seen.claim, seen.worker, seen.verdict) == (claim, Presence.PRESENT, None)
        home_has(placement, attempt, "runtime/runtime.log")
        (tmp_path / "gate").touch()
        assert ended(placement, attempt).verdict.succeeded  # type: ignore[union-attr]
        placement.pull(attempt, whole=True)
        assert verify(attempt.directory, recorded_digest(bundle)) == []
        assert read_json(attempt.directory / "runtime" / "result.json")["epoch"] == 1
        assert "hello" in (attempt.directory / "runtime" / "runtime.log").read_text()
        assert placement.stop(attempt)
        placement.remove(attempt)
        placement.remove(attempt)
        assert verify(attempt.directory) == []

    def test_next_attempt_resumes_from_checkpoint_of_dead_attempt(
        self, placement: Placement, tmp_path: Path
    ) -> None:
        bundle = drill_bundle(tmp_path / "bundle", steps=4, fail_at=2, how="daemon", fresh_only=True)
        first, second = assigned(tmp_path), assigned(tmp_path, 2)
        stage(placement, first, bundle)
        placement.start(first)
        home_has(placement, first, "runtime/daemon.pid")
        home_has(placement, first, "artifacts/checkpoints/step-000002/state.json")
        claim = look(placement, first).claim
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        until(lambda: look(placement, first).worker is Presence.ABSENT, "the death of the worker")
        assert look(placement, first).verdict is None
        assert placement.stop(first) and not working(first)  # daemons included
        stage(placement, second, bundle, first)
        placement.start(second)
        ended(placement, second)
        placement.pull(second, whole=True)
        assert read_json(second.directory / "artifacts" / "summary.json")["began_at"] == 2
        rows = read_json_lines(second.directory / "artifacts" / "metrics.jsonl")
        assert [row["total"] for row in rows] == [2, 6, 12, 20]
        assert verify(second.directory) == []

    def test_stop_ends_all_processes_and_prevents_a_later_start(
        self, placement: Placement, tmp_path: Path
    ) -> None:
        bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="hang")
        attempt, never = assigned(tmp_path), assigned(tmp_path, 1, "01NEVER")
        stage(placement, attempt, bundle)
        placement.start(attempt)
        home_has(placement, attempt, "runtime/events.jsonl")
        assert working(attempt)
        assert placement.stop(attempt) and not working(attempt)
        verdict = look(placement, attempt).verdict
        assert verdict is not None and verdict.cause == "stopped"
        placement.pull(attempt, whole=True)
        assert verify(attempt.directory) == []  # its finished files are complete

        never = Assignment(never.run_id, 1, tmp_path / "never")
        stage(placement, never, bundle)
        assert placement.stop(never)
        claim = look(placement, never).claim
        placement.start(never)  # as from a command that was suspended
        time.sleep(0.5)
        until(lambda: not placement.is_starting(never), "the late worker's end")
        assert claim is not None and look(placement, never).claim == claim
        placement.pull(never)
        assert not (never.directory / "runtime" / "runtime.log").exists()

    def test_exit_code_is_reported_and_changed_bundle_is_refused(
        self, placement: Placement, tmp_path: Path
    ) -> None:
        bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="exit7")
        attempt = stage(placement, assigned(tmp_path), bundle)
        placement.start(attempt)
        verdict = ended(placement, attempt).verdict
        assert verdict is not None and (verdict.cause, verdict.exit_code) == ("user_exit", 7)
        job = bundle / "job.json"
        job.chmod(0o644)
        job.write_bytes(job.read_bytes() + b" ")
        with pytest.raises(RequestError, match=r"job\.json"):
            stage(placement, assigned(tmp_path, 2), bundle)
