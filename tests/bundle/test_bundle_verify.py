"""Verification finds and names every change to a frozen file."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.bundle.attested import REMOVED, read_unverified_removals
from perilune.bundle.digest import (
    BUNDLE_FILE,
    Entry,
    bundle_digest,
    bundle_document,
    frozen_entries,
    recorded_digest,
)
from perilune.bundle.inspection import inspect, read_job
from perilune.bundle.manifest import manifest_bytes, write_manifest
from perilune.bundle.verify import require_verified, verify
from perilune.errors import RequestError, WorkFailedError
from perilune.files import canonical_json, sha256_bytes, sha256_file, write_json

MANY = settings(max_examples=40, deadline=None)


@contextmanager
def copied(bundle: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(bundle, Path(folder) / "bundle"))


def frozen_files(bundle: Path) -> list[str]:
    return [entry.path for entry in frozen_entries(bundle)]


def rewrite(path: Path, data: bytes) -> None:
    """Replaces the contents and keeps the mode, as an editor run by root does."""
    mode = path.stat().st_mode & 0o777
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(mode)


def first_difference(bundle: Path) -> tuple[str, str]:
    difference = verify(bundle)[0]
    return difference.path, difference.kind


def test_verify_accepts_frozen_bundle(pristine: Path) -> None:
    assert verify(pristine) == []
    assert verify(pristine, recorded_digest(pristine)) == []


def test_verify_does_not_read_runtime_folder(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker replaces its heartbeat while the frozen files are compared."""
    with copied(pristine) as bundle:
        (bundle / "runtime").mkdir(exist_ok=True)
        (bundle / "runtime" / ".heartbeat.tmp").write_text("{}")
        real = os.scandir

        def scan_without_runtime(folder: Any = ".") -> Any:
            assert not str(folder).endswith("/runtime")
            return real(folder)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scan_without_runtime)
            assert verify(bundle) == []
            assert bundle_digest(bundle) == recorded_digest(bundle)


@MANY
@given(data=st.data())
def test_verify_finds_any_flipped_byte(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*frozen_files(pristine), BUNDLE_FILE]))
    with copied(pristine) as bundle:
        content = bytearray((bundle / name).read_bytes())
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
        rewrite(bundle / name, bytes(content))
        assert first_difference(bundle) == (name, "changed")
        with pytest.raises(RequestError, match=f"{Path(name).name} has changed"):
            require_verified(bundle)


@MANY
@given(data=st.data())
def test_verify_finds_any_removed_or_appended_byte(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*frozen_files(pristine), BUNDLE_FILE]))
    with copied(pristine) as bundle:
        content = (bundle / name).read_bytes()
        change = data.draw(st.sampled_from([content[:-1], content + b"\0", content + b" ", b""]))
        rewrite(bundle / name, change)
        assert first_difference(bundle) == (name, "changed")


@MANY
@given(data=st.data())
def test_verify_finds_any_mode_change(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(frozen_files(pristine)))
    with copied(pristine) as bundle:
        mode = (bundle / name).stat().st_mode & 0o777
        other = data.draw(st.integers(0o400, 0o777).filter(lambda drawn: drawn != mode))
        (bundle / name).chmod(other)
        (difference,) = verify(bundle)
        assert (difference.path, difference.kind) == (name, "mode")
        assert (difference.expected, difference.actual) == (f"{mode:04o}", f"{other:04o}")


@MANY
@given(data=st.data())
def test_verify_reports_renamed_file_under_both_names(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(frozen_files(pristine)))
    suffix = data.draw(st.text("abc.é ", min_size=1, max_size=8))
    with copied(pristine) as bundle:
        (bundle / name).rename(bundle / f"{name}{suffix}")
        differences = {(difference.path, difference.kind) for difference in verify(bundle)}
        assert differences == {(name, "missing"), (f"{name}{suffix}", "extra")}


@MANY
@given(data=st.data())
def test_verify_finds_any_added_file_folder_pipe_or_link(pristine: Path, data: st.DataObject) -> None:
    folder = data.draw(
        st.sampled_from(["", "inputs/", "inputs/checkpoint/", "scripts/", "new/", "inputs/a/b/"])
    )
    make: Callable[[Path], object] = data.draw(
        st.sampled_from([Path.touch, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
    )
    with copied(pristine) as bundle:
        path = bundle / folder / "added"
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        (difference,) = verify(bundle)
        assert (difference.path, difference.kind) == (f"{folder}added", "extra")


@MANY
@given(data=st.data())
def test_verify_finds_file_replaced_by_link_to_equal_file(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(frozen_files(pristine)))
    with copied(pristine) as bundle:
        (bundle / name).unlink()
        (bundle / name).symlink_to(pristine / name)
        assert first_difference(bundle) == (name, "type")


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("bundle.json", ("bundle.json", "type")),
        ("artifacts/manifest.json", ("artifacts/manifest.json", "type")),
        ("runtime/result.json", ("artifacts/manifest.json", "changed")),  # an invalid result confirms nothing
    ],
)
def test_verify_follows_no_link(bundle: Path, tmp_path: Path, name: str, difference: tuple[str, str]) -> None:
    write_artifacts(bundle)
    (bundle / name).rename(tmp_path / "outside")
    (bundle / name).symlink_to(tmp_path / "outside")
    assert first_difference(bundle) == difference
    (tmp_path / "outside").unlink()
    assert first_difference(bundle) == difference


