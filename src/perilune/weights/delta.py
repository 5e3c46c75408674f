"""Weight updates as files: whole tensors, or the positions and values of the entries that changed.

An update is a safetensors file. Per tensor it has

    NAME                        the whole tensor, or
    NAME/values, NAME/gaps8     the new values of the changed entries in order, and the numbers of unchanged
                                entries before each: 8, 16 or 32 bits wide, compressed with zstd

and nothing for a tensor without changes. Values overwrite, so applying an update twice is harmless. The
metadata has the version, the digest of the earlier tensors that the update does not have whole (`base`), and
the digest of all tensors after it (`result`). An update without a base is the complete model as safetensors.

An update may come from another machine. Names, dtypes, shapes, sizes and positions are checked, nothing is
unpickled, and `WeightReader.read` changes no tensor: the caller loads its result, or keeps the old weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.errors import RequestError
from perilune.weights import SendMode

FORMAT = "perilune-weights-1"
FULL_UPDATE_INTERVAL = 20  # updates; fewer if together they are as large as all tensors
GAPS: dict[str, type[np.unsignedinteger[Any]]] = {"gaps8": np.uint8, "gaps16": np.uint16, "gaps32": np.uint32}
VALUES = "values"

ChangeFinder = Callable[[str, Tensor], NDArray[np.int64] | None]
"""Returns the ascending positions at which a named flat tensor may have changed; None if unknown."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_METADATA = {"version": r"[0-9]{1,9}", "base": r"([0-9a-f]{32})?", "result": r"[0-9a-f]{32}"}
_ZSTD_LEVEL = 1  # higher levels of zstd shrink gaps by another 2% in three times the time


@dataclass(frozen=True)
class Update:
    """An update that was written.

    Attributes:
        version: policy version of the weights after the update.
        rewritten: names of the tensors that are sent whole.
        named: names of all tensors in the update, whole or as a delta.
        base, result: digests of the tensors that the receiver must have, and of all tensors afterwards.
        changed: share of the values that changed; a tensor whose changes are unknown counts as changed.
        bytes: size of the file.
    """

    path: Path
    version: int
    rewritten: frozenset[str]
    named: frozenset[str]
    base: str
    result: str
    changed: float
    bytes: int

    def replaces(self, earlier: Update) -> bool:
        """Return whether this update makes `earlier` unnecessary."""
        return earlier.named <= self.rewritten


class WeightWriter:
    """Writes the updates of one sequence of versions.

    Args:
        mode: form in which tensors are sent. "auto" sends tensors of four or more bytes per value whole,
            because nearly all of their values change in every step (docs/results/weight_sync.md).
    """

    def __init__(self, mode: SendMode = "auto") -> None:
        self._mode = mode
        self._digests: dict[str, str] = {}
        self._until_full_update = 0
        self._bytes_written = 0  # since all tensors were sent whole

    def write(
        self, path: Path, state: Mapping[str, Tensor], version: int, changed: ChangeFinder | None = None
    ) -> Update:
        """Write the tensors that differ from those of the last update, as a new file at `path`.

        Args:
            state: tensors by name: all, or those that may have changed.
            changed: finds the changed entries of a tensor; None sends tensors whole.
        """
        full = _size(state.values())
        full_update = self._until_full_update == 0 or self._bytes_written >= full
        before, parts = dict(self._digests), dict[str, Tensor]()
        rewritten, named, differing = set(), set(), 0
        for name, tensor in state.items():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest = tensor_digest(flat)
            if digest == self._digests.get(name) and not full_update:
                continue
            positions = self._find_changes(name, flat, changed)
            differing += flat.numel() if positions is None else len(positions)
            delta = None if positions is None or full_update else _encode_changes(name, flat, positions)
            if delta is None or _size(delta.values()) >= flat.nbytes:
                parts[name] = flat.reshape(tensor.shape)
                rewritten.add(name)
            else:
                parts |= delta
            named.add(name)
            self._digests[name] = digest
        base = combine_digests({name: digest for name, digest in before.items() if name not in rewritten})
        result = combine_digests(self._digests)
        _save(parts, path, {"version": str(version), "base": base, "result": result})
        size = path.stat().st_size
        self._until_full_update = FULL_UPDATE_INTERVAL - 1 if full_update else self._until_full_update - 1
        self._bytes_written = 0 if full_update else self._bytes_written + _size(parts.values())
        share = differing / max(sum(tensor.numel() for tensor in state.values()), 1)
        return Update(path, version, frozenset(rewritten), frozenset(named), base, result, share, size)

    def _find_changes(
        self, name: str, flat: Tensor, changed: ChangeFinder | None
    ) -> NDArray[np.int64] | None:
        wide = flat.element_size() >= 4
        if changed is None or self._mode == "full" or (self._mode == "auto" and wide):
            return None
        return changed(name, flat)


