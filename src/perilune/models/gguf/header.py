"""Reads the header of a GGUF file: metadata and the table of tensors.

The file is untrusted. Every count, length and offset is checked before memory of that size is read or
allocated. The reader of the `gguf` package is not used, because a count in a hostile file makes it loop
forever.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.files import open_regular

QUANTIZATIONS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""Names of the tensor types that can be read."""

_VERSIONS = (2, 3)
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ITEMS = 1 << 22  # of an array; the largest vocabularies have 2^18 tokens
_MAX_STRING_BYTES = 1 << 24
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Formats of `struct` by type of a metadata value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LAYOUTS = {form: struct.Struct(f"<{form}") for form in _SCALARS.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the table describes it.

    Attributes:
        kind: one of `QUANTIZATIONS`.
        shape: rows first, as in torch; the file lists the dimensions in the opposite order.
        offset: of the first byte in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file. Lookups raise a `RequestError` that names the file and the key."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def error(self, what: str, remedy: str = "") -> RequestError:
        """Return an error about this file."""
        return RequestError(what, where=str(self.path), remedy=remedy)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a non-negative integer of the metadata."""
        value: int = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a non-negative integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a non-negative integer, or None where the key is missing."""
        return self.integer(key) if key in self.metadata else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def array(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return an array whose items are all of type `kind`."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, "an array of the right type")
        return value

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"the metadata has no {key}", "convert the model again with a newer llama.cpp")
        return value

    def _wrong(self, key: str, needed: str) -> RequestError:
        return self.error(f"{key} in the metadata is {str(self.metadata[key])[:40]!r}, not {needed}")


def read_header(path: Path) -> GgufHeader:
    """Read the header of the file at `path`.

    Raises:
        RequestError: when the file is missing, truncated or malformed, or has tensors of an unknown type.
    """
    with open_regular(path) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            what, remedy = "not a GGUF file: it is empty", "download the file again"
            raise RequestError(what, where=str(path), remedy=remedy) from None
        with data:
            return _Cursor(data, path).header()


class _Cursor:
    """Reads a mapped file from front to back."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise self.malformed("it does not start with GGUF", "give a .gguf file")
        self.at = 4
        version = self.scalar("I")
        if version not in _VERSIONS:
            big_endian = version and version & 0xFFFF == 0  # such as 3 << 24
            kind = "big-endian" if big_endian else f"version {version}"
            raise self.malformed(f"it is {kind}; versions 2 and 3, little-endian, are read")
        tensors = self.count(_MAX_TENSORS, "tensors")
        keys = self.count(_MAX_KEYS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string()
            if key in metadata:
                raise self.malformed(f"the metadata has {key[:80]!r} twice")
            metadata[key] = self.value(self.scalar("I"))
        located: dict[str, GgufTensor] = {}
        table = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.malformed(f"general.alignment is {str(alignment)[:40]}, not a power of two")
        start = -(-self.at // alignment) * alignment
        for entry in table:
            tensor = self.locate_tensor(*entry, start=start)
            if tensor.name in located:
                raise self.malformed(f"two tensors have the name {tensor.name[:80]!r}")
            located[tensor.name] = tensor
        return GgufHeader(self.path, metadata, located)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read one line of the table: name, shape, number of the type, offset in the data section."""
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.malformed(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def locate_tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int
    ) -> GgufTensor:
        """Return the tensor with its position in the file, which must lie inside the file."""
        kind, block_items, block_bytes = self.quantization(name, number)
        row = shape[-1] if shape else 1
        if row % block_items:
            raise self.malformed(f"tensor {name[:80]!r} has rows of {row} values in blocks of {block_items}")
        nbytes = math.prod(shape) // block_items * block_bytes
        end = start + offset + nbytes
        if end > len(self.data):
            raise self.truncated(f"tensor {name[:80]!r} ends at byte {end:,}")
        return GgufTensor(name, kind, shape, start + offset, nbytes)

    def quantization(self, name: str, number: int) -> tuple[str, int, int]:
        """Return the name of a tensor type, values in a block, bytes of a block."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            readable, label = False, f"type {number}"
        else:
            readable, label = kind.name in QUANTIZATIONS, kind.name
        if not readable:
            raise RequestError(
                f"tensor {name[:80]!r} is quantized as {label}, which cannot be read",
                where=str(self.path),
                remedy=f"use a file with one of {', '.join(QUANTIZATIONS)}",
            )
        return (label, *GGML_QUANT_SIZES[kind])

    def value(self, kind: int) -> Any:
        """Read a metadata value: a scalar, a string, or a flat array of either."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.malformed(f"a metadata value has type {kind}")
        item = self.scalar("I")
        number = self.count(_MAX_ITEMS, "items of an array")
        if item == _STRING:
            return [self.string() for _ in range(number)]
        if item not in _SCALARS:
            raise self.malformed(f"an array has items of type {item}")
        layout = f"<{number}{_SCALARS[item]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))

    def scalar(self, form: str) -> Any:
        layout = _LAYOUTS[form]
        return layout.unpack(self.take(layout.size))[0]

    def count(self, most: int, what: str) -> int:
        """Read the number of items that follow, each of which takes at least one byte."""
        number: int = self.scalar("Q")
        if number > most:
            raise self.malformed(f"it announces {number:,} {what}")
        return number

    def string(self) -> str:
        length = self.count(_MAX_STRING_BYTES, "bytes in a string")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.malformed("a string is not UTF-8 text") from None

    def take(self, number: int) -> bytes:
        if self.at + number > len(self.data):
            raise self.truncated(f"its header continues to byte {self.at + number:,}")
        self.at += number
        return self.data[self.at - number : self.at]

    def malformed(self, why: str, remedy: str = "download the file again") -> RequestError:
        return RequestError(f"not a readable GGUF file: {why}", where=str(self.path), remedy=remedy)

    def truncated(self, why: str) -> RequestError:
        size = len(self.data)
        what = f"the GGUF file is truncated: {why}, and the file has {size:,}"
        return RequestError(what, where=str(self.path), remedy="download the file again")