@pytest.mark.parametrize("name", ["bundle.json", "job.json", "artifacts/manifest.json"])
def test_verify_reads_no_pipe(bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).unlink(missing_ok=True)
    os.mkfifo(bundle / name)
    assert first_difference(bundle) == (name, "type")
    os.mkfifo(bundle / "runtime" / "result.json")
    assert first_difference(bundle) == (name, "type")
    os.mkfifo(bundle / REMOVED)
    assert read_unverified_removals(bundle) == frozenset()


def test_digest_excludes_artifacts_and_runtime(bundle: Path) -> None:
    digest = bundle_digest(bundle)
    (bundle / "artifacts" / "metrics.jsonl").write_text("{}\n")
    (bundle / "runtime" / "deep").mkdir()
    (bundle / "runtime" / "deep" / "run.json").write_text("{}")
    assert verify(bundle) == []
    assert bundle_digest(bundle) == digest


def test_verify_with_known_digest_finds_rewritten_bundle_file(bundle: Path) -> None:
    known = recorded_digest(bundle)
    rewrite(bundle / "inputs" / "data", b"other rows\n")
    files = [entry._asdict() for entry in frozen_entries(bundle)]
    document = {"schema_version": 1, "digest": sha256_bytes(canonical_json(files)), "files": files}
    rewrite(bundle / BUNDLE_FILE, canonical_json(document) + b"\n")
    assert verify(bundle) == []
    assert [difference.path for difference in verify(bundle, known)] == [BUNDLE_FILE]


def test_verify_sorts_differences_by_path(bundle: Path) -> None:
    (bundle / "scripts" / "bootstrap.py").unlink()
    rewrite(bundle / "inputs" / "checkpoint" / "config.json", b"{}")
    (bundle / "job.json").chmod(0o600)
    assert [difference.path for difference in verify(bundle)] == [
        *("inputs/checkpoint/config.json", "job.json", "scripts/bootstrap.py"),
    ]


def test_verify_rejects_missing_and_incomplete_bundles(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(RequestError, match="not a bundle"):
        verify(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="not a bundle"):
        verify(tmp_path / "file")
    (bundle / BUNDLE_FILE).unlink()
    assert first_difference(bundle) == (BUNDLE_FILE, "missing")
    (tmp_path / "empty").mkdir()
    assert first_difference(tmp_path / "empty") == (BUNDLE_FILE, "missing")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"null", b"[]", b'{"files": 3}', b'{"files": [{"path": 1}]}', b"\xff", b"[" * 100_000),
        b'{"files": [{"path": ["x"], "size": 1, "sha256": "", "mode": ""}]}',
        b'{"files": [{"path": "a", "size": NaN, "sha256": "", "mode": ""}]}',
        b'{"files": [{"path": "\\ud800", "size": 1, "sha256": "", "mode": ""}]}',
    ],
)
def test_verify_reports_malformed_bundle_file(bundle: Path, content: bytes) -> None:
    rewrite(bundle / BUNDLE_FILE, content)
    assert first_difference(bundle) == (BUNDLE_FILE, "changed")


def test_verify_reports_paths_that_are_not_text(bundle: Path) -> None:
    rewrite(bundle / BUNDLE_FILE, bundle_document([Entry(1, 2, "0", "0444")]))  # type: ignore[arg-type]
    assert first_difference(bundle) == (BUNDLE_FILE, "changed")


def test_verify_reports_manifest_whose_entries_are_lists(bundle: Path) -> None:
    write_artifacts(bundle)
    (bundle / "runtime" / "result.json").unlink()
    listed: Any = {"metrics.jsonl": ["size", "sha256"]}
    (bundle / "artifacts" / "manifest.json").write_bytes(manifest_bytes(listed))
    assert first_difference(bundle) == ("artifacts/manifest.json", "changed")


