"""Convert rows to Arrow tables, and Arrow lists of numbers to NumPy arrays, through their buffers.

`pa.array`, `to_numpy`, `pq.read_table` and `filter` with a list are avoided: they import pandas if it is
installed, which takes half a second in every stage.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return a table with one row for each mapping; the same as `pa.Table.from_pylist`.

    Columns may be strings, numbers, lists, structs and maps. A list of numbers may be a NumPy array.

    Raises:
        OverflowError: a number does not fit the type of its column.
    """
    columns = [_build_array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def select_rows(table: pa.Table, keep: Sequence[bool]) -> pa.Table:
    """Return the rows where `keep` is True; the same as `table.filter`."""
    return table.filter(_build_array(keep, pa.bool_()))


def to_number_arrays(lists: pa.ListArray) -> list[np.ndarray | None]:
    """Return each list of numbers as an array; None for a null."""
    numbers = lists.values
    is_boolean = pa.types.is_boolean(numbers.type)  # a bit each in Arrow, a byte each in DLPack
    flat: np.ndarray = np.from_dlpack(numbers.cast(pa.uint8()) if is_boolean else numbers)
    if is_boolean:
        flat = flat.view(np.bool_)
    ends = np.from_dlpack(lists.offsets)
    valid = lists.is_valid().to_pylist()
    return [flat[ends[i] : ends[i + 1]] if valid[i] else None for i in range(len(lists))]


def _build_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    present = np.array([value is not None for value in values], np.bool_)
    nulls = len(values) - int(present.sum())
    buffers = [_bit_buffer(present) if nulls else None]
    children: list[pa.Array] = []
    if pa.types.is_struct(kind):
        children = [
            _build_array([None if value is None else value[field.name] for value in values], field.type)
            for field in kind
        ]
    elif pa.types.is_string(kind):
        parts = [b"" if value is None else value.encode() for value in values]
        buffers += [_offset_buffer(parts), pa.py_buffer(b"".join(parts))]
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        lists = [() if value is None else value for value in values]
        buffers.append(_offset_buffer(lists))
        children = [_build_items(lists, kind)]
    else:
        buffers.append(_number_buffer([0 if value is None else value for value in values], kind))
    return pa.Array.from_buffers(kind, len(values), buffers, nulls, children=children)


def _build_items(lists: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the items of all lists, one list after the other."""
    if pa.types.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        return _build_array([{"key": key, "value": value} for key, value in chain(*lists)], entries)
    if not pa.types.is_primitive(kind.value_type):
        return _build_array(list(chain(*lists)), kind.value_type)
    numbers = np.concatenate([np.empty(0, _numpy_dtype(kind.value_type)), *map(np.asarray, lists)])
    buffer = _number_buffer(numbers, kind.value_type)
    return pa.Array.from_buffers(kind.value_type, len(numbers), [None, buffer])


def _number_buffer(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Buffer:
    """Return the buffer of numbers; booleans take a bit each."""
    array = np.asarray(values)
    numbers = array.astype(_numpy_dtype(kind), copy=False)
    if pa.types.is_integer(kind) and not np.array_equal(numbers, array):
        raise OverflowError(f"a number does not fit {kind}")
    return _bit_buffer(numbers) if pa.types.is_boolean(kind) else pa.py_buffer(np.ascontiguousarray(numbers))


def _numpy_dtype(kind: pa.DataType) -> Any:
    return kind.to_pandas_dtype()  # returns a NumPy dtype


def _bit_buffer(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _offset_buffer(lists: Sequence[Any]) -> pa.Buffer:
    """Return the start of each list in the concatenation of all, and the end of the last one."""
    ends = np.cumsum([0, *map(len, lists)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{ends[-1]} items are too many for the lists of one column")
    return pa.py_buffer(ends.astype(np.int32))
