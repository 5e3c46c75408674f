"""Load and save LoRA adapters in PEFT's format.

    adapter_config.json          rank r, alpha, the names of the linear maps
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [r, I], ....lora_B.weight [O, r]

An adapter is untrusted: its tensors must be in safetensors, and are compared with the model before they are
used. Perilune writes a third file, base.json, which identifies the base that the adapter was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor

from perilune.errors import RequestError
from perilune.files import open_regular, parse_json, write_atomic, write_json
from perilune.models.adapters.lora import (
    BaseKind,
    adapter_pairs,
    adapter_scale,
    attach_adapter_pairs,
    base_kind,
    base_state,
    convert_base,
    layer_linear_maps,
    merge_adapter,
    share_weights,
)
from perilune.models.checkpoints.checksum import checksum
from perilune.models.checkpoints.loading import save_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

_WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FOLDER = "adapter"  # subfolder of a checkpoint with the adapter merged, which has the adapter alone
_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<part>[AB])\.weight")
_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
_BASE = "base.json"  # storage of the frozen weights, and their checksum
_OTHER_MODEL = "use the adapter with the model on which it was trained"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank additions to linear maps.

    Attributes:
        pairs: A float[r, I] and B float[O, r] by name of the map, such as "model.layers.0.self_attn.q_proj".
        scale: factor s of the addition s B A x.
        base: storage kind of the base during training and its checksum, as "KIND CHECKSUM"; "" if unknown.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float
    base: str = ""

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> Adapter:
        pairs = {name: (a.detach(), b.detach()) for name, (a, b) in adapter_pairs(decoder).items()}
        return cls(pairs, adapter_scale(decoder), f"{base_kind(decoder)} {checksum(base_state(decoder))}")

    @classmethod
    def load(cls, path: Path | str) -> Adapter:
        """Read a folder with adapter_config.json and adapter_model.safetensors.

        Raises:
            RequestError: when a file is missing or malformed, or the adapter is not plain LoRA.
        """
        return cls.read(Path(path), _read_if_exists)

    @classmethod
    def read(cls, folder: Path, content: Callable[[Path], bytes | None]) -> Adapter:
        """Read a folder.

        The tensors are copies, so later writes to the files do not change them.

        Args:
            content: reads a file of the folder; returns None if it is missing.

        Raises:
            RequestError: as `load`.
        """
        weights, config_file = folder / _WEIGHTS, folder / CONFIG
        data, config = content(weights), content(config_file)
        if data is None or config is None:
            missing = weights if data is None else config_file
            raise RequestError(
                f"no {missing.name}", where=str(folder), remedy="save it with PEFT, as safetensors"
            )
        rank, scale = _rank_and_scale(parse_json(config, config_file), str(config_file))
        try:
            tensors = load_tensors(data)
        except Exception as error:  # of many kinds: a hostile header, an unknown dtype, a shape that misfits
            raise RequestError(f"not safetensors: {error}", where=str(weights)) from None
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in sorted(tensors.items()):  # `load_tensors` does not keep the file's order
            match = _KEY.fullmatch(key)
            if match is None:
                raise RequestError(f"tensor {key} is not part of a LoRA pair", where=str(weights))
            halves.setdefault(match["module"], {})[match["part"]] = _check_half(key, tensor, rank, weights)
        unpaired = [name for name, parts in halves.items() if len(parts) != 2]
        if unpaired:
            raise RequestError(f"{unpaired[0]} has only one of lora_A and lora_B", where=str(weights))
        pairs = {name: (parts["A"], parts["B"]) for name, parts in halves.items()}
        if not all(torch.isfinite(b * scale).all() for _, b in pairs.values()):
            raise RequestError("B times its scale (lora_alpha) is not finite", where=str(config_file))
        base = content(folder / _BASE)
        return cls(
            pairs, scale, "" if base is None else _parse_base(parse_json(base, folder / _BASE), folder)
        )

    def save(self, path: Path) -> None:
        """Write a folder that PEFT reads. The configuration is last, so a folder that has it is complete."""
        tensors = {
            f"base_model.model.{name}.lora_{part}.weight": tensor.detach().cpu().contiguous()
            for name, pair in self.pairs.items()
            for part, tensor in zip("AB", pair, strict=True)
        }
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / _WEIGHTS, save(tensors, metadata={"format": "pt"}))
        if self.base:
            kind, _, digest = self.base.partition(" ")
            write_json(path / _BASE, {"kept": kind, "checksum": digest})
        rank = len(next(iter(self.pairs.values()))[0])
        document = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": rank,
            "lora_alpha": self.scale * rank,
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.pairs}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
        }
        write_json(path / CONFIG, document)

    def check(self, decoder: Decoder) -> None:
        """Check that the adapter fits `decoder`.

        Raises:
            RequestError: when a map does not fit, naming the map, or when the adapter was trained on other
                weights than the decoder's.
        """
        maps = dict(layer_linear_maps(decoder))
        for name, (a, b) in self.pairs.items():
            if name not in maps:
                raise RequestError(
                    "the model has no linear map of this name", where=f"adapter, {name}", remedy=_OTHER_MODEL
                )
            shape = tuple(maps[name].weight.shape)
            ranks_agree = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
            if not ranks_agree or (b.shape[0], a.shape[1]) != shape:
                what = f"A {list(a.shape)} and B {list(b.shape)} do not fit {list(shape)}"
                raise RequestError(what, where=f"adapter, {name}", remedy=_OTHER_MODEL)
        if self.base and self.base != (actual := _describe_base(decoder, self.base)):
            raise RequestError(
                f"the adapter was trained on a base with checksum {self.base}, but this base has {actual}",
                where="adapter",
                remedy="load it with the checkpoint that its training started from",
            )

    def attach(self, decoder: Decoder) -> None:
        """Prepare `decoder` for continued training of this adapter: freeze its weights, and add A and B.

        Raises:
            RequestError: as `check`.
        """
        self.check(decoder)
        attach_adapter_pairs(decoder, self.pairs, self.scale)

    def merge(self, decoder: Decoder) -> Decoder:
        """Return a plain decoder with this adapter merged into the base, stored as during training.

        Raises:
            RequestError: as `check`.
        """
        self.check(decoder)
        adapted = share_weights(decoder)
        convert_base(adapted, _base_kind(self.base))
        attach_adapter_pairs(adapted, self.pairs, self.scale)
        return merge_adapter(adapted)


def save_policy(path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder of the policy with its adapter merged, and the adapter alone in `adapter/`.

    The folder loads like any other checkpoint. Programs that have the base need only the adapter. A policy
    with bfloat16 products is written with the weights that the engine samples with: matrices and embeddings
    are bfloat16.
    """
    precision = decoder.precision
    if adapter_pairs(decoder):
        Adapter.from_decoder(decoder).save(path / FOLDER)
        decoder = merge_adapter(decoder, torch.device("cpu"))  # saves the memory of a GPU
    save_checkpoint(path, decoder, tokenizer, decoder.bfloat16_weights() if precision == "bfloat16" else {})


