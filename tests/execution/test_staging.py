"""Staging: each content is uploaded once, resumed after interruptions, and verified on arrival."""

import argparse
import ast
import errno
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import pytest
from drill_cases import drill_bundle
from hosts_cases import NearbyHost, nearby
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_conformance import assigned, stage, until
from sshd_cases import Line, sshd

from perilune import redaction
from perilune.bundle.digest import bundle_digest, entries_digest, make_entry, walk
from perilune.bundle.remote import holder, receiver, runner, store
from perilune.bundle.scripts import remote_source
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.hosts.protocol import Answer, HostUnreachableError
from perilune.execution.hosts.ssh import SshHost
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements import remote
from perilune.execution.placements.mirror import open_mirror
from perilune.execution.placements.remote import RemotePlacement
from perilune.execution.placements.upload import Upload, read_upload_progress
from perilune.execution.verdict import Cause, find_cause
from perilune.files import sha256_bytes, write_json

MODEL = bytes(range(256)) * 800  # 200 KB: large enough for the store
NOTE = b"small"


class Box:
    """A machine's workspace that receives uploads in the test process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "workspace"
        self.attempt = runner.Attempt(str(self.folder), "01RUN", 1)
        self.store = self.folder / "store.sha256"

    def receive(self, upload: Upload, sent: bytes, share: float = 1.0) -> dict[str, Any]:
        options = argparse.Namespace(tree=upload.tree, bytes=upload.size, share=share)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(receiver, "sys", SimpleNamespace(stdin=SimpleNamespace(buffer=io.BytesIO(sent))))
            patch.setattr(receiver, "stall_timer", nullcontext)  # pytest's timeout uses the same timer
            before = os.umask(0o077)  # the runner's umask
            try:
                return receiver.receive(self.attempt, options)
            finally:
                os.umask(before)

    def ask(self, upload: Upload) -> dict[str, Any]:
        return self.receive(upload, upload_bytes(upload, {}))

    def entry(self, data: bytes = MODEL) -> Path:
        return self.store / sha256_bytes(data)

    def partial(self, data: bytes = MODEL) -> Path:
        return self.store / f"{sha256_bytes(data)}.partial"


def upload_bytes(upload: Upload, wanted: dict[str, int]) -> bytes:
    """The bytes of an upload for the wanted contents."""
    with upload.stream(b"", wanted) as stream:
        return stream.read()


def deliver(box: Box, upload: Upload, rounds: int = 3) -> int:
    """Stage like the placement does; returns the number of calls."""
    wanted = upload.small_contents()
    for calls in range(1, rounds + 1):
        answer = box.receive(upload, upload_bytes(upload, wanted))
        if answer.get("received") == upload.tree:
            return calls
        wanted = upload.parse_wanted(answer["missing"])
    raise AssertionError("not received")


def contents_and_modes(root: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and modes of the files below a folder."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in root.rglob("*")
        if path.is_file()
    }


def make_working_copy(folder: Path, **files: bytes) -> Path:
    """Write a new working copy: one model twice, a note, and `files`."""
    contents = {
        "inputs/model": MODEL,
        "inputs/again/model": MODEL,
        "runtime/note": NOTE,
        "empty": b"",
    } | files
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o444 if name.startswith("inputs") else 0o640)
    write_json(folder / "bundle.json", {"files": []})
    return folder


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "box")


@pytest.fixture
def upload(tmp_path: Path) -> Upload:
    return Upload(make_working_copy(tmp_path / "attempts" / "1"))


def test_upload_skips_stored_contents_and_keeps_files_private(
    box: Box, upload: Upload, tmp_path: Path
) -> None:
    assert deliver(box, upload) == 2  # the listing, then the missing contents
    assert contents_and_modes(box.attempt.files) == contents_and_modes(tmp_path / "attempts" / "1")
    assert sum(path.stat().st_size for path in box.store.iterdir()) == len(MODEL)
    box.attempt = runner.Attempt(str(box.folder), "01OTHER", 1)
    assert deliver(box, upload) == 1
    assert len(upload_bytes(upload, upload.small_contents())) < 2000
    assert contents_and_modes(box.attempt.files) == contents_and_modes(tmp_path / "attempts" / "1")
    inodes = [path.stat().st_ino for path in box.folder.rglob("*") if path.is_file()]
    assert len(set(inodes)) == len(inodes)  # no hard links
    folders = [box.folder, *(path for path in box.folder.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folders} == {0}


def finish_attempt(
    box: Box, files: dict[str, bytes], listed: dict[str, tuple[int, str]], cause: str = ""
) -> None:
    """End the attempt of the box with these artifacts and this manifest."""
    artifacts = box.attempt.files / "artifacts"
    for name, data in files.items():
        (artifacts / name).parent.mkdir(parents=True, exist_ok=True)
        (artifacts / name).write_bytes(data)
    described = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in listed.items()}
    write_json(artifacts / "manifest.json", {"files": described})
    box.attempt.runtime.mkdir(parents=True, exist_ok=True)
    write_json(box.attempt.runtime / "result.json", {"epoch": 1, "cause": cause})


def keep_outputs(box: Box, share: float = 0.25) -> int:
    return int(holder.keep_outputs(box.attempt, argparse.Namespace(share=share))["kept"])


def test_next_stage_reuses_kept_outputs_of_the_previous_stage(
    box: Box, upload: Upload, tmp_path: Path
) -> None:
    digest = sha256_bytes(MODEL)
    listed = {
        "checkpoints/final/model": (len(MODEL), digest),
        "checkpoints/step-1/model": (len(MODEL), digest),
    }
    finish_attempt(box, dict.fromkeys(listed, MODEL), listed, cause="work_failed")
    assert keep_outputs(box) == 0
    finish_attempt(box, {}, listed)
    assert keep_outputs(box, share=0.0) == 0
    assert keep_outputs(box) == len(MODEL) and keep_outputs(box) == 0
    assert (box.attempt.files / "artifacts/checkpoints/step-1/model").exists()
    box.attempt = runner.Attempt(str(box.folder), "01NEXT", 1)
    assert deliver(box, upload) == 1
    assert contents_and_modes(box.attempt.files) == contents_and_modes(tmp_path / "attempts" / "1")


@pytest.mark.parametrize("path", ["../../../secret", "/secret", "linked/secret", "link"])
def test_keep_outputs_ignores_paths_outside_the_attempt(box: Box, tmp_path: Path, path: str) -> None:
    secret = box.attempt.workspace / "secret"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(MODEL)
    path = path if not path.startswith("/") else str(secret)
    finish_attempt(box, {"a": b""}, {path: (len(MODEL), sha256_bytes(MODEL))})
    (box.attempt.files / "artifacts" / "linked").symlink_to(secret.parent)
    (box.attempt.files / "artifacts" / "link").symlink_to(secret)
    assert keep_outputs(box) == 0 and secret.read_bytes() == MODEL


@pytest.mark.parametrize(
    "document",
    [
        [], {}, {"files": []}, {"files": {"data": 1}}, {"files": {"data": {"size": "much"}}},
        {"files": {"a\0": {"size": len(MODEL), "sha256": sha256_bytes(MODEL)}}},
    ],
)  # fmt: skip
def test_keep_outputs_ignores_malformed_manifest(box: Box, document: Any) -> None:
    finish_attempt(box, {"data": MODEL}, {})
    write_json(box.attempt.files / "artifacts" / "manifest.json", document)
    assert keep_outputs(box) == 0


def test_output_that_differs_from_manifest_is_uploaded_again(
    box: Box, upload: Upload, tmp_path: Path
) -> None:
    forged = MODEL[::-1]
    finish_attempt(box, {"data": forged, "other": forged}, {
        "data": (len(MODEL), sha256_bytes(MODEL)), "other": (len(MODEL), "../" + "0" * 61),
    })  # fmt: skip
    assert keep_outputs(box) == len(MODEL)
    box.attempt = runner.Attempt(str(box.folder), "01NEXT", 1)
    assert deliver(box, upload) == 2
    assert contents_and_modes(box.attempt.files) == contents_and_modes(tmp_path / "attempts" / "1")


class Hub(BaseHTTPRequestHandler):
    """Serves `content` from the requested byte, like the Hugging Face hub."""

    content = b""
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Range"]))
        begin = int(self.headers["Range"][len("bytes=") : -1])
        self.send_response(206)
        self.end_headers()
        self.wfile.write(self.content[begin:])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("served", "left"), [(MODEL, None), (MODEL[:50_000], 50_000), (MODEL[::-1], 0), (None, 0)]
)
def test_machine_downloads_base_model_from_hub(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bytes | None, left: int | None
) -> None:
    """`left` is the upload's start offset when the hub sends a part, wrong bytes, or nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Hub, "content", served)
    monkeypatch.setattr(Hub, "asked", [])
    commit = "0123456789" * 4
    source = json.dumps({"kind": "hub", "repository": "some/model", "commit": commit}).encode()
    files = {"inputs/model/source.json": source, "inputs/model/model.safetensors": MODEL, "job.json": b"{}"}
    for name, data in files.items():
        path = tmp_path / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    write_json(tmp_path / "1" / "bundle.json", {"files": []})
    if served is None:
        server.server_close()
    upload = Upload(tmp_path / "1", hub=f"http://127.0.0.1:{server.server_address[1]}/")
    answer = box.receive(upload, upload_bytes(upload, upload.small_contents()))
    assert answer.get("missing", {}).get(sha256_bytes(MODEL)) == left
    if served is not None:
        assert Hub.asked == [(f"/some/model/resolve/{commit}/model.safetensors", "bytes=0-")]
    if left is None:
        assert answer == {"received": upload.tree}
    else:
        assert deliver(box, upload) <= 2
    assert contents_and_modes(box.attempt.files)["inputs/model/model.safetensors"][0] == MODEL
    server.shutdown() if served is not None else None
    server.server_close()


