"""The run log: bounded head and tail, followed by readers, with markers for omitted bytes."""

import contextlib
import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.execution.log import (
    KEPT_PIECES,
    LogPump,
    LogReader,
    LogWriter,
    log_pieces,
    log_tail,
    write_whole_log,
)
from perilune.redaction import Redactor

PIECE = 64


def whole(runtime: Path) -> bytes:
    return b"".join(LogReader(runtime).read())


def size(runtime: Path) -> int:
    return sum(path.stat().st_size for _, path in log_pieces(runtime))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * PIECE), max_size=20), st.integers(0, 1 << 30))
def test_log_keeps_head_and_tail_and_counts_omitted_bytes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    runtime = tmp_path_factory.mktemp("log")
    printed = b""
    writer = LogWriter(runtime, PIECE)
    for number, length in enumerate(sizes):
        data = bytes((seed + number + i) % 251 for i in range(length))
        printed += data
        writer.write(data)
        if number == len(sizes) // 2:  # another worker continues the log
            writer.close()
            writer = LogWriter(runtime, PIECE)
        assert size(runtime) <= (2 + KEPT_PIECES) * PIECE
    writer.close()
    kept = whole(runtime)
    if size(runtime) == len(printed):
        assert kept == printed
        return
    dropped = len(printed) - size(runtime)
    marker = f"\n--- {dropped:,} bytes omitted ---\n".encode()
    first, _, last = kept.partition(marker)
    assert first == printed[:PIECE] and printed.endswith(last) and len(last) >= KEPT_PIECES * PIECE
    write_whole_log(runtime, runtime / "task.log")
    assert (runtime / "task.log").read_bytes() == kept


def test_reader_that_keeps_up_sees_every_line_once(tmp_path: Path) -> None:
    writer, reader = LogWriter(tmp_path, PIECE), LogReader(tmp_path)
    seen = b""
    for number in range(30):
        writer.write(f"line {number}\n".encode() * 5)
        seen += b"".join(reader.read())
    assert seen == b"".join(f"line {number}\n".encode() * 5 for number in range(30))
    assert b"".join(reader.read()) == b""


def test_slow_reader_sees_marker_for_omitted_bytes(tmp_path: Path) -> None:
    writer, reader = LogWriter(tmp_path, PIECE), LogReader(tmp_path)
    writer.write(b"begun\n")
    assert b"".join(reader.read()) == b"begun\n"
    writer.write(b"x" * 100 * PIECE)
    late = b"".join(reader.read())
    assert late.startswith(b"x" * (PIECE - 6) + b"\n--- ") and late.endswith(b"x" * KEPT_PIECES * PIECE)


def test_bytes_lost_to_full_disk_are_marked_as_omitted(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, PIECE)
    writer.write(b"before\n")
    real: Any = writer._file

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "no space")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    writer._file = Full()  # type: ignore[assignment]
    writer.write(b"lost\n")
    writer.write(b"after\n")
    writer.close()
    assert whole(tmp_path) == b"before\n\n--- 5 bytes omitted ---\nafter\n"


def test_task_and_log_outlive_the_reader_of_the_echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    printed = bytes(1 << 20)  # more than a pipe holds
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        pump = LogPump(tmp_path, Redactor(), echo=True)
        task = threading.Thread(target=os.write, args=(pump.writer, printed), daemon=True)
        task.start()
        task.join(10)
        assert not task.is_alive()
        pump.close()
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            stdout.close()
    assert whole(tmp_path) == printed


def test_task_prints_characters_that_stdout_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would read the pipe any more, and the task would wait forever."""
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    pump = LogPump(tmp_path, Redactor(), echo=True)
    os.write(pump.writer, "1 → 2\n".encode())
    pump.close()
    assert shown.getvalue() == b"1 ? 2\n"
    assert (tmp_path / "runtime.log").read_text() == "1 → 2\n"


def test_log_tail_spans_pieces(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, PIECE)
    for number in range(40):
        writer.write(f"line {number}\n".encode())
    assert log_tail(tmp_path, 12) == "\n".join(f"line {number}" for number in range(28, 40))
    assert log_tail(tmp_path / "nowhere") == ""


def test_log_pieces_ignores_other_files(tmp_path: Path) -> None:
    for name in ("runtime.log.gz", "runtime.log.tmp", "runtime.logs", "runtime.log.12x"):
        (tmp_path / name).write_text("no")
    assert log_pieces(tmp_path) == []
