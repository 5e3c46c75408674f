"""The mirror of a remote attempt: complete, in order, without duplicates, inside its folder."""

import fcntl
import io
import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.bundle.manifest import manifest_bytes
from perilune.bundle.remote import runner
from perilune.errors import WorkFailedError
from perilune.execution.hosts.protocol import HostRefusedError
from perilune.execution.placements.mirror import MAX_FRAME_BYTES, Bring, Mirror
from perilune.execution.placements.mirror import open_mirror as mirrored
from perilune.files import sha256_bytes


class There:
    """The files of an attempt on a remote machine, served by the runner."""

    def __init__(self, folder: Path) -> None:
        self.attempt = runner.Attempt(str(folder), "01RUN", 1)
        for name in ("runtime", "artifacts"):
            (self.attempt.files / name).mkdir(parents=True)

    def write(self, path: str, data: bytes, mode: str = "wb") -> None:
        target = self.attempt.files / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode == "ab":
            with target.open("ab") as file:
                file.write(data)
        else:  # atomic replace
            temporary = target.with_name(f".{target.name}.tmp")
            temporary.write_bytes(data)
            temporary.replace(target)

    def frames(self, request: dict[str, Any], out: Any = None) -> bytes:
        """The bytes that the runner sends for a request."""
        sent = out or io.BytesIO()
        answer = runner.send_changes(self.attempt.files, request, sent, last=request["last"])
        return bytes(sent.getvalue()) + json.dumps(answer).encode() + b"\n"

    def pull(
        self, mirror: Mirror, *, last: bool = False, limit: int = 1 << 20, cut: int | None = None
    ) -> bool:
        frames = self.frames(mirror.state() | {"limit": limit, "last": last})
        pulled = mirror.take(io.BytesIO(frames if cut is None else frames[: cut % (len(frames) + 1)]))
        return pulled.more or not pulled.ended