def frame_boundaries(upload: Upload, sent: bytes) -> list[int]:
    """Offsets at which lines and contents begin and end in `sent`."""
    ends, start = [0], sent.index(b"\n") + 1
    while start < len(sent):
        ends.append(start)
        end_of_line = sent.index(b"\n", start) + 1
        ends.append(end_of_line)
        start = end_of_line + json.loads(sent[start:end_of_line])[2]
    return [*ends, len(sent)]


def test_upload_resumes_after_interruption_at_any_byte_boundary(box: Box, upload: Upload) -> None:
    everything = {entry.sha256: 0 for entry in upload.entries}
    sent = upload_bytes(upload, everything)
    boundaries = frame_boundaries(upload, sent)
    middles = [(start + end) // 2 for start, end in pairwise(boundaries)]
    for cut in sorted({*boundaries, *middles, *(end + 1 for end in boundaries[:-1]), len(sent) - 1}):
        shutil.rmtree(box.folder, ignore_errors=True)
        try:
            box.receive(upload, sent[:cut])
        except runner.RefusedError as error:
            assert error.kind == "damaged" and cut <= sent.index(b"\n")
        assert box.attempt.files.exists() == (cut == len(sent))
        had = box.ask(upload).get("missing", {}).get(sha256_bytes(MODEL), len(MODEL))
        assert had >= min(len(MODEL), cut - boundaries[-2])  # it resumes at the cut
        assert deliver(box, upload) <= 2
        assert not list(box.store.glob("*.partial")) and box.entry().read_bytes() == MODEL


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 250_000), max_size=5), st.booleans())
def test_repeatedly_interrupted_upload_completes(cuts: list[int], both: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        box, upload = Box(folder / "box"), Upload(make_working_copy(folder / "1", other=MODEL[::-1]))
        done = 0
        for cut in cuts:
            answer = box.receive(upload, upload_bytes(upload, {}))
            if both and "missing" in answer:
                sent = upload_bytes(upload, upload.parse_wanted(answer["missing"]))
                box.receive(upload, sent[: max(cut % (len(sent) + 1), sent.index(b"\n") + 1)])
            now = sum(path.stat().st_size for path in box.store.iterdir())
            assert now >= done
            done = now
        deliver(box, upload)
        assert contents_and_modes(box.attempt.files) == contents_and_modes(folder / "1")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["entry", "partial", "link", "fifo", "folder", "long", "short"])
