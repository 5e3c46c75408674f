"""Weight updates as files: bitwise exact transfer, and refusal of every other file."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from perilune.engine.engine import Engine
from perilune.errors import RequestError
from perilune.models.checkpoints.loading import new_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.weights.delta import (
    FULL_UPDATE_INTERVAL,
    CopyComparison,
    WeightReader,
    WeightWriter,
    combine_digests,
    tensor_digest,
)
from perilune.weights.precision import engine_dtypes

State = dict[str, torch.Tensor]
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SHAPES = ((), (0,), (1,), (300,), (17, 40), (3, 0, 5))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Random bits, including NaN, infinities and -0."""
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    width = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape))
    return (
        torch.frombuffer(bytearray(rng.bytes(count * width)), dtype=dtype).reshape(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


class Pair:
    """A writer, a reader, and the reader's weights."""

    def __init__(self, folder: Path, state: State, sent: Any = "delta") -> None:
        self.folder, self.writer, self.changed, self.reader = (
            folder,
            WeightWriter(sent),
            CopyComparison(),
            WeightReader(),
        )
        self.held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.count = 0
        self.send(state)

    def write(self, state: State) -> Any:
        self.count += 1
        return self.writer.write(self.folder / f"{self.count}", state, self.count, self.changed)

    def read(self, path: Path) -> None:
        self.held |= self.reader.read(path, self.held)
        self.reader.commit()

    def send(self, state: State) -> Any:
        update = self.write(state)
        self.read(update.path)
        return update


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.6, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_update_transfers_every_bit(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    state = {f"layer.{i}": random_bits(dtype, shape, rng) for i, shape in enumerate(SHAPES)}
    pair = Pair(tmp_path_factory.mktemp("pair"), state)
    assert same(pair.held, state)
    for number in range(2):
        for name, tensor in state.items():
            mask = torch.from_numpy(np.asarray(rng.random(tensor.shape) < share))
            state[name] = torch.where(mask, random_bits(dtype, tensor.shape, rng), tensor)
        update = pair.send(dict(state))
        assert same(pair.held, state)
        if share <= 0.05 and not number and dtype != torch.bool:
            assert "layer.4" not in update.rewritten  # a delta is smaller for few changes
        assert update.changed <= share * 1.5 + 0.01


def small() -> State:
    return {"a": torch.arange(1000).float().bfloat16(), "b": torch.ones(4, 5)}


def altered(state: State, *positions: int) -> State:
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["a"][list(positions)] += 4096
    return state


def test_few_changes_take_few_bytes(tmp_path: Path) -> None:
    state = {"a": torch.arange(1 << 16).float().bfloat16()}
    pair = Pair(tmp_path, state, "auto")
    few = pair.send(altered(state, *range(0, 1 << 16, 100)))
    assert few.bytes < pair.held["a"].nbytes / 30
    all_changed = pair.send({"a": -pair.held["a"] - 1})
    assert all_changed.rewritten == {"a"}  # a delta would not be smaller


def test_auto_mode_sends_deltas_of_narrow_tensors_only(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1000).bfloat16(), "b": torch.zeros(1000)}
    pair = Pair(tmp_path, state, "auto")
    new = {name: tensor.clone() for name, tensor in state.items()}
    new["a"][3] = new["b"][3] = 1
    assert pair.send(new).rewritten == {"b"}
    assert same(pair.held, new)
    assert pair.send(new).named == set()


def test_full_update_is_sent_at_regular_intervals(tmp_path: Path) -> None:
    state = small()
    pair = Pair(tmp_path, state)
    sizes = []
    for number in range(2 * FULL_UPDATE_INTERVAL):
        state = altered(state, number)
        sizes.append(bool(pair.send(state).rewritten))
    assert [number + 2 for number, whole in enumerate(sizes) if whole] == [
        FULL_UPDATE_INTERVAL + 1,
        2 * FULL_UPDATE_INTERVAL + 1,
    ]


def test_full_update_replaces_chain_of_deltas_that_would_be_larger(tmp_path: Path) -> None:
    """The chain of updates for a new receiver is never much larger than the weights."""
    state = {"a": torch.arange(4000).bfloat16()}
    pair = Pair(tmp_path, state)
    whole = []
    for _ in range(6):
        state = altered(state, *range(2400))
        whole.append(bool(pair.send(state).rewritten))
    assert whole == [False, False, True, False, False, True]


def test_update_for_another_base_is_refused(tmp_path: Path) -> None:
    state = small()
    pair = Pair(tmp_path, state)
    skipped = pair.write(altered(state, 5))
    later = pair.write(altered(state, 5, 6))
    before = pair.held
    with pytest.raises(
        RequestError, match=f"version 3 needs weights with digest {later.base}.* of version 1"
    ):
        pair.reader.read(later.path, pair.held)
    assert pair.held is before and same(before, state)
    pair.read(skipped.path)
    pair.read(later.path)
    assert same(pair.held, altered(state, 5, 6))
    pair.read(pair.write(altered(state, 5, 6, 7)).path)


def test_new_receiver_needs_a_full_update_first(tmp_path: Path) -> None:
    pair = Pair(tmp_path, small())
    update = pair.send(altered(small(), 1))
    with pytest.raises(RequestError, match="of version -1"):
        WeightReader().read(update.path, pair.held)


def test_full_update_of_some_tensors_fits_every_base(tmp_path: Path) -> None:
    """An adapter is sent without its base model, and a receiver may miss versions."""
    state = small()
    pair = Pair(tmp_path, state, "full")
    first = pair.write({"b": state["b"] + 1})
    second = pair.write({"b": state["b"] + 2})
    assert second.replaces(first) and first.base == second.base
    pair.read(second.path)
    assert same(pair.held, state | {"b": state["b"] + 2})


def test_killed_writer_leaves_only_complete_versions(tmp_path: Path) -> None:
    """A writer is killed at ten different times; each existing file then gives exactly its version."""

    def state(version: int) -> State:
        return {"a": torch.full((900,), version).bfloat16(), "b": torch.from_numpy(np.full(1 << 20, version))}

    for instant in range(10):
        folder = tmp_path / str(instant)
        folder.mkdir()
        child = os.fork()
        if not child:
            try:
                writer, changed = WeightWriter("auto"), CopyComparison()
                for version in range(1000):
                    writer.write(folder / f"weights-{version:06d}", state(version), version, changed)
            finally:
                os._exit(1)
        while not (folder / "weights-000002").exists():
            time.sleep(0.001)
        time.sleep(0.0013 * instant)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        reader, held = WeightReader(), {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        files = sorted(folder.glob("weights-*"))
        for version, path in enumerate(files):
            held |= reader.read(path, held)
            reader.commit()
            assert reader.version == version and same(held, state(version))
        assert len(files) > 2


@pytest.mark.parametrize("where", [0.3, 0.6, 0.9, 0.999])
def test_changed_byte_is_refused(tmp_path: Path, where: float) -> None:
    state = {"a": torch.zeros(5000).bfloat16()}
    pair = Pair(tmp_path, state)
    path = pair.write(altered(state, *range(0, 5000, 7))).path
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(RequestError):
        pair.reader.read(path, pair.held)
    assert same(pair.held, state)


def packed(gaps: np.ndarray[Any, Any]) -> torch.Tensor:
    planes = gaps.view(np.uint8).reshape(len(gaps), -1).T.tobytes()
    return torch.frombuffer(bytearray(pa.Codec("zstd").compress(planes, asbytes=True)), dtype=torch.uint8)


U16 = np.dtype(np.uint16)
BOMB = torch.frombuffer(bytearray(pa.Codec("zstd").compress(bytes(1 << 24), asbytes=True)), dtype=torch.uint8)
ONE = torch.ones(1).bfloat16()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"a/values": ONE, "a/gaps16": packed(np.array([1000], U16))}, "positions of tensor a"),
        ({"a/values": ONE, "a/gaps32": packed(np.array([2**32 - 1], np.uint32))}, "positions of tensor a"),
        ({"a/values": ONE, "a/gaps16": packed(np.array([1, 2], U16))}, "positions of tensor a"),
        ({"a/values": ONE.repeat(2), "a/gaps16": packed(np.array([1], U16))}, "positions of tensor a"),
        ({"a/values": ONE.repeat(1001), "a/gaps8": packed(np.zeros(1001, np.uint8))}, "positions of tensor"),
        ({"a/values": ONE, "a/gaps16": BOMB}, "positions of tensor a"),
        ({"a/values": ONE, "a/gaps16": torch.zeros(2)}, "positions of tensor a"),
        ({"a/values": ONE, "a/gaps16": torch.zeros(9, dtype=torch.uint8)}, "positions of tensor a"),
        ({"a/values": ONE.float(), "a/gaps16": packed(np.array([1], U16))}, "bfloat16 values"),
        ({"a/values": ONE[None], "a/gaps16": packed(np.array([1], U16))}, "bfloat16 values"),
        ({"a/values": ONE}, "one list of gaps"),
        ({"a/gaps16": packed(np.array([1], U16))}, "one list of gaps"),
        ({"a/gaps8": BOMB, "a/gaps16": BOMB.clone(), "a/values": ONE}, "one list of gaps"),
        ({"a": torch.zeros(1000).bfloat16(), "a/values": ONE, "a/gaps8": BOMB}, "occurs twice"),
        ({"a": torch.zeros(1000)}, "instead of torch.bfloat16"),
        ({"a": torch.zeros(10, 100).bfloat16()}, r"instead of torch.bfloat16 \[1000\]"),
        ({"c": ONE.clone()}, "'c' is not in the model"),
        ({"c/values": ONE, "c/gaps16": BOMB}, "'c' is not in the model"),
        ({"a/b/../../c": ONE}, "not in the model"),
        ({"/a": ONE}, "not in the model"),
        ({"a/x": ONE.clone(), "a/values": ONE, "a/gaps16": packed(np.array([1], U16))}, "unknown part 'a/x'"),
    ],
)  # fmt: skip
def test_hostile_file_is_refused(tmp_path: Path, parts: State, error: str) -> None:
    pair = Pair(tmp_path, small())
    before = {name: tensor.clone() for name, tensor in pair.held.items()}
    kept = {name: tensor_digest(tensor) for name, tensor in pair.held.items() if name not in parts}
    about = {
        "format": "perilune-weights-1",
        "version": "2",
        "base": combine_digests(kept),
        "result": "0" * 32,
    }
    save_file(parts, tmp_path / "hostile", about)
    with pytest.raises(RequestError, match=error):
        pair.reader.read(tmp_path / "hostile", pair.held)
    assert same(pair.held, before)
    pair.send(altered(small(), 3))  # the refused file left no trace