def test_verify_reports_listed_path_outside_bundle_as_missing(bundle: Path) -> None:
    secret = {"path": "../../etc/passwd", "size": 1, "sha256": "0", "mode": "0444"}
    document = {"schema_version": 1, "digest": sha256_bytes(canonical_json([secret])), "files": [secret]}
    rewrite(bundle / BUNDLE_FILE, canonical_json(document) + b"\n")
    assert ("../../etc/passwd", "missing") in {(diff.path, diff.kind) for diff in verify(bundle)}


def write_artifacts(bundle: Path) -> None:
    """Writes artifacts, two of them with equal base names, a manifest and a result."""
    for name in ("checkpoints/step-1/model", "checkpoints/final/model", "metrics.jsonl"):
        path = bundle / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    digest = write_manifest(bundle)
    result = {"epoch": 1, "exit_code": 0, "signal": None, "manifest_digest": digest}
    write_json(bundle / "runtime" / "result.json", result)


def test_manifest_lists_artifacts_by_full_path(bundle: Path) -> None:
    write_artifacts(bundle)
    files = json.loads((bundle / "artifacts" / "manifest.json").read_bytes())["files"]
    assert sorted(files) == ["checkpoints/final/model", "checkpoints/step-1/model", "metrics.jsonl"]
    for name, facts in files.items():
        path = bundle / "artifacts" / name
        assert facts == {"size": path.stat().st_size, "sha256": sha256_file(path)}
    assert verify(bundle) == []


def test_write_manifest_is_idempotent(bundle: Path) -> None:
    write_artifacts(bundle)
    assert write_manifest(bundle) == sha256_file(bundle / "artifacts" / "manifest.json")
    assert verify(bundle) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda path: path.write_text("metrics.jsonL"), "changed"),
        (lambda path: path.write_text("longer than it was"), "changed"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "type"),
    ],
)
def test_verify_finds_changed_artifact(bundle: Path, change: Callable[[Path], object], kind: str) -> None:
    write_artifacts(bundle)
    change(bundle / "artifacts" / "metrics.jsonl")
    assert first_difference(bundle) == ("artifacts/metrics.jsonl", kind)


def test_verify_finds_added_artifact(bundle: Path) -> None:
    write_artifacts(bundle)
    (bundle / "artifacts" / "episodes").mkdir()
    (bundle / "artifacts" / "episodes" / "late").touch()
    assert first_difference(bundle) == ("artifacts/episodes/late", "extra")


def test_verify_checks_manifest_against_digest_in_result(bundle: Path) -> None:
    write_artifacts(bundle)
    (bundle / "artifacts" / "metrics.jsonl").write_text("better figures")
    write_manifest(bundle)
    assert first_difference(bundle) == ("artifacts/manifest.json", "changed")
    (bundle / "artifacts" / "manifest.json").unlink()
    assert first_difference(bundle) == ("artifacts/manifest.json", "missing")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": {"a": {"size": 1}}}'])
def test_verify_finds_damaged_manifest(bundle: Path, content: str) -> None:
    write_artifacts(bundle)
    (bundle / "artifacts" / "manifest.json").write_text(content)
    (bundle / "runtime" / "result.json").unlink()
    assert first_difference(bundle) == ("artifacts/manifest.json", "changed")


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_verify_rejects_manifest_when_result_is_damaged(bundle: Path, content: str) -> None:
    write_artifacts(bundle)
    (bundle / "runtime" / "result.json").write_text(content)
    assert first_difference(bundle) == ("artifacts/manifest.json", "changed")


def test_write_manifest_rejects_link(bundle: Path) -> None:
    (bundle / "artifacts" / "link").symlink_to("/etc/passwd")
    with pytest.raises(WorkFailedError, match="plain file"):
        write_manifest(bundle)
    assert not (bundle / "artifacts" / "manifest.json").exists()


def test_inspect_summarizes_bundle(bundle: Path) -> None:
    write_artifacts(bundle)
    summary = inspect(bundle)
    assert summary["digest"] == recorded_digest(bundle)
    assert (summary["task"], summary["stage"], summary["seed"]) == ("sft", "warm", 7)
    assert [(given["name"], given["files"]) for given in summary["inputs"]] == [
        ("checkpoint", 3),
        ("data", 1),
    ]
    assert summary["frozen"]["files"] == len(frozen_entries(bundle))
    assert summary["artifacts"] == {
        "files": 4,
        "manifest": True,
        "bytes": sum(path.stat().st_size for path in (bundle / "artifacts").rglob("*") if path.is_file()),
    }
    assert summary["result"]["exit_code"] == 0
    json.dumps(summary)


def test_read_job_names_unknown_key(bundle: Path) -> None:
    job = json.loads((bundle / "job.json").read_bytes())
    rewrite(bundle / "job.json", json.dumps(job | {"sed": 1}).encode())
    with pytest.raises(RequestError, match="sed: Extra inputs"):
        read_job(bundle)