def _describe_base(decoder: Decoder, base: str) -> str:
    """Return `Adapter.base` for a decoder, stored as in `base`."""
    kind = _base_kind(base)
    if kind != base_kind(decoder):
        decoder = share_weights(decoder)
        convert_base(decoder, kind)
    return f"{kind} {checksum(base_state(decoder))}"


def _read_if_exists(file: Path) -> bytes | None:
    if not file.is_file():
        return None
    with open_regular(file) as opened:
        return opened.read()


def _parse_base(document: Any, folder: Path) -> str:
    """Return `Adapter.base` from the content of base.json."""
    if not (isinstance(document, Mapping) and document.get("kept") in get_args(BaseKind)):
        kinds = ", ".join(get_args(BaseKind))
        raise RequestError(f"kept is not one of {kinds}", where=str(folder / _BASE))
    return f"{document['kept']} {document.get('checksum')}"


def _base_kind(base: str) -> BaseKind:
    return base.partition(" ")[0] or "float32"  # type: ignore[return-value]


def _check_half(key: str, tensor: Tensor, rank: int, file: Path) -> Tensor:
    """Return a float32 copy of A or B after checking its rank, dtype and values."""
    actual = tensor.shape[0 if ".lora_A." in key else -1] if tensor.dim() == 2 else None
    if actual != rank:
        raise RequestError(f"{key} is {list(tensor.shape)}, but r is {rank}", where=str(file))
    if tensor.dtype not in _DTYPES:
        raise RequestError(f"{key} is {tensor.dtype}, not floats", where=str(file))
    if not torch.isfinite(tensor.float()).all():
        raise RequestError(f"{key} has entries that are not finite", where=str(file))
    return tensor.float()


def _rank_and_scale(config: object, where: str) -> tuple[int, float]:
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
        what = f"r is {rank!r} and lora_alpha is {alpha!r}, not an integer above 0 and a number"
        raise RequestError(what, where=where)
    try:
        return rank, float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    except OverflowError:
        raise RequestError("lora_alpha is out of range", where=where) from None
