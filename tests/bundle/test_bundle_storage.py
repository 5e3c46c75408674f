"""Full disks and forbidden places: one message, and nothing half-written left."""

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
from perilune.bundle.freeze import attempt_copy, freeze
from perilune.bundle.manifest import write_manifest
from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import place, storage_errors
from perilune.bundle.verify import verify
from perilune.errors import RequestError
from perilune.files import sha256_file

NOBODY = 65534
InChild = Callable[[Callable[[], None], Callable[[], object]], str]


def nothing() -> None:
    """Prepare nothing."""


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("after", [0, 3, 1000])
def test_copying_ends_in_user_space_where_the_kernel_stops(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may refuse copy_file_range at once, or part of the way."""
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
    place(tmp_path / "source", tmp_path / "target", 0o444)
    assert (tmp_path / "target").read_bytes() == content
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("name", ["freeze", "attempt", "pack", "unpack"])
def test_a_file_that_cannot_grow_leaves_nothing(
    name: str, pristine: Path, tmp_path: Path, in_child: InChild
) -> None:
    """A file-size limit fails writes part of the way, as a full disk does."""
    target = tmp_path / "target"
    target.mkdir()
    inputs = make_inputs(tmp_path / "sources")
    pack(pristine, tmp_path / "packed.tar.gz")
    actions: dict[str, Callable[[], object]] = {
        "freeze": lambda: freeze(make_job(), inputs, target / "b"),
        "attempt": lambda: attempt_copy(pristine, target / "b"),
        "pack": lambda: pack(pristine, target / "b.tar.gz"),
        "unpack": lambda: unpack(tmp_path / "packed.tar.gz", target / "b"),
    }
    said = in_child(limit_file_size, actions[name])
    assert said.startswith("RequestError") and "size limit" in said, said
    assert left_in(target) == []


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


def test_a_full_disk_leaves_nothing(
    pristine: Path, tmp_path: Path, small_disk: Path, in_child: InChild
) -> None:
    inputs = make_inputs(tmp_path / "sources")
    pack(pristine, tmp_path / "packed.tar.gz")
    actions: list[Callable[[], object]] = [
        lambda: freeze(make_job(), inputs, small_disk / "b"),
        lambda: attempt_copy(pristine, small_disk / "b"),
        lambda: unpack(tmp_path / "packed.tar.gz", small_disk / "b"),
    ]
    for action in actions:
        said = in_child(nothing, action)
        assert said.startswith("RequestError") and "disk is full" in said, said
        assert left_in(small_disk) == []


def test_a_file_system_without_links_to_the_shared_copies_gets_copies(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SHARE_FROM", 1000)  # bytes
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


def test_a_full_disk_leaves_no_manifest(small_disk: Path, in_child: InChild) -> None:
    artifacts = small_disk / "artifacts"
    artifacts.mkdir()
    with (
        (artifacts / "filler").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space"),
    ):
        while file.write(b"0" * 4096):
            pass
    said = in_child(nothing, lambda: write_manifest(small_disk))
    assert said.startswith("RequestError") and "disk is full" in said, said
    assert left_in(artifacts) == ["filler"]


def test_a_forbidden_folder_is_named(pristine: Path, in_child: InChild) -> None:
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
            said = in_child(become_nobody, action)
            assert said.startswith("RequestError") and "no permission" in said and str(target) in said, said
        assert left_in(target) == []
        target.chmod(0o755)


def test_a_killed_freeze_leaves_no_bundle(tmp_path: Path, in_child: InChild) -> None:
    """SIGKILL just before the rename: what is left has another name, and freezing works again."""
    inputs = make_inputs(tmp_path / "sources")

    def die_before_publishing() -> None:
        from perilune.bundle import freeze as module

        module.publish = lambda building, destination: os.kill(os.getpid(), 9)  # type: ignore[attr-defined]

    assert in_child(die_before_publishing, lambda: freeze(make_job(), inputs, tmp_path / "b")) == ""
    assert not (tmp_path / "b").exists()
    freeze(make_job(), inputs, tmp_path / "b")


def test_a_failed_rename_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError) as caught, storage_errors("write the report", tmp_path):
        (tmp_path / "file").rename(tmp_path / "folder")
    assert caught.value.where == str(tmp_path / "folder")