class CopyComparison:
    """A finder of changed entries that compares tensors with a copy of the last update."""

    def __init__(self) -> None:
        self._copies: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, flat: Tensor) -> NDArray[np.int64] | None:
        """Update the copy and return the positions that changed; None for the first tensor of a name."""
        bits = _as_integers(flat)
        before = self._copies.get(name)
        if before is None:
            self._copies[name] = bits.copy()
            return None
        positions = np.flatnonzero(before != bits)
        before[positions] = bits[positions]
        return positions


class BoundsComparison:
    """A finder of changed entries that uses bounds of the earlier values instead of a copy.

    An entry has not changed if both bounds round to its current value. Rounding is monotonic, so no change is
    missed. An unchanged entry whose bounds round differently is sent needlessly.

    Args:
        bounds: returns the lower and upper bounds of a named tensor's earlier values, in full precision.
    """

    def __init__(self, bounds: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        self._bounds = bounds

    def __call__(self, name: str, flat: Tensor) -> NDArray[np.int64]:
        """Return the positions at which a flat tensor may differ from its earlier values."""
        now = _as_integers(flat)
        low, high = (_as_integers(bound.to("cpu", flat.dtype).reshape(-1)) for bound in self._bounds(name))
        return np.flatnonzero((low != now) | (high != now))


class WeightReader:
    """Reads updates, each relative to the weights after the previous ones.

    Args:
        dtypes: dtypes in which tensors are sent, where they differ from those of the receiver.

    Attributes:
        version: policy version of the last committed update; -1 before the first.
        result: digest of all tensors after that update.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype] = {}) -> None:
        self.version = -1
        self.result = ""
        self._dtypes = dtypes
        self._digests: dict[str, str] = {}
        self._next: tuple[int, str, dict[str, str]] | None = None

    def set_base(self, held: Mapping[str, Tensor], version: int) -> None:
        """Use `held`, for example from a checkpoint, as the weights of `version`."""
        dtypes = {name: self._dtypes.get(name, tensor.dtype) for name, tensor in held.items()}
        self._digests = {name: tensor_digest(tensor.to(dtypes[name])) for name, tensor in held.items()}
        self.version, self.result = version, combine_digests(self._digests)

    def read(self, path: Path, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the new tensors by name, in the dtypes that are sent. Call `commit` when they are loaded.

        Args:
            held: all tensors of the receiver, with the values of the last commit.

        Raises:
            FileNotFoundError: when there is no file at `path`.
            RequestError: when the file is damaged or malformed, or is for another model or another base.
        """
        try:
            with safe_open(path, framework="pt") as file:
                meta = _read_metadata(file.metadata(), path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError) as error:
            raise RequestError(f"not a weight update: {error}", where=str(path)) from None
        rewritten = {name for name in tensors if "/" not in name}
        unchanged = {name: digest for name, digest in self._digests.items() if name not in rewritten}
        if held.keys() - self._digests.keys() - rewritten or combine_digests(unchanged) != meta["base"]:
            raise RequestError(
                f"version {meta['version']} needs weights with digest {meta['base']}, and this receiver has"
                f" {combine_digests(unchanged)} of version {self.version}",
                where=str(path),
                remedy="send a full update",
            )
        new = _decode_update(tensors, held, self._dtypes, path)
        digests = self._digests | {name: tensor_digest(tensor) for name, tensor in new.items()}
        if (result := combine_digests(digests)) != meta["result"]:
            raise RequestError(
                f"version {meta['version']} has digest {result} instead of {meta['result']}",
                where=str(path),
                remedy="the file was damaged; send it again",
            )
        self._next = int(meta["version"]), result, digests
        return new

    @property
    def next_version(self) -> int:
        assert self._next is not None
        return self._next[0]

    def commit(self) -> None:
        """Record that the tensors of the last `read` are loaded."""
        assert self._next is not None
        (self.version, self.result, self._digests), self._next = self._next, None


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3-128 digest of dtype and values, which detects damage but not forgery."""
    bits = _as_integers(tensor.detach().cpu().contiguous().reshape(-1))
    return f"{tensor.dtype}:{xxhash.xxh3_128_hexdigest(bits.data)}"


def combine_digests(digests: Mapping[str, str]) -> str:
    """Combine the digests of named tensors into one digest; "" without tensors."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest(lines.encode()) if digests else ""


def _encode_changes(name: str, flat: Tensor, positions: NDArray[np.int64]) -> dict[str, Tensor]:
    """Return the parts of a delta: the values at ascending positions, and the gaps between the positions."""
    gaps = np.diff(positions, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    kind = next(kind for kind, width in GAPS.items() if widest <= np.iinfo(width).max)
    # All low bytes come first, then all high bytes, because each kind compresses better alone.
    planes = gaps.astype(GAPS[kind]).view(np.uint8).reshape(len(gaps), -1).T
    packed = pa.Codec("zstd", compression_level=_ZSTD_LEVEL).compress(planes.tobytes(), asbytes=True)
    values = torch.from_numpy(_as_integers(flat)[positions]).view(flat.dtype)
    return {
        f"{name}/{VALUES}": values,
        f"{name}/{kind}": torch.from_numpy(np.frombuffer(packed, np.uint8).copy()),
    }


def _decode_update(
    parts: dict[str, Tensor], held: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], path: Path
) -> dict[str, Tensor]:
    """Return the new tensors by name, as `WeightReader.read`."""

    def refuse(problem: str) -> RequestError:
        return RequestError(problem, where=str(path), remedy="send a full update of this model")

    new = {name: parts.pop(name) for name in list(parts) if "/" not in name}
    for name, tensor in new.items():
        old = held.get(name)
        if old is None:
            raise refuse(f"tensor {name[:80]!r} is not in the model")
        dtype = dtypes.get(name, old.dtype)
        if old.shape != tensor.shape or dtype != tensor.dtype:
            raise refuse(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(old.shape)}"
            )
    for name in sorted({part.rpartition("/")[0] for part in parts}):
        old = held.get(name)
        if old is None or name in new:
            raise refuse(f"tensor {name[:80]!r} {'occurs twice' if name in new else 'is not in the model'}")
        dtype = dtypes.get(name, old.dtype)
        kinds = [kind for kind in GAPS if f"{name}/{kind}" in parts]
        values = parts.pop(f"{name}/{VALUES}", None)
        if len(kinds) != 1 or values is None or values.dtype != dtype or values.dim() != 1:
            raise refuse(f"the changes of tensor {name} need one list of gaps and one of {dtype} values")
        positions = _decode_gaps(parts.pop(f"{name}/{kinds[0]}"), GAPS[kinds[0]], len(values), old.numel())
        if positions is None:
            raise refuse(f"the positions of tensor {name} do not fit its {old.numel():,} values")
        flat = old.detach().to("cpu", dtype, copy=True).contiguous().reshape(-1)
        _as_integers(flat)[positions] = _as_integers(values)
        new[name] = flat.reshape(old.shape)
    if parts:
        raise refuse(f"unknown part {next(iter(parts))[:80]!r}")
    return new


