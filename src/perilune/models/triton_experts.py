"""The products of a mixture of experts on a GPU in Triton, in one launch for all experts.

Each program computes some outputs of one expert for all tokens of this expert. In decoding, each weight is
read once. The grid depends only on sizes, as a CUDA graph requires.

Importing this module requires Triton; see `triton_attention` for its interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.models.grouped_experts import ExpertGroups, StackedWeight
from perilune.models.triton_attention import IS_INTERPRETED, product

_COLUMNS = 64  # outputs that a program computes
_DEPTH_BYTES = 128  # bytes of each row that are read at a time
_ROWS = 16, 64  # tokens that are computed at a time, for experts with few tokens and with many


def grouped_product(x: Tensor, weight: StackedWeight, groups: ExpertGroups) -> Tensor:
    """Compute a `GroupedProduct` of contiguous rows, with float32 sums."""
    pairs, (experts, outputs, inputs) = len(groups.order), weight.values.shape
    out = x.new_empty(pairs, outputs)
    rows = x.to(torch.bfloat16) if weight.values.dtype == torch.bfloat16 else x
    scales, is_int8 = x if weight.scales is None else weight.scales, weight.scales is not None
    _grouped_product[(experts, triton.cdiv(outputs, _COLUMNS))](
        *(rows, weight.values, scales, groups.order, groups.ends, out),
        PER_ROW=pairs // len(x),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=_ROWS[pairs > _ROWS[0] * experts],
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH_BYTES // rows.element_size(),
        IS_INT8=is_int8,
        WIDENED=IS_INTERPRETED,
        num_warps=4,
        num_stages=2 if is_int8 else 3,  # as in `triton_attention.attend`
    )
    return out


@triton.jit
def _grouped_product(  # noqa: PLR0917
    x_ptr,
    values_ptr,
    scales_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    PER_ROW: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_INT8: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Compute some outputs of one expert for all of its pairs."""
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < OUTPUTS
    matrix = (expert * OUTPUTS + column) * INPUTS
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends_ptr + expert)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < stop
        pair = tl.load(order_ptr + row, mask=valid, other=0)
        x_row = pair // PER_ROW * INPUTS
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, INPUTS, DEPTH):
            element = depth + tl.arange(0, DEPTH)
            inside = element < INPUTS
            x_at = x_row[:, None] + element[None, :]
            weight_at = matrix[None, :] + element[:, None]
            x = tl.load(x_ptr + x_at, mask=valid[:, None] & inside[None, :], other=0.0)
            weight = tl.load(values_ptr + weight_at, mask=inside[:, None] & wanted[None, :], other=0.0)
            out += product(x, weight, WIDENED)
        if IS_INT8:
            out *= tl.load(scales_ptr + expert * OUTPUTS + column, mask=wanted, other=0.0)[None, :]
        out_at = pair[:, None] * OUTPUTS + column[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & wanted[None, :])
