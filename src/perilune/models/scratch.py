"""Memory for what passes: a large tensor that is made, read once and forgotten, many times a step.

Tensors of many sizes that come and go leave holes in the heap, which glibc does not give back: with an
adapter they came to more than all that was in use. So each thread keeps one piece for each purpose, as large
as the largest tensor so far.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_held = threading.local()


def scratch_buffer(purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any content, whose memory this thread's next one for the same purpose has too."""
    rooms: dict[tuple[str, torch.device], Tensor] = _held.__dict__.setdefault("rooms", {})
    size = math.prod(shape) * dtype.itemsize
    held = rooms.get((purpose, device))
    if held is None or len(held) < size:
        with torch.inference_mode(False):
            held = rooms[purpose, device] = torch.empty(size, dtype=torch.uint8, device=device)
    return held[:size].view(dtype).view(*shape)
