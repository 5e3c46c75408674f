"""Secrets' values never reach the log, however they are cut up on their way."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.execution.output import LogPump

VALUE = b"abcab-secret"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.integers(0, 60), max_size=6))
def test_what_was_printed_arrives_with_values_replaced(tmp_path_factory, noise, cuts) -> None:  # type: ignore[no-untyped-def]
    text = VALUE.join([b"abca", *noise, b"ab"])
    log = Path(tmp_path_factory.mktemp("log")) / "log"
    pump = LogPump(log, {VALUE: "TOKEN"})
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in pairwise(places):
        os.write(pump.writer, text[start:end])
    pump.close()
    assert log.read_bytes() == text.replace(VALUE, b"[TOKEN]")


def test_a_pump_without_secrets_copies_bytes_as_they_are(tmp_path: Path) -> None:
    pump = LogPump(tmp_path / "log", {})
    data = bytes(range(256)) * 1000
    for start in range(0, len(data), 1 << 15):
        os.write(pump.writer, data[start : start + (1 << 15)])
    pump.close()
    assert (tmp_path / "log").read_bytes() == data
