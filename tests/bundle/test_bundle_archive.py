"""Bundle archives: pack and unpack restore a bundle; unpack rejects hostile archives and leaves no files."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.bundle.archive import ArchiveLimits, pack, unpack
from perilune.bundle.digest import bundle_digest
from perilune.bundle.manifest import write_manifest
from perilune.bundle.verify import verify
from perilune.errors import RequestError

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def write_archive(path: Path, members: list[Member]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def packed(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "bundle.tar.gz"
    pack(pristine, path)
    return path


def assert_unpack_fails(archive: Path, tmp_path: Path, message: str, **options: object) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=message):
        unpack(archive, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before


def test_unpack_restores_packed_bundle(make_attempt: Callable[[str], Path], tmp_path: Path) -> None:
    attempt = make_attempt("1")
    (attempt / "artifacts" / "checkpoints").mkdir()
    (attempt / "artifacts" / "checkpoints" / "model").write_bytes(b"\0" * 3_000_000)
    (attempt / "runtime" / "runtime.log").write_text("hello\n")
    write_manifest(attempt)
    pack(attempt, tmp_path / "a.tar.gz")
    unpack(tmp_path / "a.tar.gz", tmp_path / "back", digest=bundle_digest(attempt))
    assert verify(tmp_path / "back") == []
    for path in attempt.rglob("*"):
        if path.is_file():
            copy = tmp_path / "back" / path.relative_to(attempt)
            assert copy.read_bytes() == path.read_bytes()
    assert (tmp_path / "back" / "scripts" / "entrypoint.sh").stat().st_mode & 0o111


def test_equal_bundles_give_equal_archives(
    pristine: Path, bundle: Path, packed: Path, tmp_path: Path
) -> None:
    pack(bundle, tmp_path / "other.tar.gz")
    assert (tmp_path / "other.tar.gz").read_bytes() == packed.read_bytes()
    assert packed.read_bytes()[3:8] == b"\0" * 5, "the gzip header contains a file name or a time"


def test_pack_rejects_existing_file_and_incomplete_bundle(bundle: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(RequestError, match="file exists already"):
        pack(bundle, tmp_path / "taken")
    (bundle / "job.json").unlink()
    with pytest.raises(RequestError, match=r"job\.json is missing"):
        pack(bundle, tmp_path / "a.tar.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "taken"]


@pytest.mark.parametrize(
    "name",
    [
        "../out",
        "/etc/x",
        "inputs/../../x",
        "a//b",
        "./a",
        "a/.",
        "..",
        ".",
        "a\\b",
        "a\nb",
        "x" * 2000,
        "a/" * 100 + "b",
        "a/../b",
    ],
)
def test_unpack_rejects_unsafe_paths(name: str, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", [member(name, b"x")])
    assert_unpack_fails(archive, tmp_path, "not a plain relative path")


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE],
)
def test_unpack_rejects_links_and_devices(kind: bytes, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", [member("inputs/x", type=kind, linkname="/etc/passwd")])
    assert_unpack_fails(archive, tmp_path, "link or a special file")


def test_unpack_rejects_file_written_through_link(tmp_path: Path) -> None:
    link = member("inputs", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    archive = write_archive(tmp_path / "a.tar.gz", [link, member("inputs/planted", b"x")])
    assert_unpack_fails(archive, tmp_path, "link or a special file")


def test_unpack_rejects_sparse_file(tmp_path: Path) -> None:
    sparse = member("inputs/x", b"1\n0\n5\n" + b"\0" * 506)
    sparse[0].pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": "9" * 15,
    }
    archive = write_archive(tmp_path / "a.tar.gz", [sparse])
    assert_unpack_fails(archive, tmp_path, "link or a special file")


def test_unpack_rejects_duplicate_member(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", [member("job.json", b"1"), member("job.json", b"2")])
    assert_unpack_fails(archive, tmp_path, "in the archive twice")


def test_unpack_rejects_path_that_is_file_and_folder(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", [member("inputs", b"1"), member("inputs/x", b"2")])
    assert_unpack_fails(archive, tmp_path, "cannot unpack")


def test_unpack_enforces_limits(packed: Path, tmp_path: Path) -> None:
    assert_unpack_fails(packed, tmp_path, "more than 3 members", limits=ArchiveLimits(files=3))
    assert_unpack_fails(packed, tmp_path, "exceeds the limit", limits=ArchiveLimits(file_bytes=1000))
    assert_unpack_fails(packed, tmp_path, "exceeds the limit", limits=ArchiveLimits(bytes=100_000))


def test_unpack_rejects_compression_bomb(tmp_path: Path) -> None:
    """The archive holds 300 MiB of zeros in about 300 kB. The header declares the size."""
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        info = tarfile.TarInfo("inputs/zeros")
        info.size = 300 << 20
        file.write(info.tobuf())
        for _ in range(300):
            file.write(b"\0" * (1 << 20))
    assert_unpack_fails(path, tmp_path, "exceeds the limit", limits=ArchiveLimits(bytes=1 << 20))


def test_unpack_rejects_excessive_padding(tmp_path: Path) -> None:
    """The archive consists of 50 MiB of zeros. Two blocks of zeros mark the end of an archive."""
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(50):
            file.write(b"\0" * (1 << 20))
    assert_unpack_fails(path, tmp_path, "more than the limit", limits=ArchiveLimits(files=10, bytes=1 << 20))


def test_unpack_rejects_oversized_header(tmp_path: Path) -> None:
    """A pax header that claims 8 GiB."""
    path = tmp_path / "a.tar.gz"
    header = tarfile.TarInfo("././@PaxHeader")
    header.type = tarfile.XHDTYPE
    header.size = (8 << 30) - 1
    with gzip.open(path, "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
    assert_unpack_fails(path, tmp_path, "header of more than 1 MiB")


def test_unpack_rejects_negative_size(tmp_path: Path) -> None:
    info = tarfile.TarInfo("inputs/x")
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = b"\xff" * 11 + b"\0"  # base 256, -256
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(raw) + b"\0" * 1024))
    assert_unpack_fails(path, tmp_path, "exceeds the limit|damaged")


def test_unpack_clears_setuid_and_setgid_bits(packed: Path, tmp_path: Path) -> None:
    members = []
    with tarfile.open(packed) as tar:
        for info in tar:
            content = tar.extractfile(info)
            assert content is not None
            info.mode |= 0o6000
            members.append((info, content.read()))
    unpack(write_archive(tmp_path / "a.tar.gz", members), tmp_path / "out")
    assert not any(path.stat().st_mode & 0o6000 for path in (tmp_path / "out").rglob("*"))


def test_unpack_rejects_files_that_are_not_archives(tmp_path: Path) -> None:
    for name, content in [("empty", b""), ("text", b"hello"), ("gzip", gzip.compress(b"hello" * 200))]:
        (tmp_path / name).write_bytes(content)
        assert_unpack_fails(tmp_path / name, tmp_path, "damaged|more than")
    assert_unpack_fails(tmp_path / "absent", tmp_path, "no such file")


def test_unpack_rejects_unexpected_digest(packed: Path, tmp_path: Path) -> None:
    assert_unpack_fails(packed, tmp_path, "bundle.json has changed", digest="0" * 64)


def test_unpack_rejects_existing_destination(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert_unpack_fails(packed, tmp_path, "it exists already")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_unpack_rejects_damaged_archive(
    packed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Flips any byte or cuts off any tail, except in the ten bytes of gzip's header, which hold no content.

    Some bits of a compressed stream have no effect (padding, unused codes). Such archives are still intact.
    """
    tmp_path = tmp_path_factory.mktemp("damaged")
    content = bytearray(packed.read_bytes())
    position = data.draw(st.integers(10, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    (tmp_path / "a.tar.gz").write_bytes(content)
    try:
        same = gzip.decompress(content) == gzip.decompress(packed.read_bytes())
    except (EOFError, OSError, zlib.error):
        same = False
    if not same:
        assert_unpack_fails(tmp_path / "a.tar.gz", tmp_path, ".")


@pytest.mark.parametrize("files", [1, 40])
def test_unpack_writes_nothing_from_archive_with_high_compression_ratio(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.bundle.archive._BASE_BYTES", 1 << 20)
    size = (8 << 20) // files
    archive = write_archive(
        tmp_path / "small.tar.gz", [member(f"inputs/{n}", bytes(size)) for n in range(files)]
    )
    assert archive.stat().st_size < 1 << 16
    written: list[Path] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda source, target: written.append(target))
    assert_unpack_fails(archive, tmp_path, "exceeds the limit")
    assert written == []


def test_unpack_rejects_archive_larger_than_free_disk(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert_unpack_fails(packed, tmp_path, "the disk is full")
