"""Full disks and missing permissions: commands raise one error and leave no partial files."""

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_cases import make_inputs, make_job

from perilune.bundle import storage
from perilune.bundle.archive import pack, unpack
from perilune.bundle.freeze import copy_for_attempt, freeze
from perilune.bundle.manifest import write_manifest
from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import copy_file, storage_errors
from perilune.bundle.verify import verify
from perilune.errors import RequestError
from perilune.files import append_json_line, read_json_lines, sha256_file

NOBODY = 65534
InChild = Callable[[Callable[[], None], Callable[[], object]], str]


def prepare_nothing() -> None:
    """Leaves the forked process as it is."""


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def paths_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("after", [0, 3, 1000])
def test_place_falls_back_to_user_space_when_copy_file_range_fails(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may refuse copy_file_range at once, or after copying part of the file."""
    left = after

    def stops(reader: int, writer: int, size: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.EXDEV, "another file system")
        data = os.read(reader, min(size, left))
        left -= len(data)
        return os.write(writer, data)

    monkeypatch.setattr(os, "copy_file_range", stops, raising=False)
    content = bytes(range(256)) * 3
    (tmp_path / "source").write_bytes(content)
    copy_file(tmp_path / "source", tmp_path / "target", 0o444)
    assert (tmp_path / "target").read_bytes() == content
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("name", ["freeze", "attempt", "pack", "unpack"])
def test_commands_leave_no_files_at_file_size_limit(
    name: str, pristine: Path, tmp_path: Path, in_child: InChild
) -> None:
    """A file-size limit interrupts a write in the middle, as a full disk does."""
    target = tmp_path / "target"
    target.mkdir()
    inputs = make_inputs(tmp_path / "sources")
    pack(pristine, tmp_path / "packed.tar.gz")
    actions: dict[str, Callable[[], object]] = {
        "freeze": lambda: freeze(make_job(), inputs, target / "b"),
        "attempt": lambda: copy_for_attempt(pristine, target / "b"),
        "pack": lambda: pack(pristine, target / "b.tar.gz"),
        "unpack": lambda: unpack(tmp_path / "packed.tar.gz", target / "b"),
    }
    message = in_child(limit_file_size, actions[name])
    assert message.startswith("RequestError") and "size limit" in message, message
    assert paths_under(target) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "perilune-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs permission to mount a tmpfs: run as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_commands_leave_no_files_on_full_disk(
    pristine: Path, tmp_path: Path, small_disk: Path, in_child: InChild
) -> None:
    inputs = make_inputs(tmp_path / "sources")
    pack(pristine, tmp_path / "packed.tar.gz")
    actions: list[Callable[[], object]] = [
        lambda: freeze(make_job(), inputs, small_disk / "b"),
        lambda: copy_for_attempt(pristine, small_disk / "b"),
        lambda: unpack(tmp_path / "packed.tar.gz", small_disk / "b"),
    ]
    for action in actions:
        message = in_child(prepare_nothing, action)
        assert message.startswith("RequestError") and "disk is full" in message, message
        assert paths_under(small_disk) == []


def test_freeze_copies_shared_files_across_file_systems(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LINK_BYTES", 1000)  # bytes
    home, inputs = tmp_path / "home", make_inputs(tmp_path / "sources")
    home.mkdir()
    (home / "inputs").symlink_to(small_disk)
    first = freeze(make_job(), inputs, home / "a", SharedFiles(home))
    SharedFiles(home).share(home / "a")
    assert list(small_disk.iterdir()) == [] and verify(home / "a") == []
    weights = home / "a" / "inputs" / "checkpoint" / "model.safetensors"
    shutil.copy(weights, small_disk / sha256_file(weights))
    assert freeze(make_job(), inputs, home / "b", SharedFiles(home)) == first
    assert verify(home / "b") == [] and weights.stat().st_nlink == 1


def test_appending_a_line_that_fits_in_part_is_an_error(tmp_path: Path, in_child: InChild) -> None:
    """Otherwise the next line would continue the incomplete one."""
    line = {"text": "x" * 4090}
    message = in_child(limit_file_size, lambda: append_json_line(tmp_path / "metrics.jsonl", line))
    assert message.startswith("OSError"), message
    assert list(read_json_lines(tmp_path / "metrics.jsonl")) == []


def test_write_manifest_leaves_no_file_on_full_disk(small_disk: Path, in_child: InChild) -> None:
    artifacts = small_disk / "artifacts"
    artifacts.mkdir()
    with (
        (artifacts / "filler").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space"),
    ):
        while file.write(b"0" * 4096):
            pass
    message = in_child(prepare_nothing, lambda: write_manifest(small_disk))
    assert message.startswith("RequestError") and "disk is full" in message, message
    assert paths_under(artifacts) == ["filler"]


def test_freeze_names_folder_without_write_permission(pristine: Path, in_child: InChild) -> None:
    def become_nobody() -> None:
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        target.mkdir()
        inputs = make_inputs(Path(folder) / "sources")
        target.chmod(0o555)
        Path(folder).chmod(0o755)
        for action in (
            lambda: freeze(make_job(), inputs, target / "b"),
            lambda: freeze(make_job(), inputs, target / "deep" / "b"),
        ):
            message = in_child(become_nobody, action)
            assert (
                message.startswith("RequestError") and "no permission" in message and str(target) in message
            ), message
        assert paths_under(target) == []
        target.chmod(0o755)


def test_killed_freeze_leaves_no_bundle(tmp_path: Path, in_child: InChild) -> None:
    """SIGKILL just before the rename leaves files under another name only, and freeze works again."""
    inputs = make_inputs(tmp_path / "sources")

    def die_before_publishing() -> None:
        from perilune.bundle import freeze as module

        module.publish = lambda building, destination: os.kill(os.getpid(), 9)  # type: ignore[attr-defined]

    assert in_child(die_before_publishing, lambda: freeze(make_job(), inputs, tmp_path / "b")) == ""
    assert not (tmp_path / "b").exists()
    freeze(make_job(), inputs, tmp_path / "b")


def test_storage_error_names_target_of_failed_rename(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError) as caught, storage_errors("write the report", tmp_path):
        (tmp_path / "file").rename(tmp_path / "folder")
    assert caught.value.where == str(tmp_path / "folder")