def test_modified_store_entry_is_detected_and_uploaded_again(
    box: Box, upload: Upload, tmp_path: Path, what: str
) -> None:
    deliver(box, upload)
    shutil.rmtree(box.attempt.files)
    entry, secret = box.entry(), tmp_path / "secret"
    secret.write_bytes(MODEL)
    match what:
        case "entry":
            entry.write_bytes(MODEL[:-1] + b"!")
        case "partial":
            entry.unlink()
            box.partial().write_bytes(b"!" * 1000)
        case "link":
            entry.unlink()
            entry.symlink_to(secret)
            box.partial().symlink_to(secret)
        case "fifo":
            entry.unlink()
            os.mkfifo(entry)
            os.mkfifo(box.partial())
        case "folder":
            entry.unlink()
            (box.partial() / "deep").mkdir(parents=True)
        case "long":
            entry.write_bytes(MODEL + b"!")
        case "short":
            box.partial().write_bytes(MODEL + b"too much")
            entry.unlink()
    assert deliver(box, upload) <= 3
    assert contents_and_modes(box.attempt.files)["inputs/model"] == (MODEL, 0o444)
    assert entry.read_bytes() == MODEL and not entry.is_symlink() and secret.read_bytes() == MODEL


def test_receive_refuses_content_at_a_wrong_offset(box: Box, upload: Upload) -> None:
    with pytest.raises(runner.RefusedError, match="does not continue the stored part"):
        box.receive(upload, upload_bytes(upload, {sha256_bytes(MODEL): 1000}))
    assert deliver(box, upload) == 2