@pytest.mark.parametrize(
    "changes",
    [{"format": "2"}, {"version": "-1"}, {"version": "9" * 10}, {"base": "é"}],
)
def test_hostile_metadata_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    pair = Pair(tmp_path, small())
    path = pair.write(altered(small(), 1)).path
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, {**about, **changes})
    with pytest.raises(RequestError, match=r"format|malformed"):
        pair.reader.read(path, pair.held)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 100, b"\x80\x04\x95", (10**12).to_bytes(8, "little") + b"{}"]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(RequestError, match="not a weight update"):
        WeightReader().read(tmp_path / "other", {})


def test_weights_in_engine_dtypes_give_the_same_scores() -> None:
    """Weights rounded to the engine's dtypes give bitwise the scores of the learner's weights."""
    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, 0)
    assert engine_dtypes(decoder) == {}
    decoder.set_precision("bfloat16")
    dtypes = engine_dtypes(decoder)
    assert len(dtypes) == sum(tensor.ndim > 1 for tensor in decoder.parameters())
    before = Engine(decoder, slots=2).score([[1, 2, 3]], [[4, 5, 6, 7]])
    with torch.no_grad():
        for name, tensor in decoder.named_parameters():
            tensor.copy_(tensor.to(dtypes.get(name, tensor.dtype)))
    assert np.array_equal(before, Engine(decoder, slots=2).score([[1, 2, 3]], [[4, 5, 6, 7]]))
