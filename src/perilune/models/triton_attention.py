"""Decoding over a paged cache on a GPU in Triton: storing one token of each sequence, and its attention.

Each program attends to `PART` keys of a sequence (split-K, as in Flash-Decoding: Dao et al., 2023) with a
running softmax (Milakov and Gimelshein, 2018). A second kernel merges the parts. Query heads that share a
key-value head are computed together, so each key and value is read once.

**The bits of a row depend on that row alone.** Parts begin at fixed positions and have a fixed size; only
their number varies. Within a part, keys are processed in tiles of fixed size, and parts are merged in groups
of a fixed size. So other rows, the width of the table and the number of programs do not change the order of
any sum.

Importing this module requires Triton. If TRITON_INTERPRET=1 is set before, the kernels run slowly on a CPU,
which the tests use.

S sequences, H query heads, KV key-value heads, D head size, P parts.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.models.memory import BLOCK

PART = 256
"""Keys in a part."""

_TILE_BYTES = 1 << 14  # bytes of keys read at a time; shared memory holds two tiles and the next two
_PARTS_PER_MERGE = 16
_LOG2_E = 1.4426950408889634
# Arguments that change from step to step: compile once for all values.
_VARYING = ["table_stride", "position_stride", "parts"]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""The interpreter cannot multiply bfloat16, so factors become float32, in which products are exact."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's keys and values, in blocks of 16 tokens.

    Attributes:
        keys: [blocks, KV, D, 16], float32, bfloat16, float16 or int8. All tensors are contiguous.
        values: [blocks, KV, 16, D].
        key_scales, value_scales: float32[blocks, KV, 16], the factors of int8; otherwise None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def store(k: Tensor, v: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor) -> None:
    """Store the key and value of one token of each sequence.

    In int8 an element is rounded to a multiple of 1/127 of the largest element of its token and head.

    Args:
        k, v: float[S, KV, D], the last two axes contiguous.
        tables: int32[S, B], with the block of positions 16 j .. 16 j + 15 in column j; rows may be strided.
        positions: int32[S] below 16 B.
    """
    sequences, heads, size = k.shape
    is_int8 = cache.key_scales is not None
    tensors = k, v, cache.keys, cache.values, *_scales(cache, k), tables, positions
    strides = k.stride(0), v.stride(0), tables.stride(0), positions.stride(0)
    shape = {"HEADS": heads, "SIZE": size, "WIDTH": _width(size), "BLOCK": BLOCK}
    _store[(sequences, heads)](*tensors, *strides, **shape, IS_INT8=is_int8, num_warps=1)


def attend(
    q: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor, window: int | None = None
) -> Tensor:
    """Compute softmax(q K^T / sqrt(D)) V for one query of each sequence, over all keys up to its position.

    Products are in the dtype of `q`, or in bfloat16 if the cache is. Sums are float32.

    Args:
        q: float[S, H, D], the last two axes contiguous; H is a multiple of KV.
        tables, positions: as for `store`.
        window: number of tokens that a query sees, including its own; None for all preceding tokens.

    Returns:
        float[S, H, D] in the dtype of `q`.
    """
    sequences, heads, size = q.shape
    kv_heads = cache.keys.shape[1]
    parts = triton.cdiv(tables.shape[1] * BLOCK, PART)
    if window is not None:
        parts = min(parts, triton.cdiv(window - 1, PART) + 1)
    out = q.new_empty(q.shape)
    partial = q.new_empty(sequences, heads, parts, size, dtype=torch.float32) if parts > 1 else out
    totals = q.new_empty(sequences, heads, parts, dtype=torch.float32)
    common = {"HEADS": heads, "SIZE": size, "WIDTH": _width(size), "PART": PART, "WINDOW": window or 0}
    is_int8 = cache.key_scales is not None
    rounded = cache.keys.dtype == torch.bfloat16
    _attend_to_part[(sequences, kv_heads, parts)](
        *(q, cache.keys, cache.values, *_scales(cache, q), tables, positions, partial, totals),
        *(q.stride(0), tables.stride(0), positions.stride(0), parts, size**-0.5 * _LOG2_E),
        **common,
        KV_HEADS=kv_heads,
        ROWS=_width(heads // kv_heads),
        BLOCK=BLOCK,
        TILE=tile(size, 2 if rounded else q.element_size()),
        IS_INT8=is_int8,
        ROUNDED=rounded,
        WIDENED=IS_INTERPRETED,
        num_warps=4,
        num_stages=2 if is_int8 else 3,  # three stages of int8 would be copied synchronously, byte by byte
    )
    if parts > 1:
        arguments = partial, totals, positions, out, positions.stride(0), parts
        _merge[(sequences, heads)](*arguments, JOINED=_PARTS_PER_MERGE, num_warps=4, **common)
    return out


def _scales(cache: LayerCache, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of an int8 cache, or `unused`, which the kernels do not read."""
    if cache.key_scales is None or cache.value_scales is None:
        return unused, unused
    return cache.key_scales, cache.value_scales


