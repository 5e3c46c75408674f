"""Malformed GGUF files: each raises one error that names the file, and nothing is written."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from gguf_cases import tensors, vocabulary, write_gguf
from perilune.errors import RequestError
from perilune.models.gguf.convert import convert
from perilune.models.gguf.header import read_header

TOKENS, MERGES, _ = vocabulary()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def assert_rejected(path: Path, out: Path, *expected: str) -> None:
    with pytest.raises(RequestError) as raised:
        convert(path, out)
    message = str(raised.value)
    assert str(path) in message and all(part in message for part in expected), message
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer kind 'llama' is not supported"),
        ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "my-own"}, "tokenizer.ggml.pre is 'my-own'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "shape"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "token twice"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["nothing"]}, "tokenizer is malformed"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer is malformed"),
        ({"tokenizer.ggml.eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 999_999}, "eos_token_id is 999999"),
        ({"tokenizer.chat_template": "{% for"}, "template"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.block_count": 2**32 - 1}, "block_count is 4294967295"),
        ({"llama.block_count": 0}, "impossible model"),
        ({"llama.block_count": 2}, "tensor blk.1.attn_q.weight is missing"),
        ({"llama.attention.head_count": 0}, "impossible model"),
        ({"llama.attention.head_count": "four"}, "not a non-negative integer"),
        ({"llama.embedding_length": 2**31}, "token_embd.weight has shape"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "not a number above 0"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"general.alignment": 3}, "not a power of two"),
    ],
)
def test_invalid_metadata_is_rejected(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert_rejected(write_gguf(tmp_path / "model.gguf", changes=changes), tmp_path / "out", expected)


def test_unsupported_architecture_and_wrong_tensors_are_rejected(tmp_path: Path) -> None:
    assert_rejected(
        write_gguf(tmp_path / "a.gguf", "gemma3"), tmp_path / "out", "architecture 'gemma3' is not supported"
    )
    weights = tensors("llama")
    extra = weights | {"blk.0.attn_sinks.weight": weights["output_norm.weight"]}
    assert_rejected(
        write_gguf(tmp_path / "b.gguf", weights=extra), tmp_path / "out", "attn_sinks", "not part of"
    )
    weights["blk.0.attn_k.weight"] = weights["blk.0.attn_q.weight"]
    assert_rejected(
        write_gguf(tmp_path / "c.gguf", weights=weights),
        tmp_path / "out",
        "attn_k.weight has shape [512, 512]",
    )


def replace_bytes(good: Path, path: Path, old: bytes, new: bytes) -> Path:
    data = good.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_invalid_counts_types_and_offsets_are_rejected(good: Path, tmp_path: Path) -> None:
    name = b"output_norm.weight"
    entry = name + struct.pack("<IQ", 1, 512)
    end = good.read_bytes().index(entry) + len(entry)
    kind, offset = struct.unpack_from("<IQ", good.read_bytes(), end)
    whole = entry + struct.pack("<IQ", kind, offset)
    out, bad = tmp_path / "out", tmp_path / "bad.gguf"
    assert_rejected(
        replace_bytes(good, bad, whole, entry + struct.pack("<IQ", 999, offset)), out, "quantized as type 999"
    )
    assert_rejected(
        replace_bytes(good, bad, whole, entry + struct.pack("<IQ", 34, offset)), out, "quantized as TQ1_0"
    )
    assert_rejected(
        replace_bytes(good, bad, whole, entry + struct.pack("<IQ", kind, 2**63)), out, "truncated"
    )
    assert_rejected(replace_bytes(good, bad, entry, name + struct.pack("<IQ", 1, 2**62)), out, "truncated")
    assert_rejected(
        replace_bytes(good, bad, entry, name + struct.pack("<IQ", 900, 512)), out, "900 dimensions"
    )
    assert_rejected(
        replace_bytes(good, bad, struct.pack("<Q", len(name)) + name, struct.pack("<Q", 2**60) + name),
        out,
        "announces",
    )
    assert_rejected(replace_bytes(good, bad, b"GGUF\x03", b"GGUF\x09"), out, "version 9")
    assert_rejected(replace_bytes(good, bad, b"GGUF\x03", b"GGUF\0"), out, "version 0")
    assert_rejected(replace_bytes(good, bad, b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"), out, "big-endian")
    assert_rejected(replace_bytes(good, bad, b"GGUF", b"PK\x03\x04"), out, "does not start with GGUF")
    merges = b"tokenizer.ggml.merges" + struct.pack("<IIQ", 9, 8, len(MERGES))
    for item in (0, 8):  # an array of bytes and one of strings
        huge = b"tokenizer.ggml.merges" + struct.pack("<IIQ", 9, item, 2**50)
        assert_rejected(replace_bytes(good, bad, merges, huge), out, "announces 1,125,899,906,842,624 items")
    nested = b"tokenizer.ggml.merges" + struct.pack("<IIQ", 9, 9, len(MERGES))
    assert_rejected(replace_bytes(good, bad, merges, nested), out, "items of type 9")


def test_empty_missing_and_irregular_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert_rejected(tmp_path / "empty.gguf", tmp_path / "out", "empty")
    assert_rejected(tmp_path, tmp_path / "out", "not a regular file")
    with pytest.raises(RequestError, match=r"no file missing\.gguf"):
        read_header(tmp_path / "missing.gguf")


def test_truncated_files_are_rejected(good: Path, tmp_path: Path) -> None:
    data, bad = good.read_bytes(), tmp_path / "bad.gguf"
    draw = random.Random(0)
    for size in [*range(1, 64), *(draw.randrange(64, len(data)) for _ in range(200)), len(data) - 1]:
        bad.write_bytes(data[:size])
        with pytest.raises(RequestError, match=r"truncated|does not start|announces"):
            read_header(bad)


def test_corrupted_header_bytes_raise_only_request_errors(good: Path, tmp_path: Path) -> None:
    data, bad = good.read_bytes(), tmp_path / "bad.gguf"
    header = data.index(b"blk.0.ffn_down.weight")
    draw = random.Random(0)
    refusals = 0
    for _ in range(150):
        changed = bytearray(data)
        for index in draw.sample(range(header), 2):
            changed[index] = draw.randrange(256)
        bad.write_bytes(changed)
        try:
            convert(bad, tmp_path / "out")
        except RequestError as error:
            refusals += 1
            assert str(bad) in str(error)
    assert refusals > 50