def file_contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path / "there")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("runtime", "artifacts"):
        (tmp_path / "attempts" / "1" / name).mkdir(parents=True)
    return tmp_path / "attempts" / "1"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["log", "metrics", "rewind", "progress", "checkpoint", "forget", "episode"]),
        st.integers(0, 4000),  # size or index
        st.one_of(st.none(), st.integers(0, 1 << 16)),  # where the following pull is cut
        st.sampled_from([1, 3000, 1 << 20]),  # byte limit of a pull
    ),
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_interrupted_pulls_transfer_every_file(steps: list[tuple[str, int, int | None, int]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        there, home = There(folder / "there"), folder / "attempts" / "1"
        (home / "artifacts").mkdir(parents=True)
        for number, (what, size, cut, limit) in enumerate(steps):
            data = bytes([number]) * size
            match what:
                case "log":
                    there.write("runtime/runtime.log", data, "ab")
                case "metrics":
                    there.write("artifacts/metrics.jsonl", data, "ab")
                case "rewind":
                    there.write("artifacts/metrics.jsonl", data)
                case "progress":
                    there.write("runtime/progress.json", data)
                case "episode":
                    there.write(f"artifacts/episodes/step-{size % 3}.parquet", data)
                case "checkpoint":
                    for name in ("state.json", "deep/weights"):
                        there.write(f"artifacts/checkpoints/step-{number:02d}/{name}", data)
                case "forget":
                    for path in sorted((there.attempt.files / "artifacts").glob("checkpoints/*"))[:-1]:
                        shutil.rmtree(path)
            there.pull(Mirror(home), cut=cut, limit=limit)  # a new mirror, like a new command
            for path in (home / "artifacts").glob("checkpoints/*"):
                assert {file.name for file in path.rglob("*") if file.is_file()} == {"state.json", "weights"}
        while there.pull(Mirror(home)):
            pass
        assert file_contents(home) == file_contents(there.attempt.files)
    finally:
        shutil.rmtree(folder)


def test_pull_truncates_log_to_cursor_before_appending(there: There, home: Path) -> None:
    there.write("runtime/runtime.log", b"one\n")
    there.pull(Mirror(home))
    with (home / "runtime" / "runtime.log").open("ab") as file:
        file.write(b"half of a li")  # the command was killed before it saved the cursor
    there.write("runtime/runtime.log", b"two\n", "ab")
    there.pull(Mirror(home))
    assert (home / "runtime" / "runtime.log").read_bytes() == b"one\ntwo\n"


def test_file_changed_during_transfer_is_pulled_again(there: There, home: Path) -> None:
    first, second = b"a" * (2 << 20), b"b" * (2 << 20)
    there.write("artifacts/big", first)

    class Meddling(io.BytesIO):
        def write(self, data: Any) -> int:
            (there.attempt.files / "artifacts" / "big").write_bytes(second)
            return super().write(data)

    mirror = Mirror(home)
    asked = mirror.state() | {"limit": 8 << 20, "last": False}
    mirror.take(io.BytesIO(there.frames(asked, Meddling())))
    assert not (home / "artifacts" / "big").exists()
    while there.pull(mirror, limit=8 << 20):
        pass
    assert (home / "artifacts" / "big").read_bytes() == second


@pytest.mark.parametrize(
    "content", [b"nothing", b"[]", b'{"files": {"a": 1}}', b'{"files": {"a": {"size": 1}}}']
)
def test_malformed_manifest_is_refused(there: There, home: Path, content: bytes) -> None:
    there.write("artifacts/a", b"x")
    there.write("artifacts/manifest.json", content)
    verdict = {"epoch": 1, "cause": "", "manifest_digest": sha256_bytes(content)}
    there.write("runtime/result.json", json.dumps(verdict).encode())
    with mirrored(home) as mirror:
        assert mirror is not None
        there.pull(mirror, last=True)
        with pytest.raises(WorkFailedError, match="malformed"):
            mirror.settle()


def test_result_that_is_no_object_is_kept(there: There, home: Path) -> None:
    """The control plane then refuses it as the attempt's verdict."""
    there.write("runtime/result.json", b"[]")
    with mirrored(home) as mirror:
        assert mirror is not None
        there.pull(mirror, last=True)
        mirror.settle()
    assert (home / "runtime" / "result.json").read_bytes() == b"[]"


def test_pull_skips_temporary_and_hidden_files(there: There, home: Path) -> None:
    for path in ("artifacts/checkpoints/.step-1.tmp/state", "artifacts/.hidden", "runtime/worker.lock"):
        there.write(path, b"x")
    there.pull(Mirror(home))
    assert file_contents(home) == {}


def frame(path: Any, data: bytes = b"x", **changes: Any) -> bytes:
    header = {"path": path, "offset": 0, "length": len(data), "ino": 1, "mtime": 1, "size": len(data)}
    header |= {"sha256": sha256_bytes(data), "tail": ""} | changes
    return json.dumps(header).encode() + b"\n" + data


@pytest.mark.parametrize(
    "path",
    [
        *("../out", "/etc/passwd", "runtime/../../out", "artifacts//x", "artifacts/./x", "job.json"),
        *("scripts/runner.py", "runtime", "runtime/\0", 7, None, "inputs/data"),
    ],
)
def test_mirror_refuses_paths_outside_the_attempt(home: Path, path: Any) -> None:
    before = file_contents(home.parents[1])
    with pytest.raises(HostRefusedError, match="outside an attempt"):
        Mirror(home).take(io.BytesIO(frame(path)))
    assert {
        name for name in file_contents(home.parents[1]) if not name.endswith(".pulled.json")
    } == before.keys()


@pytest.mark.parametrize(
    "sent",
    [
        frame("runtime/a.log", sha256="0" * 64),
        frame("runtime/a.log", length=100),
        frame("runtime/a.log", offset=5),
        frame("runtime/a.log")[:20],
        b"[]\n",
        b"{}\n",
        b"\xff\xfe\n",
        b"",
    ],
)
def test_mirror_drops_damaged_and_misplaced_frames(home: Path, sent: bytes) -> None:
    assert not Mirror(home).take(io.BytesIO(frame("runtime/good.log", b"good") + sent)).ended
    assert file_contents(home) == {"runtime/good.log": b"good"}


@pytest.mark.parametrize("length", [1 << 40, -1])
def test_mirror_reads_frames_in_bounded_chunks(home: Path, length: int) -> None:
    class Endless(io.RawIOBase):
        read_at_once: ClassVar[list[int]] = []

        def readline(self, size: int | None = -1, /) -> bytes:
            frame = {"path": "runtime/x", "offset": 0, "length": length, "sha256": "0", "ino": 1}
            return json.dumps(frame | {"mtime": 1, "size": 1 << 40, "tail": ""}).encode() + b"\n"

        def read(self, size: int = -1, /) -> bytes:
            self.read_at_once.append(size)
            return bytes(min(size, MAX_FRAME_BYTES) if size >= 0 else MAX_FRAME_BYTES)

    frames = Endless()
    assert not Mirror(home).take(frames).ended  # type: ignore[arg-type]
    assert all(0 <= size <= MAX_FRAME_BYTES for size in frames.read_at_once) and frames.read_at_once


def test_settle_matches_artifacts_to_manifest_or_pulls_again(there: There, home: Path) -> None:
    files = {"summary.json": b"{}", "checkpoints/step-1/weights": b"w" * 100, ".note": b"n"}
    for path, data in files.items():
        there.write(f"artifacts/{path}", data)
    manifest = manifest_bytes(
        {path: {"size": len(data), "sha256": sha256_bytes(data)} for path, data in files.items()}
    )
    there.write("artifacts/manifest.json", manifest)
    result = {"epoch": 1, "manifest_digest": sha256_bytes(manifest)}
    there.write("runtime/result.json", json.dumps(result).encode())
    mirror = Mirror(home)
    there.pull(mirror)
    (home / "artifacts" / "stale.parquet").write_bytes(b"of steps that were taken back")
    (home / "artifacts" / "checkpoints" / "step-1" / "weights").write_bytes(b"v" * 100)
    there.pull(mirror, last=True)
    assert not (home / "runtime" / "result.json").exists()
    with pytest.raises(WorkFailedError, match="step-1/weights differs from the manifest"):
        mirror.settle()
    while there.pull(mirror, last=True):
        pass
    mirror.settle()
    assert file_contents(home) == file_contents(there.attempt.files)

    after = Mirror(home)  # the previous process was killed before it recorded the settlement
    there.pull(after, last=True)
    with pytest.raises(WorkFailedError, match="to be transferred again"):
        after.settle()
    there.pull(after, last=True)
    after.settle()
    assert file_contents(home) == file_contents(there.attempt.files)


@pytest.mark.parametrize("bring", ["metrics", "final", "all"])
def test_bring_setting_selects_transferred_checkpoints(there: There, home: Path, bring: Bring) -> None:
    """Running attempts skip checkpoints whose optimizer may be deleted or that only resumes need."""
    steps, final = ("checkpoints/step-1/weights", "checkpoints/step-1/moments"), "checkpoints/final/model"
    for path in (*steps, final, "checkpoints/final/optimizer/moments", "metrics.jsonl"):
        there.write(f"artifacts/{path}", path.encode())
    mirror = Mirror(home, bring=bring)
    there.pull(mirror)
    assert ((home / "artifacts" / final).exists()) == (bring == "all")
    shutil.rmtree(there.attempt.files / "artifacts" / "checkpoints" / "final" / "optimizer")
    listed = {path: {"size": len(path), "sha256": sha256_bytes(path.encode())} for path in (*steps, final)}
    listed["metrics.jsonl"] = {"size": 13, "sha256": sha256_bytes(b"metrics.jsonl")}
    there.write("artifacts/manifest.json", manifest_bytes(listed))
    digest = sha256_bytes(manifest_bytes(listed))
    there.write("runtime/result.json", json.dumps({"epoch": 1, "manifest_digest": digest}).encode())
    while there.pull(mirror, last=True):
        pass
    mirror.settle()
    came = {path for path in listed if (home / "artifacts" / path).exists()}
    expected = {"metrics": {"metrics.jsonl"}, "final": {"metrics.jsonl", final}, "all": set(listed)}
    assert came == expected[bring]


def test_settle_refuses_manifest_whose_digest_differs_from_verdict(there: There, home: Path) -> None:
    there.write("artifacts/manifest.json", manifest_bytes({}))
    there.write("runtime/result.json", b'{"epoch": 1, "manifest_digest": "0"}')
    mirror = Mirror(home)
    there.pull(mirror, last=True)
    with pytest.raises(WorkFailedError, match="does not have the digest in the verdict"):
        mirror.settle()
    assert not (home / "runtime" / "result.json").exists()


def test_only_one_process_holds_the_mirror(home: Path) -> None:
    with home.with_name(f".{home.name}.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for patience in (0.0, 0.1):
            with mirrored(home, patience=patience) as none:
                assert none is None
        threading.Timer(0.2, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with mirrored(home, patience=20.0) as mine, mirrored(home) as none:
            assert mine is not None and none is None
    with mirrored(home / "not yet" / "there") as none:
        assert none is None
