"""Decoding over a paged cache on a GPU, in Triton: keep one token of each sequence, and let it attend.

A sequence is attended to in parts of `PART` keys, each by a program of its own (split-K, as Flash-Decoding
does: Dao et al., 2023), which keeps a running softmax (Milakov and Gimelshein, 2018); a second kernel joins
what the parts found. All query heads that share a key-value head are computed together, so that each key and
value is read once.

**A row's bits depend on that row alone.** Parts begin at fixed positions and have a fixed size, rather than
there being a fixed number of them; within a part keys come in fixed tiles, and parts are joined in groups of
a fixed size. So neither the other rows, nor the width of the table, nor how many programs are launched has a
say in the order of any sum.

Importing this module needs Triton. With TRITON_INTERPRET=1 in the environment before that, the kernels run on
a CPU, slowly: so they are tested.

S sequences, H query heads, KV key-value heads, D head size, P parts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.models.memory import BLOCK

PART = 256
"""Keys of a part."""

_TILE_BYTES = 1 << 14  # of keys that are read at a time: two tiles of each, and the next two, fit every GPU
_JOINED = 16  # parts that are joined at a time
_LOG2_E = 1.4426950408889634
_VARYING = ["table_stride", "position_stride", "parts"]  # from step to step: not to be compiled for each
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""The interpreter cannot multiply in bfloat16; widened, the same products are exact in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's keys and values, in blocks of 16 tokens.

    Attributes:
        keys: [blocks, KV, D, 16], float32, bfloat16, float16 or int8; contiguous, as all of them.
        values: [blocks, KV, 16, D].
        key_scales, value_scales: float32[blocks, KV, 16] that int8 is multiplied by; otherwise None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def keep(k: Tensor, v: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor) -> None:
    """Store the key and value of one token of each sequence.

    In int8 an element is the nearest multiple of a 127th of the largest of its token and head.

    Args:
        k, v: float[S, KV, D], the last two axes contiguous.
        tables: int32[S, B], the block of positions 16 j .. 16 j + 15 in column j. The stride between rows
            may be larger than B.
        positions: int32[S] below 16 B.
    """
    sequences, heads, size = k.shape
    scales = cache.key_scales, cache.value_scales
    _keep[(sequences, heads)](
        k, v, cache.keys, cache.values, *(part if part is not None else k for part in scales),
        tables, positions, k.stride(0), v.stride(0), tables.stride(0), positions.stride(0),
        HEADS=heads, SIZE=size, WIDTH=_width(size), BLOCK=BLOCK,
        IS_INT8=cache.key_scales is not None, num_warps=1,
    )  # fmt: skip


def attend(
    q: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor, window: int | None = None
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V of one query of each sequence, over all keys up to its own position.

    Products are in the dtype of `q`, sums in float32.

    Args:
        q: float[S, H, D], the last two axes contiguous; H is a multiple of KV.
        tables, positions: as for `keep`.
        window: a query sees its own and the window - 1 tokens before it, or all before it when None.

    Returns:
        float[S, H, D] in the dtype of `q`.
    """
    sequences, heads, size = q.shape
    kv_heads = cache.keys.shape[1]
    parts = triton.cdiv(tables.shape[1] * BLOCK, PART)
    if window is not None:
        parts = min(parts, triton.cdiv(window - 1, PART) + 1)
    out = q.new_empty(q.shape)
    found = q.new_empty(sequences, heads, parts, size, dtype=torch.float32) if parts > 1 else out
    totals = q.new_empty(sequences, heads, parts, dtype=torch.float32)
    common = {
        "HEADS": heads, "SIZE": size, "WIDTH": _width(size),
        "PART": PART, "WINDOW": window or 0,
    }  # fmt: skip
    is_int8 = cache.key_scales is not None
    stages = (
        2 if is_int8 else 3
    )  # three of int8 would be copied byte by byte, which no GPU does asynchronously
    scales = (part if part is not None else q for part in (cache.key_scales, cache.value_scales))
    _attend_to_part[(sequences, kv_heads, parts)](
        q, cache.keys, cache.values, *scales, tables, positions, found, totals,
        q.stride(0), tables.stride(0), positions.stride(0), parts, size**-0.5 * _LOG2_E,
        KV_HEADS=kv_heads, ROWS=_width(heads // kv_heads), BLOCK=BLOCK,
        TILE=tile(size, q.element_size()), IS_INT8=is_int8, WIDENED=_IS_INTERPRETED,
        num_warps=4, num_stages=stages, **common,
    )  # fmt: skip
    if parts > 1:
        _join[(sequences, heads)](
            found, totals, positions, out, positions.stride(0), parts, JOINED=_JOINED, num_warps=4, **common
        )
    return out


def tile(size: int, item_bytes: int) -> int:
    """How many keys of that many elements are read at a time."""
    return max(16, min(64, _TILE_BYTES // (_width(size) * item_bytes)))


def _width(size: int) -> int:
    """The next power of two, and what the smallest product takes."""
    return 1 << max(4, (size - 1).bit_length())


@triton.jit(do_not_specialize=_VARYING)
def _keep(  # noqa: PLR0917
    k_ptr, v_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, positions_ptr,
    k_stride, v_stride, table_stride, position_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    """Store one head of one sequence's token."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + sequence * position_stride)
    block = tl.load(tables_ptr + sequence * table_stride + position // BLOCK).to(tl.int64)
    place = block * HEADS + head
    at = position % BLOCK
    element = tl.arange(0, WIDTH)
    inside = element < SIZE
    k = tl.load(k_ptr + sequence * k_stride + head * SIZE + element, mask=inside, other=0.0)
    v = tl.load(v_ptr + sequence * v_stride + head * SIZE + element, mask=inside, other=0.0)
    if IS_INT8:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_top = tl.maximum(tl.max(tl.abs(k), 0), 1e-30)
        v_top = tl.maximum(tl.max(tl.abs(v), 0), 1e-30)
        tl.store(key_scales_ptr + place * BLOCK + at, k_top / 127.0)
        tl.store(value_scales_ptr + place * BLOCK + at, v_top / 127.0)
        # Adding 1.5 * 2^23 leaves no bits for a fraction: the nearest integer, half to even.
        k = (k / k_top * 127.0 + 12582912.0) - 12582912.0
        v = (v / v_top * 127.0 + 12582912.0) - 12582912.0
    kind = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + (place * SIZE + element) * BLOCK + at, k.to(kind), mask=inside)
    tl.store(values_ptr + (place * BLOCK + at) * SIZE + element, v.to(kind), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _attend_to_part(  # noqa: PLR0917
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, positions_ptr,
    found_ptr, totals_ptr, q_stride, table_stride, position_stride, parts, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    IS_INT8: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    """Queries of the heads that share a key-value head, over the keys of one part of their sequence.

    Writes their output, and the base-2 logarithm of the sum of all exp2(score), which says what it weighs.
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
        held = real[:, None] & inside[None, :]
        q = tl.load(q_ptr + sequence * q_stride + q_at, mask=held, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        for at in range(tl.maximum(start, first // TILE * TILE), stop, TILE):
            column = at + key
            seen = column < stop
            if WINDOW > 0:
                seen &= column >= first
            # Whole blocks are read, which lets a thread read 16 bytes at once; what is not seen is finite.
            of_table = tl.minimum(column // BLOCK, position // BLOCK)
            block = tl.load(tables_ptr + sequence * table_stride + of_table)
            place = block.to(tl.int64) * KV_HEADS + kv_head
            within = column % BLOCK
            k_at = (place[None, :] * SIZE + element[:, None]) * BLOCK + within[None, :]
            v_at = (place[:, None] * BLOCK + within[:, None]) * SIZE + element[None, :]
            k = tl.load(keys_ptr + k_at, mask=inside[:, None], other=0.0)
            v = tl.load(values_ptr + v_at, mask=inside[None, :], other=0.0)
            scores = _product(q, k, WIDENED) * scale
            if IS_INT8:
                scores *= tl.load(key_scales_ptr + place * BLOCK + within)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shrunk = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrunk + tl.sum(weights, 1)
            if IS_INT8:
                weights *= tl.load(value_scales_ptr + place * BLOCK + within)[None, :]
            out = out * shrunk[:, None] + _product(weights.to(q.dtype), v, WIDENED)
            top = higher
        out = out / total[:, None]
        head = sequence * HEADS + kv_head * group + row
        tl.store(totals_ptr + head * parts + part, top + tl.log2(total), mask=real)
        found_at = (head[:, None] * parts + part) * SIZE + element[None, :]
        tl.store(found_ptr + found_at, out.to(found_ptr.dtype.element_ty), mask=held)


@triton.jit
def _product(a, b, WIDENED: tl.constexpr):
    """a b in the dtype of a, summed in float32."""
    if b.dtype == tl.int8:
        b = b.to(tl.float32)
    b = b.to(a.dtype)
    if WIDENED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=_VARYING)
def _join(  # noqa: PLR0917
    found_ptr, totals_ptr, positions_ptr, out_ptr, position_stride, parts,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """One head's output of one sequence: the parts' outputs, each weighed by its sum of exponentials."""
    sequence = tl.program_id(0).to(tl.int64)
    head = sequence * HEADS + tl.program_id(1)
    position = tl.load(positions_ptr + sequence * position_stride)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    own = position // PART - first // PART + 1
    element, some = tl.arange(0, WIDTH), tl.arange(0, JOINED)
    inside = element < SIZE
    top = -float("inf")
    total = 0.0
    out = tl.zeros([WIDTH], tl.float32)
    for at in range(0, own, JOINED):
        part = at + some
        there = part < own
        sums = tl.load(totals_ptr + head * parts + part, mask=there, other=-float("inf"))
        found = tl.load(
            found_ptr + (head * parts + part[:, None]) * SIZE + element[None, :],
            mask=there[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(sums, 0))
        shrunk = tl.exp2(top - higher)
        weights = tl.exp2(sums - higher)
        total = total * shrunk + tl.sum(weights, 0)
        out = out * shrunk + tl.sum(weights[:, None] * found, 0)
        top = higher
    out = out / total
    tl.store(out_ptr + head * SIZE + element, out.to(out_ptr.dtype.element_ty), mask=inside)
