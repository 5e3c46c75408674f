"""Extraction of untrusted tar archives, with the `data` filter that Python 3.11.4 added and without it."""

import io
import tarfile
from pathlib import Path

import pytest

from perilune.errors import RequestError
from perilune.files import extract_archive


def archive(*members: tuple[str, bytes, str]) -> tarfile.TarFile:
    """An archive of members, each given by name, type and link target."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = 2 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"hi"))
    stream.seek(0)
    return tarfile.open(fileobj=stream)


@pytest.fixture(params=["filter", "no filter"], autouse=True)
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no filter":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.xfail("tarfile.data_filter needs Python 3.11.4")


def test_extract_all_writes_files_and_links_inside_target(tmp_path: Path) -> None:
    extract_archive(archive(("a/b", tarfile.REGTYPE, ""), ("a/c", tarfile.SYMTYPE, "b")), tmp_path)
    assert (tmp_path / "a" / "c").read_text() == "hi"


@pytest.mark.parametrize(
    "member",
    [("../out", tarfile.REGTYPE, ""), ("link", tarfile.SYMTYPE, "../out"), ("link", tarfile.SYMTYPE, "/etc"),
     ("pipe", tarfile.FIFOTYPE, "")],
)  # fmt: skip
def test_extract_all_rejects_unsafe_members(member: tuple[str, bytes, str], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"'{member[0]}'"):
        extract_archive(archive(member), tmp_path / "root")
    assert not (tmp_path / "out").exists()
