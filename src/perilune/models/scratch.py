"""Scratch buffers for large temporary tensors that are created many times per step.

Allocating and freeing tensors of many sizes fragments glibc's heap: when training an adapter, the gaps took
more memory than all live tensors. So each thread keeps one buffer per purpose, which grows to the largest
requested size.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_local = threading.local()


def scratch_buffer(purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor. This thread's next buffer for `purpose` uses the same memory."""
    buffers: dict[tuple[str, torch.device], Tensor] = _local.__dict__.setdefault("buffers", {})
    size = math.prod(shape) * dtype.itemsize
    buffer = buffers.get((purpose, device))
    if buffer is None or len(buffer) < size:
        with torch.inference_mode(False):
            buffer = buffers[purpose, device] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer[:size].view(dtype).view(*shape)