def test_damaged_upload_is_retried_once(tmp_path: Path) -> None:
    host, damage = NearbyHost(), [1]
    placement = nearby(tmp_path / "box", host)

    def bend(data: bytes) -> bytes:
        if host.calls[-1] == "receive" and len(data) > 1 << 20 and damage[0] > 0:
            damage[0] -= 1
            return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        return data

    host.bend = bend
    bundle = drill_bundle(tmp_path / "bundle")  # its wheel is large
    stage(placement, assigned(tmp_path), bundle)
    assert host.calls.count("receive") == 3
    shutil.rmtree(tmp_path / "box" / "workspace")
    damage[0] = 9
    with pytest.raises(WorkFailedError, match="the uploaded files arrive damaged"):
        stage(placement, assigned(tmp_path), bundle)
    assert not (tmp_path / "box" / "workspace" / "01DRILL" / "1").exists()


def test_damaged_small_content_is_reported_missing(box: Box, upload: Upload) -> None:
    deliver(box, upload)
    shutil.rmtree(box.attempt.files)
    sent = upload_bytes(upload, upload.small_contents())
    assert sent.count(NOTE) == 1
    answer = box.receive(upload, sent.replace(NOTE, NOTE.upper()))
    assert answer["missing"][sha256_bytes(NOTE)] == 0 and not box.attempt.files.exists()


def listing(*files: list[Any]) -> bytes:
    return json.dumps(list(files)).encode() + b"\n"


