"""The log pump redacts secret values, even when they are split across writes."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.execution.log import LogPump, LogReader
from perilune.redaction import Redactor

VALUE = b"abcab-secret"
NOTHING = Redactor()


def make_redactor() -> Redactor:
    redactor = Redactor()
    redactor.register_secret("TOKEN", VALUE.decode())
    return redactor


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.integers(0, 60), max_size=6))
def test_pump_redacts_secrets_split_across_writes(tmp_path_factory, noise, cuts) -> None:  # type: ignore[no-untyped-def]
    text = VALUE.join([b"abca", *noise, b"ab"])
    runtime = Path(tmp_path_factory.mktemp("log"))
    pump = LogPump(runtime, make_redactor())
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in pairwise(places):
        os.write(pump.writer, text[start:end])
    pump.close()
    assert b"".join(LogReader(runtime).read()) == text.replace(VALUE, b"[TOKEN]")


def test_pump_without_secrets_copies_bytes_unchanged(tmp_path: Path) -> None:
    pump = LogPump(tmp_path, NOTHING)
    data = bytes(range(256)) * 1000
    for start in range(0, len(data), 1 << 15):
        os.write(pump.writer, data[start : start + (1 << 15)])
    pump.close()
    assert (tmp_path / "runtime.log").read_bytes() == data


def test_pump_bounds_log_size_of_a_flood(tmp_path: Path) -> None:
    pump = LogPump(tmp_path, NOTHING)
    pump_out = b"first" + bytes(1 << 16)
    for _ in range(700):  # 44 MiB without a newline
        os.write(pump.writer, pump_out)
    os.write(pump.writer, b"last")
    pump.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 32 << 20
    kept = b"".join(LogReader(tmp_path).read())
    assert kept.startswith(b"first") and kept.endswith(b"last") and b" bytes omitted ---" in kept


def test_pump_escapes_terminal_sequences_in_echo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pump = LogPump(tmp_path, NOTHING, echo=True)
    printed = "é \x1b]52;c;eA==\x07\n".encode()
    for byte in printed:  # split at every byte
        os.write(pump.writer, bytes([byte]))
    pump.close()
    assert capsys.readouterr().out == "é \\x1b]52;c;eA==\\x07\n"
    assert (tmp_path / "runtime.log").read_bytes() == printed