def tile(size: int, item_bytes: int) -> int:
    """Return the number of keys with `size` elements that are read at a time."""
    return max(16, min(64, _TILE_BYTES // (_width(size) * item_bytes)))


def _width(size: int) -> int:
    """Return the next power of two, at least 16, the smallest size of a product."""
    return 1 << max(4, (size - 1).bit_length())


@triton.jit(do_not_specialize=_VARYING)
def _store(  # noqa: PLR0917
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    positions_ptr,
    k_stride,
    v_stride,
    table_stride,
    position_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Store one head of the token of one sequence."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + sequence * position_stride)
    block = tl.load(tables_ptr + sequence * table_stride + position // BLOCK).to(tl.int64)
    slot = block * HEADS + head
    offset = position % BLOCK
    element = tl.arange(0, WIDTH)
    inside = element < SIZE
    k = tl.load(k_ptr + sequence * k_stride + head * SIZE + element, mask=inside, other=0.0)
    v = tl.load(v_ptr + sequence * v_stride + head * SIZE + element, mask=inside, other=0.0)
    if IS_INT8:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_top = tl.maximum(tl.max(tl.abs(k), 0), 1e-30)
        v_top = tl.maximum(tl.max(tl.abs(v), 0), 1e-30)
        tl.store(key_scales_ptr + slot * BLOCK + offset, k_top / 127.0)
        tl.store(value_scales_ptr + slot * BLOCK + offset, v_top / 127.0)
        # Adding 1.5 * 2^23 rounds to the nearest integer, half to even.
        k = (k / k_top * 127.0 + 12582912.0) - 12582912.0
        v = (v / v_top * 127.0 + 12582912.0) - 12582912.0
    kind = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + (slot * SIZE + element) * BLOCK + offset, k.to(kind), mask=inside)
    tl.store(values_ptr + (slot * BLOCK + offset) * SIZE + element, v.to(kind), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _attend_to_part(  # noqa: PLR0917
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    positions_ptr,
    partial_ptr,
    totals_ptr,
    q_stride,
    table_stride,
    position_stride,
    parts,
    scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_INT8: tl.constexpr,
    ROUNDED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Compute attention of the query heads of one key-value head over one part of the keys of their sequence.

    Writes the output, and its weight in the merge: the base-2 logarithm of the sum of all exp2(score).
    """
    sequence, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + sequence * position_stride)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    start = (first // PART + part) * PART
    stop = tl.minimum(start + PART, position + 1)
    if start < stop:
        group: tl.constexpr = HEADS // KV_HEADS
        row, element, key = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
        inside, real = element < SIZE, row < group
        q_at = (kv_head * group + row[:, None]) * SIZE + element[None, :]
        mask = real[:, None] & inside[None, :]
        q = tl.load(q_ptr + sequence * q_stride + q_at, mask=mask, other=0.0)
        if ROUNDED:
            q = q.to(tl.bfloat16)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        for tile_start in range(tl.maximum(start, first // TILE * TILE), stop, TILE):
            column = tile_start + key
            visible = column < stop
            if WINDOW > 0:
                visible &= column >= first
            # Whole blocks are read, 16 bytes per thread at a time. Masked elements are finite.
            table_column = tl.minimum(column // BLOCK, position // BLOCK)
            block = tl.load(tables_ptr + sequence * table_stride + table_column)
            slot = block.to(tl.int64) * KV_HEADS + kv_head
            within = column % BLOCK
            k_at = (slot[None, :] * SIZE + element[:, None]) * BLOCK + within[None, :]
            v_at = (slot[:, None] * BLOCK + within[:, None]) * SIZE + element[None, :]
            k = tl.load(keys_ptr + k_at, mask=inside[:, None], other=0.0)
            v = tl.load(values_ptr + v_at, mask=inside[None, :], other=0.0)
            scores = product(q, k, WIDENED) * scale
            if IS_INT8:
                scores *= tl.load(key_scales_ptr + slot * BLOCK + within)[None, :]
            scores = tl.where(visible[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shrunk = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrunk + tl.sum(weights, 1)
            if IS_INT8:
                weights *= tl.load(value_scales_ptr + slot * BLOCK + within)[None, :]
            out = out * shrunk[:, None] + product(weights.to(q.dtype), v, WIDENED)
            top = higher
        out = out / total[:, None]
        head = sequence * HEADS + kv_head * group + row
        tl.store(totals_ptr + head * parts + part, top + tl.log2(total), mask=real)
        partial_at = (head[:, None] * parts + part) * SIZE + element[None, :]
        tl.store(partial_ptr + partial_at, out.to(partial_ptr.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b, WIDENED: tl.constexpr):
    """Compute a b in the dtype of a, with float32 sums."""
    if b.dtype == tl.int8:
        b = b.to(tl.float32)
    b = b.to(a.dtype)
    if WIDENED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=_VARYING)
def _merge(  # noqa: PLR0917
    partial_ptr,
    totals_ptr,
    positions_ptr,
    out_ptr,
    position_stride,
    parts,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Merge the partial outputs of one head of one sequence, weighted by their sums of exponentials."""
    sequence = tl.program_id(0).to(tl.int64)
    head = sequence * HEADS + tl.program_id(1)
    position = tl.load(positions_ptr + sequence * position_stride)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    count = position // PART - first // PART + 1
    element, lane = tl.arange(0, WIDTH), tl.arange(0, JOINED)
    inside = element < SIZE
    top = -float("inf")
    total = 0.0
    out = tl.zeros([WIDTH], tl.float32)
    for start in range(0, count, JOINED):
        part = start + lane
        valid = part < count
        sums = tl.load(totals_ptr + head * parts + part, mask=valid, other=-float("inf"))
        partial_at = (head * parts + part[:, None]) * SIZE + element[None, :]
        partial = tl.load(partial_ptr + partial_at, mask=valid[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(sums, 0))
        shrunk = tl.exp2(top - higher)
        weights = tl.exp2(sums - higher)
        total = total * shrunk + tl.sum(weights, 0)
        out = out * shrunk + tl.sum(weights[:, None] * partial, 0)
        top = higher
    out = out / total
    tl.store(out_ptr + head * SIZE + element, out.to(out_ptr.dtype.element_ty), mask=inside)