def _decode_gaps(
    packed: Tensor, width: type[np.unsignedinteger[Any]], count: int, size: int
) -> NDArray[np.int64] | None:
    """Return the `count` ascending positions that gaps encode; None if one is not below `size`."""
    if packed.dtype != torch.uint8 or packed.dim() != 1 or count > size:
        return None
    try:
        planes = pa.Codec("zstd").decompress(packed.numpy(), count * np.dtype(width).itemsize, asbytes=True)
    except (OSError, pa.ArrowInvalid):
        return None
    gaps = np.frombuffer(planes, np.uint8).reshape(-1, count).T.copy().view(width)[:, 0] if count else ()
    positions = np.cumsum(np.asarray(gaps, np.int64) + 1) - 1
    return None if count and positions[-1] >= size else positions


def _read_metadata(metadata: Mapping[str, str] | None, path: Path) -> Mapping[str, str]:
    """Check and return the metadata of an update."""
    meta = metadata or {}
    if meta.get("format") != FORMAT:
        raise RequestError(f"not a weight update in the format {FORMAT}", where=str(path))
    for key, form in _METADATA.items():
        if not re.fullmatch(form, meta.get(key, "-")):
            raise RequestError(f"{key} {meta.get(key, '')[:40]!r} is malformed", where=str(path))
    return meta


def _save(parts: Mapping[str, Tensor], path: Path, about: Mapping[str, str]) -> None:
    """Write a file under another name and rename it to `path`, so that readers find only complete files."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(dict(parts), temporary, {"format": FORMAT, **about})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _as_integers(flat: Tensor) -> NDArray[Any]:
    """View the memory of a flat tensor as integers."""
    bits: NDArray[Any] = flat.view(_BITS[flat.element_size()]).numpy()
    return bits


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
