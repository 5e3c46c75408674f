"""Reads the experts of a layer, which transformers 5 stores in two tensors, as one matrix per expert and map.

`gate_up_proj` is [E, 2 * I, d]: the rows of the gate, then those of up. `down_proj` is [E, d, I].
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perilune.errors import RequestError
from perilune.models.checkpoints.tensors import StoredTensor
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts

_PACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class _Part(StoredTensor):
    """A tensor `name` that consists of the elements `index` of the tensor `source`."""

    source: StoredTensor
    index: tuple[int | slice, ...] = ()

    def read(self, opened: Any) -> Tensor:
        """Read the part from its open file, which is memory-mapped: the rest is not copied."""
        return self.source.read(opened)[self.index]


def unpack_experts(stored: dict[str, StoredTensor], config: DecoderConfig) -> dict[str, StoredTensor]:
    """Replace each packed tensor by the matrices of its experts.

    Raises:
        RequestError: when a packed tensor has another shape than config.json requires.
    """
    experts = None if config.family.fused_experts else config.experts
    if experts is None or not any(name.endswith(_PACKED) for name in stored):
        return stored
    network = f".{config.family.module_name('mlp')}."
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        renamed = name.replace(".mlp.", network)  # the packed format has one name for all families
        if name.endswith(_PACKED):
            tensors |= _split(tensor, renamed.rpartition(".")[0], experts, config)
        elif renamed != name:
            tensors[renamed] = _Part(renamed, tensor.dtype, tensor.shape, tensor.file, tensor)
        else:
            tensors[name] = tensor
    return tensors


def _split(
    tensor: StoredTensor, module: str, experts: Experts, config: DecoderConfig
) -> dict[str, StoredTensor]:
    """Return the matrices of a packed tensor, below the module named `module`."""
    rows, columns, maps = config.hidden_size, experts.intermediate_size, ["down_proj"]
    if tensor.name.endswith("gate_up_proj"):
        rows, columns, maps = columns, rows, ["gate_proj", "up_proj"]
    required = (experts.count, len(maps) * rows, columns)
    if tensor.shape != required:
        what = (
            f"tensor {tensor.name} has shape {list(tensor.shape)}, but config.json requires {list(required)}"
        )
        raise RequestError(what, where=str(tensor.file))
    parts: dict[str, StoredTensor] = {}
    for expert in range(experts.count):
        for number, kind in enumerate(maps):
            name = f"{module}.{expert}.{config.family.module_name(kind)}.weight"
            index = (expert, slice(number * rows, (number + 1) * rows))
            parts[name] = _Part(name, tensor.dtype, (rows, columns), tensor.file, tensor, index)
    return parts
