"""Weights that are stored in fewer bits than the activations have, for inference.

* bfloat16: weights and activations are rounded to eight significant bits.
* int8: weights only, symmetric. A weight w of an output channel is stored as the integer nearest to w / s,
  where s = max |w| / 127 is the scale of the channel. Activations are not rounded.

Sums are in the dtype of the activations. The C kernels use the same two formats.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

NarrowKind = Literal["bfloat16", "int8"]

Precision = Literal["float32", "bfloat16"]
"""Precision of products in training. bfloat16 rounds both factors; sums are float32 either way."""

_HAS_FLOAT32_OUTPUT = hasattr(torch.ops.aten.mm, "dtype")
"""True if a product of bfloat16 matrices on a GPU can return float32, which needs PyTorch 2.8."""


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeight:
    """A matrix [O, I].

    Attributes:
        values: bfloat16 or int8 [O, I].
        scales: float32[O] for int8, otherwise None.
    """

    values: Tensor
    scales: Tensor | None = None

    def matmul(self, x: Tensor) -> Tensor:
        """Return the product float[N, O] with float[N, I]."""
        if self.scales is None:
            narrow = x.to(self.values.dtype)
            if x.device.type == "cuda":
                return bfloat16_matmul(narrow, self.values, x.dtype)
            return F.linear(narrow.to(x.dtype), self.values.to(x.dtype))
        return F.linear(x, self.values.to(x.dtype)) * self.scales.to(x.dtype)


def bfloat16_matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute x @ weight.T of bfloat16 matrices on a GPU, in `dtype`.

    Before PyTorch 2.8, the result is rounded to bfloat16 first.
    """
    if dtype == torch.float32 and _HAS_FLOAT32_OUTPUT:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x, weight).to(dtype)


def round_weight(weight: Tensor, kind: NarrowKind) -> NarrowWeight:
    """Round a float[O, I] matrix to `kind`."""
    weight = weight.detach()
    if kind == "bfloat16":
        return NarrowWeight(weight.to(torch.bfloat16, copy=True))
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    steps = weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return NarrowWeight(steps.round().to(torch.int8), scales)
