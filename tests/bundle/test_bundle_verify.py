"""Verification: whatever is done to a frozen file is found and named."""

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

from perilune.bundle.digest import BUNDLE_FILE, bundle_digest, frozen_entries, recorded_digest
from perilune.bundle.inspection import inspect, read_job
from perilune.bundle.manifest import write_manifest
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
    """New contents, same mode: what an editor run by root leaves."""
    mode = path.stat().st_mode & 0o777
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(mode)


def first(bundle: Path) -> tuple[str, str]:
    difference = verify(bundle)[0]
    return difference.path, difference.kind


def test_a_frozen_bundle_verifies(pristine: Path) -> None:
    assert verify(pristine) == []
    assert verify(pristine, recorded_digest(pristine)) == []


def test_what_a_running_task_changes_is_not_looked_at(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker replaces its heartbeat while the frozen files are compared."""
    with copied(pristine) as bundle:
        (bundle / "runtime").mkdir(exist_ok=True)
        (bundle / "runtime" / ".heartbeat.tmp").write_text("{}")
        real = os.scandir

        def looked_at(folder: Any = ".") -> Any:
            assert not str(folder).endswith("/runtime")
            return real(folder)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", looked_at)
            assert verify(bundle) == []
            assert bundle_digest(bundle) == recorded_digest(bundle)


@MANY
@given(data=st.data())
def test_any_flipped_byte_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*frozen_files(pristine), BUNDLE_FILE]))
    with copied(pristine) as bundle:
        content = bytearray((bundle / name).read_bytes())
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
        rewrite(bundle / name, bytes(content))
        assert first(bundle) == (name, "changed")
        with pytest.raises(RequestError, match=f"{Path(name).name} has changed"):
            require_verified(bundle)


@MANY
@given(data=st.data())
def test_any_cut_or_appended_byte_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*frozen_files(pristine), BUNDLE_FILE]))
    with copied(pristine) as bundle:
        content = (bundle / name).read_bytes()
        change = data.draw(st.sampled_from([content[:-1], content + b"\0", content + b" ", b""]))
        rewrite(bundle / name, change)
        assert first(bundle) == (name, "changed")


@MANY
@given(data=st.data())
def test_any_change_of_mode_is_found(pristine: Path, data: st.DataObject) -> None:
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
def test_any_renamed_file_is_found_under_both_names(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(frozen_files(pristine)))
    suffix = data.draw(st.text("abc.é ", min_size=1, max_size=8))
    with copied(pristine) as bundle:
        (bundle / name).rename(bundle / f"{name}{suffix}")
        found = {(difference.path, difference.kind) for difference in verify(bundle)}
        assert found == {(name, "missing"), (f"{name}{suffix}", "extra")}


@MANY
@given(data=st.data())
def test_anything_added_is_found(pristine: Path, data: st.DataObject) -> None:
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
def test_a_file_replaced_by_a_link_to_its_own_contents_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(frozen_files(pristine)))
    with copied(pristine) as bundle:
        (bundle / name).unlink()
        (bundle / name).symlink_to(pristine / name)
        assert first(bundle) == (name, "type")


def test_what_an_attempt_observes_is_not_part_of_its_identity(bundle: Path) -> None:
    digest = bundle_digest(bundle)
    (bundle / "artifacts" / "metrics.jsonl").write_text("{}\n")
    (bundle / "runtime" / "deep").mkdir()
    (bundle / "runtime" / "deep" / "run.json").write_text("{}")
    assert verify(bundle) == []
    assert bundle_digest(bundle) == digest


def test_a_bundle_rewritten_with_its_list_is_found_by_its_known_digest(bundle: Path) -> None:
    known = recorded_digest(bundle)
    rewrite(bundle / "inputs" / "data", b"other rows\n")
    files = [entry.document() for entry in frozen_entries(bundle)]
    document = {"schema_version": 1, "digest": sha256_bytes(canonical_json(files)), "files": files}
    rewrite(bundle / BUNDLE_FILE, canonical_json(document) + b"\n")
    assert verify(bundle) == []
    assert [difference.path for difference in verify(bundle, known)] == [BUNDLE_FILE]


def test_the_first_of_several_differences_is_first(bundle: Path) -> None:
    (bundle / "scripts" / "bootstrap.py").unlink()
    rewrite(bundle / "inputs" / "checkpoint" / "config.json", b"{}")
    (bundle / "job.json").chmod(0o600)
    assert [difference.path for difference in verify(bundle)] == [
        *("inputs/checkpoint/config.json", "job.json", "scripts/bootstrap.py"),
    ]


def test_no_bundle_and_half_a_bundle(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(RequestError, match="not a bundle"):
        verify(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="not a bundle"):
        verify(tmp_path / "file")
    (bundle / BUNDLE_FILE).unlink()
    assert first(bundle) == (BUNDLE_FILE, "missing")
    (tmp_path / "empty").mkdir()
    assert first(tmp_path / "empty") == (BUNDLE_FILE, "missing")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"null", b"[]", b'{"files": 3}', b'{"files": [{"path": 1}]}', b"\xff", b"[" * 100_000),
        b'{"files": [{"path": ["x"], "size": 1, "sha256": "", "mode": ""}]}',
        b'{"files": [{"path": "a", "size": NaN, "sha256": "", "mode": ""}]}',
        b'{"files": [{"path": "\\ud800", "size": 1, "sha256": "", "mode": ""}]}',
    ],
)
def test_a_hostile_list_is_a_difference_not_a_crash(bundle: Path, content: bytes) -> None:
    rewrite(bundle / BUNDLE_FILE, content)
    assert first(bundle) == (BUNDLE_FILE, "changed")


def test_a_list_that_reaches_outside_reads_nothing_there(bundle: Path) -> None:
    secret = {"path": "../../etc/passwd", "size": 1, "sha256": "0", "mode": "0444"}
    document = {"schema_version": 1, "digest": sha256_bytes(canonical_json([secret])), "files": [secret]}
    rewrite(bundle / BUNDLE_FILE, canonical_json(document) + b"\n")
    assert ("../../etc/passwd", "missing") in {(one.path, one.kind) for one in verify(bundle)}


def evidence(bundle: Path) -> None:
    """Artifacts with equal basenames, a manifest and a result."""
    for name in ("checkpoints/step-1/model", "checkpoints/final/model", "metrics.jsonl"):
        path = bundle / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    digest = write_manifest(bundle)
    result = {"epoch": 1, "exit_code": 0, "signal": None, "manifest_digest": digest}
    write_json(bundle / "runtime" / "result.json", result)


def test_the_manifest_lists_everything_by_full_path(bundle: Path) -> None:
    evidence(bundle)
    files = json.loads((bundle / "artifacts" / "manifest.json").read_bytes())["files"]
    assert sorted(files) == ["checkpoints/final/model", "checkpoints/step-1/model", "metrics.jsonl"]
    for name, facts in files.items():
        path = bundle / "artifacts" / name
        assert facts == {"size": path.stat().st_size, "sha256": sha256_file(path)}
    assert verify(bundle) == []


def test_writing_the_manifest_again_changes_nothing(bundle: Path) -> None:
    evidence(bundle)
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
def test_a_changed_artifact_is_found(bundle: Path, change: Callable[[Path], object], kind: str) -> None:
    evidence(bundle)
    change(bundle / "artifacts" / "metrics.jsonl")
    assert first(bundle) == ("artifacts/metrics.jsonl", kind)


def test_an_added_artifact_is_found(bundle: Path) -> None:
    evidence(bundle)
    (bundle / "artifacts" / "episodes").mkdir()
    (bundle / "artifacts" / "episodes" / "late").touch()
    assert first(bundle) == ("artifacts/episodes/late", "extra")


def test_the_result_vouches_for_the_manifest(bundle: Path) -> None:
    evidence(bundle)
    (bundle / "artifacts" / "metrics.jsonl").write_text("better figures")
    write_manifest(bundle)
    assert first(bundle) == ("artifacts/manifest.json", "changed")
    (bundle / "artifacts" / "manifest.json").unlink()
    assert first(bundle) == ("artifacts/manifest.json", "missing")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": {"a": {"size": 1}}}'])
def test_a_damaged_manifest_is_found(bundle: Path, content: str) -> None:
    evidence(bundle)
    (bundle / "artifacts" / "manifest.json").write_text(content)
    (bundle / "runtime" / "result.json").unlink()
    assert first(bundle) == ("artifacts/manifest.json", "changed")


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_result_vouches_for_nothing(bundle: Path, content: str) -> None:
    evidence(bundle)
    (bundle / "runtime" / "result.json").write_text(content)
    assert first(bundle) == ("artifacts/manifest.json", "changed")


def test_an_artifact_that_is_a_link_makes_no_evidence(bundle: Path) -> None:
    (bundle / "artifacts" / "link").symlink_to("/etc/passwd")
    with pytest.raises(WorkFailedError, match="plain file"):
        write_manifest(bundle)
    assert not (bundle / "artifacts" / "manifest.json").exists()


def test_inspect_says_what_is_inside(bundle: Path) -> None:
    evidence(bundle)
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


def test_a_job_of_another_schema_names_the_key(bundle: Path) -> None:
    job = json.loads((bundle / "job.json").read_bytes())
    rewrite(bundle / "job.json", json.dumps(job | {"sed": 1}).encode())
    with pytest.raises(RequestError, match="sed: Extra inputs"):
        read_job(bundle)
