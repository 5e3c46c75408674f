"""LoRA adapters, one a request: many characters on one base.

An adapter adds scale * B A x to what a projection makes of x (Hu et al., 2021). The rows of a step are
grouped by adapter, so that each is applied to its own rows only, and the base once to all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models.decoder import Decoder
from perilune.models.kernels import linear
from perilune.models.layers import Projection

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank additions to linear maps.

    Attributes:
        pairs: A float[r, I] and B float[O, r] by the map's name, "model.layers.0.self_attn.q_proj".
        scale: of what they add.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def load(cls, path: Path | str) -> Adapter:
        """Read the folder that PEFT writes: adapter_config.json and adapter_model.safetensors.

        Raises:
            RequestError: when a file is missing or malformed, or the adapter is more than plain LoRA.
        """
        folder = Path(path)
        weights, config_file = folder / _WEIGHTS, folder / _CONFIG
        for file in (weights, config_file):
            if not file.is_file():
                raise RequestError(
                    f"no {file.name}", where=str(folder), remedy="save it with PEFT, as safetensors"
                )
        scale = _scale(read_json(config_file), str(config_file))
        try:
            tensors = load_file(weights)
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise RequestError(f"not safetensors: {error}", where=str(weights)) from None
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise RequestError(f"{key} is no part of a LoRA pair", where=str(weights))
            halves.setdefault(match["module"], {})[match["part"]] = tensor
        lone = [name for name, parts in halves.items() if len(parts) != 2]
        if lone:
            raise RequestError(f"{lone[0]} has only half of its pair", where=str(weights))
        return cls({name: (parts["A"], parts["B"]) for name, parts in halves.items()}, scale)

    def check(self, decoder: Decoder) -> None:
        """Make sure that it fits.

        Raises:
            RequestError: naming the map that does not.
        """
        modules = dict(decoder.named_modules())
        known = {id(part) for projection in projections(decoder) for part in projection.parts}
        for name, (a, b) in self.pairs.items():
            module = modules.get(name)
            if module is None or id(module) not in known or not isinstance(module, nn.Linear):
                raise RequestError("the model has no such linear map", where=f"adapter, {name}")
            ranks_agree = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
            if not ranks_agree or (b.shape[0], a.shape[1]) != tuple(module.weight.shape):
                raise RequestError(
                    f"A {list(a.shape)} and B {list(b.shape)} do not fit {list(module.weight.shape)}",
                    where=f"adapter, {name}",
                )


class AdaptedProjections:
    """Adapters laid over the projections of one frozen decoder.

    `select` says which rows of the next forward pass have which adapter.
    """

    def __init__(self, decoder: Decoder, adapters: Sequence[Adapter]) -> None:
        self._rows: list[tuple[int, Tensor]] = []
        names = {id(module): name for name, module in decoder.named_modules()}
        dtype = decoder.dtype
        for module in decoder.modules():
            for attribute, projection in list(vars(module).items()):
                if isinstance(projection, Projection):
                    parts = [names[id(part)] for part in projection.parts]
                    additions = [_Additions(projection, parts, adapter, dtype) for adapter in adapters]
                    setattr(module, attribute, _Adapted(projection, additions, self._rows))

    def select(self, batch: StepBatch) -> None:
        """Take the adapters of a batch's sequences."""
        self._rows.clear()
        if batch.adapters is None:
            return
        of_token = np.repeat(batch.adapters, np.diff(batch.cu_seqlens))
        for number in np.unique(batch.adapters[batch.adapters >= 0]).tolist():
            self._rows.append((number, torch.from_numpy(np.flatnonzero(of_token == number))))


class _Additions:
    """What one adapter adds to one projection: A and B of each of its parts, or none."""

    def __init__(
        self, projection: Projection, names: Sequence[str], adapter: Adapter, dtype: torch.dtype
    ) -> None:
        self.parts: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for part, name in zip(projection.parts, names, strict=True):
            stop = start + part.weight.shape[0]
            if name in adapter.pairs:
                a, b = adapter.pairs[name]
                self.parts.append((slice(start, stop), a.to(dtype), (b * adapter.scale).to(dtype)))
            start = stop

    def __call__(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """Add to the rows of `out` what their `x` gives."""
        for columns, a, b in self.parts:
            added = linear(linear(x[rows], a), b)
            out[rows, columns] += added


class _Adapted(Projection):
    """A projection with what the adapters add."""

    def __init__(
        self, base: Projection, additions: Sequence[_Additions], rows: list[tuple[int, Tensor]]
    ) -> None:
        super().__init__(*base.parts, exact=base.exact)
        self._base, self._additions, self._rows_of = base, additions, rows

    def __call__(self, x: Tensor) -> Tensor:
        out = self._base(x)
        for number, rows in self._rows_of:
            self._additions[number](x, out, rows.to(x.device))
        return out


def projections(decoder: Decoder) -> list[Projection]:
    """All projections of a decoder."""
    values = [value for module in decoder.modules() for value in vars(module).values()]
    return [value for value in values if isinstance(value, Projection)]


def _scale(config: object, where: str) -> float:
    if not isinstance(config, Mapping):
        raise RequestError("not a JSON object", where=where)
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("bias", "none") != "none":
        raise RequestError(
            "only plain LoRA is implemented", where=where, remedy="train it without DoRA and biases"
        )
    for key in ("alpha_pattern", "rank_pattern", "modules_to_save"):
        if config.get(key):
            raise RequestError(f"{key} is not implemented", where=where)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise RequestError(f"r is {rank!r} and lora_alpha {alpha!r}", where=where)
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