HERE = "0" * 64
HOSTILE = {
    "absolute": listing(["/etc/x", 1, HERE, "0644"]),
    "up": listing(["a/../../x", 1, HERE, "0644"]),
    "here": listing(["./x", 1, HERE, "0644"]),
    "nothing": listing(["", 1, HERE, "0644"]),
    "nul": listing(["x\0", 1, HERE, "0644"]),
    "twice": listing(["x", 1, HERE, "0644"], ["x", 1, HERE, "0644"]),
    "large": listing(["x", 1001, HERE, "0644"]),
    "negative": listing(["x", -1, HERE, "0644"]),
    "digest": listing(["x", 1, "../../../x", "0644"]),
    "mode": listing(["x", 1, HERE, "-rw-"]),
    "sizes": listing(["x", 1, HERE, "0644"], ["y", 2, HERE, "0644"]),
    "number": listing([7, 1, HERE, "0644"])[:-2] + b"\n",
    "nonsense": b'{"x": 1}\n',
    "cut": listing(["x", 1, HERE, "0644"])[:-1],
    "another": b"[]\n",
    "empty": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_receive_refuses_hostile_file_lists(box: Box, kind: str) -> None:
    line = HOSTILE[kind]
    try:
        files = sorted(receiver.File(*entry) for entry in json.loads(line))
        tree = receiver.entries_digest(files) if kind != "another" else HERE
    except (TypeError, ValueError):
        tree = HERE
    options = SimpleNamespace(tree=tree, size=1000, entries=[])
    with pytest.raises(runner.RefusedError) as refused:
        box.receive(options, line)  # type: ignore[arg-type]
    assert refused.value.kind == "damaged" and not box.folder.exists()


def test_receive_refuses_file_used_as_a_folder(box: Box, tmp_path: Path) -> None:
    upload = Upload(make_working_copy(tmp_path / "1"))
    note = next(entry for entry in upload.entries if entry.path == "runtime/note")
    upload.entries.append(type(note)("runtime/note/x", note.size, note.sha256, note.mode))
    upload.tree, upload.size = entries_digest(upload.entries), 1 << 30
    with pytest.raises(runner.RefusedError, match="list of files is damaged"):
        deliver(box, upload)
    assert sorted(path.name for path in box.attempt.run.iterdir()) == ["lock"]


@pytest.mark.parametrize(
    "frame", [b"[]\n", b'["x",0,1]\nx', b"nonsense\n", f'["{sha256_bytes(MODEL)}",-1,1]\nx'.encode()]
)
def test_receive_refuses_unlisted_and_malformed_contents(box: Box, upload: Upload, frame: bytes) -> None:
    long = f'["{sha256_bytes(MODEL)}",1,{len(MODEL)}]\n'.encode()
    for odd in (frame, long + MODEL, f'["{sha256_bytes(MODEL)}",0.0,1]\nx'.encode()):
        with pytest.raises(runner.RefusedError):
            box.receive(upload, upload_bytes(upload, {}) + odd)


def test_store_evicts_by_age_and_disk_share(box: Box, upload: Upload, tmp_path: Path) -> None:
    def sent(number: int) -> Path:
        data = bytes([number]) * 100_000
        deliver(box, Upload(make_working_copy(tmp_path / f"{number}" / "1", other=data)))
        return box.entry(data)

    old, partial = sent(1), box.store / f"{'a' * 64}.partial"
    partial.write_bytes(b"half")
    long_ago = time.time() - store.MAX_UNUSED_S - 60
    for path in (old, partial):
        os.utime(path, (long_ago, long_ago))
    recent = sent(2)
    assert not old.exists() and not partial.exists() and recent.exists() and box.entry().exists()
    os.utime(recent, (time.time() - 60, time.time() - 60))
    os.utime(box.entry(), (time.time() - 120, time.time() - 120))
    room = os.statvfs(box.store)
    one_more = (len(MODEL) + 50_000) / (room.f_blocks * room.f_frsize)
    box.receive(upload, upload_bytes(upload, upload.small_contents()), share=one_more)
    assert not recent.exists() and box.entry().exists()  # recently used contents stay longest
    box.receive(
        upload, upload_bytes(upload, upload.small_contents()), share=0.0
    )  # the store keeps nothing, so the content moves
    assert [path.name for path in box.store.iterdir()] == ["lock"]
    assert contents_and_modes(box.attempt.files) == contents_and_modes(tmp_path / "attempts" / "1")


def test_damaged_store_entry_is_not_moved_into_the_attempt(box: Box, upload: Upload) -> None:
    deliver(box, upload)
    shutil.rmtree(box.attempt.files)
    box.entry().write_bytes(b"!" * len(MODEL))
    answer = box.receive(upload, upload_bytes(upload, upload.small_contents()), share=0.0)
    assert sha256_bytes(MODEL) in answer["missing"] and not box.attempt.files.exists()


def test_concurrent_upload_waits_for_the_store_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = NearbyHost(), NearbyHost()
    bundle = drill_bundle(tmp_path / "bundle")
    nearby(tmp_path / "box")
    workspace = tmp_path / "box" / "workspace"
    box = store.Store(workspace / "store.sha256", 1.0)
    assert box.lock()  # like a concurrent upload
    monkeypatch.setattr(remote, "BUSY_SECONDS", 0.2)
    placement = nearby(tmp_path / "box", second)
    attempt = assigned(tmp_path, 1, "01SECOND")
    waiting = threading.Thread(target=stage, args=(placement, attempt, bundle))
    waiting.start()
    until(lambda: second.calls.count("receive") > 3 or not waiting.is_alive(), "asking again and again")
    assert waiting.is_alive() and not (workspace / "01SECOND" / "1").exists()
    box.unlock()
    stage(nearby(tmp_path / "box", first), assigned(tmp_path / "other", 1, "01FIRST"), bundle)
    waiting.join(60)
    for run in ("01FIRST", "01SECOND"):
        assert bundle_digest(workspace / run / "1") == bundle_digest(bundle)


def partial_bytes(box: Path) -> int:
    """Bytes in the machine's partial store files."""
    return sum(path.stat().st_size for path in (box / "workspace" / "store.sha256").glob("*.partial"))


class Cut(NearbyHost):
    """A host that kills the receiving process with SIGKILL after `after` bytes."""

    after = 0
    box = Path()

    def run(self, command: Any, *, source: BinaryIO | None = None, **rest: Any) -> Any:
        if command[5] != "receive" or not self.after:
            return super().run(command, source=source, **rest)
        assert source is not None
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        data = source.read()
        if len(data) < self.after:
            out, _ = process.communicate(data)
            return SimpleNamespace(exit_code=process.returncode, output=out, errors="")
        process.stdin.write(data[: self.after])
        process.stdin.flush()
        until(lambda: partial_bytes(self.box) > 1 << 20, "a megabyte")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        raise HostUnreachableError("the line is cut")


def test_upload_resumes_after_receiver_is_killed(tmp_path: Path) -> None:
    host = Cut()
    placement, bundle = nearby(tmp_path / "box", host), drill_bundle(tmp_path / "bundle")
    host.after, host.box = 2 << 20, tmp_path / "box"
    with pytest.raises(HostUnreachableError):
        stage(placement, assigned(tmp_path), bundle)
    had = partial_bytes(tmp_path / "box")
    host.after = 0
    sent: list[int] = []
    host.bend = lambda data: (sent.append(len(data)), data)[1]
    stage(placement, assigned(tmp_path), bundle)
    wheel = next((bundle / "scripts").glob("*.whl")).stat().st_size
    assert max(sent) < wheel - had + (1 << 18)
    assert bundle_digest(tmp_path / "box" / "workspace" / "01DRILL" / "1") == bundle_digest(bundle)


@pytest.mark.xdist_group("sshd")
def test_upload_resumes_after_dropped_ssh_connection(tmp_path: Path) -> None:
    sent, cut = [0], [False]

    def through(before: int, data: bytes) -> bytes | None:
        sent[0] += len(data)
        if not cut[0]:
            time.sleep(len(data) / 4e6)  # slow enough to arrive instead of filling sshd's window
            cut[0] = partial_bytes(tmp_path / "box") > 1 << 18
            return None if cut[0] else data
        return data

    bundle = drill_bundle(tmp_path / "bundle")
    with sshd(tmp_path / "sshd") as server:
        line = Line(server.port)
        line.bend = through
        host = SshHost(server.settings(line.port), tmp_path / "keys")
        site = nearby(tmp_path / "box").site
        placement = RemotePlacement(host, site, AttemptLimits())
        with pytest.raises(HostUnreachableError):
            stage(placement, assigned(tmp_path), bundle)
        had, sent[0] = partial_bytes(tmp_path / "box"), 0
        stage(placement, assigned(tmp_path), bundle)
        host.disconnect()
        line.close()
    wheel = next((bundle / "scripts").glob("*.whl")).stat().st_size
    assert had > 1 << 18 and sent[0] < wheel - had + (1 << 18)
    assert bundle_digest(tmp_path / "box" / "workspace" / "01DRILL" / "1") == bundle_digest(bundle)


def test_receiver_stops_when_upload_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is dead, but the machine does not know it."""
    quick = remote_source("receiver.py").replace(b"STALL_TIMEOUT_S = 60", b"STALL_TIMEOUT_S = 1 ")
    assert quick != remote_source("receiver.py")
    monkeypatch.setattr(
        remote, "remote_source", lambda name: quick if name == "receiver.py" else remote_source(name)
    )

    class Stalling(NearbyHost):
        def run(self, command: Any, *, source: BinaryIO | None = None, **rest: Any) -> Any:
            assert source is not None
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(source.read()[:-100])
                process.stdin.flush()
                output = process.stdout.read()  # while stdin stays open
            return Answer(process.returncode, output, "")

    placement = nearby(tmp_path / "box", Stalling())
    with pytest.raises(HostUnreachableError, match="no data for 1 s"):
        stage(placement, assigned(tmp_path), drill_bundle(tmp_path / "bundle"))
    assert store.Store(tmp_path / "box" / "workspace" / "store.sha256", 1.0).lock()


@contextmanager
def mounted_tmpfs(options: str, folder: Path) -> Iterator[list[str]]:
    """A command prefix that runs programs with a tmpfs with these options mounted at `folder`."""
    folder.mkdir(parents=True)
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o "$0" none "$1" && echo mounted && exec sleep 600'
    command = [*isolated, "sh", "-c", mount, options, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
        enter = ["nsenter", "--user", "--mount", "--preserve-credentials", f"--target={keeper.pid}"]
        try:
            yield [*enter, "--"]
        finally:
            keeper.kill()


@pytest.mark.parametrize("options", ["size=100k", "nr_inodes=3", "nr_inodes=9"])
def test_full_disk_during_upload_raises_error_and_leaves_no_attempt(tmp_path: Path, options: str) -> None:
    workspace = tmp_path / "box" / "workspace"
    with mounted_tmpfs(options, workspace) as within:
        host = NearbyHost(within)
        with pytest.raises(RequestError, match="disk is full") as full:
            stage(nearby(tmp_path / "box", host), assigned(tmp_path), drill_bundle(tmp_path / "b"))
        assert find_cause(full.value) is Cause.DISK_FULL
        assert len(host.calls) == 1 or "size" not in options  # before any large content
        left = subprocess.run([*within, "find", str(workspace)], capture_output=True, text=True, check=True)
    names = [Path(line).name for line in left.stdout.split()]
    assert not [name for name in names if name.startswith("tmp.") or name.endswith(".partial") or name == "1"]


def test_store_deletes_partial_content_when_disk_is_full(box: Box) -> None:
    def pieces() -> Iterator[bytes]:
        yield MODEL
        raise OSError(errno.ENOSPC, "as write(2) says it")

    with pytest.raises(OSError, match="as write"):
        store.Store(box.store, 1.0).append(sha256_bytes(MODEL), len(MODEL) + 1, 0, pieces())
    assert not list(box.store.iterdir())


def test_small_disk_evicts_unused_contents_and_moves_instead_of_copying(tmp_path: Path) -> None:
    workspace, bundle = tmp_path / "box" / "workspace", drill_bundle(tmp_path / "bundle")
    wheel = next((bundle / "scripts").glob("*.whl")).stat().st_size
    with mounted_tmpfs(f"size={wheel * 3 // 2}", workspace) as within:
        old = 'mkdir "$0" && head -c "$2" /dev/zero > "$0/$1"'
        subprocess.run(
            [*within, "sh", "-c", old, str(workspace / "store.sha256"), "a" * 64, str(wheel * 3 // 4)],
            check=True,
        )
        host = NearbyHost(within)
        for run in ("01FIRST", "01SECOND"):
            there = workspace / run
            placement = nearby(tmp_path / "box", host)
            placement.site = placement.site.model_copy(update={"store": 1.0})
            stage(placement, assigned(tmp_path / run, 1, run), bundle)
            left = subprocess.run(
                [*within, "sh", "-c", 'ls "$0"/1/scripts; ls "$0"/../store.sha256; rm -r "$0"', str(there)],
                capture_output=True,
                text=True,
                check=True,
            )
            assert left.stdout.count(".whl") == 1 and left.stdout.split()[-1] == "lock"
        assert host.calls.count("receive") == 4  # the store kept nothing


def test_upload_progress_file_exists_only_during_upload(tmp_path: Path) -> None:
    upload = Upload(make_working_copy(tmp_path / "1"))
    upload_module = sys.modules[Upload.__module__]
    before = upload_module.REPORT_INTERVAL_S
    upload_module.REPORT_INTERVAL_S = 0.0
    try:
        with upload.stream(b"", {sha256_bytes(MODEL): 50_000}) as stream:
            head = stream.read(100)
            found = None
            deadline = time.monotonic() + 60
            while (found := read_upload_progress(tmp_path / "1")) is None and time.monotonic() < deadline:
                stream.read(1000)
            assert found == {"done": len(MODEL), "total": len(MODEL), "unit": "bytes sent", "figures": {}}
            assert head
    finally:
        upload_module.REPORT_INTERVAL_S = before
    assert read_upload_progress(tmp_path / "1") is None
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_upload_continues_when_local_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    upload_module = sys.modules[Upload.__module__]
    monkeypatch.setattr(upload_module, "REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(upload_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(upload_module, "write_atomic", full)
    with Upload(make_working_copy(tmp_path / "1")).stream(b"", {sha256_bytes(MODEL): 0}) as stream:
        assert stream.read().endswith(MODEL)


def test_cloned_files_are_verified_after_cloning(
    box: Box, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: int, request: int, source: int) -> int:
        data = os.pread(source, 1 << 20, 0)
        return os.pwrite(target, data[:-1] + spoilt, 0) and 0

    monkeypatch.setattr(store.fcntl, "ioctl", clone)
    spoilt = MODEL[-1:]
    assert deliver(box, upload) == 2 and contents_and_modes(box.attempt.files)["inputs/model"][0] == MODEL
    spoilt = b"!"
    with pytest.raises(AssertionError, match="not received"):
        deliver(box, upload)


# Observations.


def test_observe_pulls_new_data_and_reports_when_more_remains(tmp_path: Path) -> None:
    host = NearbyHost()
    placement, attempt = nearby(tmp_path / "box", host), assigned(tmp_path)
    stage(placement, attempt, drill_bundle(tmp_path / "bundle", gate=str(tmp_path / "gate"), say="hello"))
    assert (
        placement.observe(attempt).claim is None and not (attempt.directory / "runtime/worker.log").exists()
    )
    placement.start(attempt)
    there, log = tmp_path / "box" / "workspace" / "01DRILL" / "1", Path("runtime") / "runtime.log"
    try:
        until(lambda: b"hello" in (there / log).read_bytes() if (there / log).exists() else False, "a line")
        looks = len(host.calls)
        seen = placement.observe(attempt)
        assert (seen.more, len(host.calls) - looks) == (False, 1)
        assert b"hello" in (attempt.directory / log).read_bytes()
        (there / "artifacts" / "large.bin").write_bytes(MODEL * 10)
        assert placement.observe(attempt).more
        assert not (attempt.directory / "artifacts" / "large.bin").exists()
        with open_mirror(attempt.directory):  # like another process
            assert placement.observe(attempt).more
        placement.pull(attempt)
        assert (attempt.directory / "artifacts" / "large.bin").read_bytes() == MODEL * 10
        assert not placement.observe(attempt).more
    finally:
        assert placement.stop(attempt)


def test_observe_ignores_shell_greeting(tmp_path: Path) -> None:
    greeting = NearbyHost(["sh", "-c", 'echo "{}"; echo welcome; exec "$@"', "sh"])
    placement, attempt = nearby(tmp_path / "box", greeting), assigned(tmp_path)
    stage(placement, attempt, drill_bundle(tmp_path / "bundle"))
    assert placement.stop(attempt)
    seen = placement.observe(attempt)
    assert seen.claim is not None and not seen.unseen and not seen.more


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"seen": 5}\n',
        b'{"seen": {"claim": 1',
        b"[]\n",
        b"\xff\n" * 9,
        b'{"seen": {}}\n',
        b'{"seen": {"claim": 7}}\n',
        b'{"refused": "docker does not answer", "kind": "refused"}\n',
    ],
)
def test_observe_treats_malformed_answer_as_unseen(tmp_path: Path, answer: bytes) -> None:
    class Odd(NearbyHost):
        def run(self, command: Any, *, sink: BinaryIO | None = None, **rest: Any) -> Any:
            if sink is not None:
                sink.write(answer)
            return Answer(3 if b"refused" in answer else 0, b"", "")

    placement, attempt = nearby(tmp_path / "box", Odd()), assigned(tmp_path)
    unseen = placement.observe(attempt).unseen
    assert unseen and (b"refused" not in answer or "docker does not answer" in unseen)
    with pytest.raises(HostUnreachableError):
        placement.pull(attempt)


# The remote programs on their own.


@pytest.mark.parametrize("name", ["runner.py", "store.py", "receiver.py", "redaction.py"])
def test_remote_programs_use_python_3_8_and_the_standard_library_only(name: str) -> None:
    source = Path(redaction.__file__).read_bytes() if name == "redaction.py" else remote_source(name)
    tree = ast.parse(source, feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    ours = {"perilune.bundle.remote.runner", "perilune.bundle.remote.store"}  # sent before the program
    assert {module.split(".")[0] for module in imported - ours} <= sys.stdlib_module_names
    newer = {"removeprefix", "removesuffix", "file_digest", "is_relative_to", "hardlink_to", "readlink_to"}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not newer & called


def test_sender_and_receiver_compute_the_same_tree_digest(tmp_path: Path) -> None:
    for name, mode in (("b/é", 0o444), ("a", 0o644), ("b/c", 0o755), ("b.d", 0o600)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    entries = [make_entry(tmp_path / name, name, status) for name, status in walk(tmp_path)]
    files = sorted(receiver.File(entry.path, entry.size, entry.sha256, entry.mode) for entry in entries)
    assert receiver.entries_digest(files) == entries_digest(entries)
