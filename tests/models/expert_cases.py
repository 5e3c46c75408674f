"""Gradients of single experts; transformers keeps those of a layer in one tensor."""

from torch import Tensor


def of_each_expert(name: str, packed: Tensor) -> dict[str, Tensor]:
    """Parts of a packed tensor of all experts, under the names of Perilune's matrices."""
    prefix, projection = name.rsplit(".", 1)
    parts = projection.replace("gate_up_proj", "gate_proj up_proj").split()
    return {
        f"{prefix}.{expert}.{part}.weight": value
        for expert, both in enumerate(packed)
        for part, value in zip(parts, both.chunk(len(parts)), strict=True)
    }
