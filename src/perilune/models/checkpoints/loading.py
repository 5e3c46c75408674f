"""Load and save Hugging Face folders: config.json, safetensors and the tokenizer.

A checkpoint is untrusted. Loading executes none of its content: weights must be in safetensors. Names and
shapes are compared with the configuration before memory is allocated. No file outside the folder is opened.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from perilune.errors import RequestError
from perilune.files import fsync_directory, write_json
from perilune.models.adapters.lora import BaseKind, base_kinds, convert_matrix, install_merged_projections
from perilune.models.checkpoints.folder import WEIGHTS, CheckpointFolder
from perilune.models.checkpoints.packed import unpack_experts
from perilune.models.checkpoints.quantized import unquantized_tensors
from perilune.models.checkpoints.tensors import StoredTensor, read_tensors
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.reader import Reader
from perilune.models.decoder import Decoder
from perilune.models.store import resolve_model_folder
from perilune.models.text.tokenizer import Tokenizer
from perilune.terminal import escape_control

DecoderT = TypeVar("DecoderT", bound=Decoder)

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_CONFIG = "use the config.json and the weights of the same model"


def new_model(preset: str | DecoderConfig, tokenizer: Tokenizer, seed: int) -> Decoder:
    """Create a model with random weights and the tokenizer's vocabulary.

    Raises:
        RequestError: when the preset does not exist.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise RequestError(f"no model preset {preset!r}", remedy=f"one of: {', '.join(PRESETS)}")
        preset = PRESETS[preset]
    decoder = _empty_decoder(
        preset.replace(
            vocab_size=tokenizer.vocab_size,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=(tokenizer.eos_token_id,),
        )
    )
    decoder.initialize(seed)
    return decoder


def load_model(
    source: str | Path, *, seed: int = 0, device: str | torch.device = "cpu"
) -> tuple[Decoder, Tokenizer]:
    """Load the model and the tokenizer of a Hugging Face folder or a GGUF file, or create a small new model.

    Args:
        source: path of the folder or file, or a preset such as "tiny" for a new model whose tokens are
            characters.
        seed: seed of a new model's weights.
        device: device of the weights, which are float32.

    Raises:
        RequestError: when a file, tensor or key is missing, malformed or not implemented, naming it.
    """
    if isinstance(source, str) and source in PRESETS:
        tokenizer = Tokenizer.characters()
        return new_model(source, tokenizer, seed).to(device), tokenizer
    return load_checkpoint(resolve_model_folder(Path(source)), device)


def save_checkpoint(
    path: Path, decoder: Decoder, tokenizer: Tokenizer, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Write a Hugging Face folder. config.json is written last, so a folder that has it is complete.

    Args:
        dtypes: dtypes of the tensors to round, by name. The others keep their dtype.
    """
    dtypes = dtypes or {}
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(dtypes.get(name, tensor.dtype)).cpu().contiguous()
        for name, tensor in decoder.state_dict().items()
    }
    temporary = path / f".{WEIGHTS}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path)
    tokenizer.save(path)
    raw = decoder.config.to_hf()
    ends = {key: raw[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(path / "generation_config.json", {**ends, "pad_token_id": tokenizer.pad_token_id})
    dtype = str(next(iter(dtypes.values()), decoder.dtype)).removeprefix("torch.")
    write_json(path / "config.json", {**raw, "pad_token_id": tokenizer.pad_token_id, "dtype": dtype})


def load_checkpoint(
    path: Path,
    device: str | torch.device = "cpu",
    base: BaseKind = "float32",
) -> tuple[Decoder, Tokenizer]:
    """Read the model and the tokenizer of a Hugging Face folder.

    Args:
        base: storage of the matrices of a frozen model. Each matrix is converted when it is read.

    Raises:
        RequestError: when a file, tensor or key is missing, malformed or not implemented, naming it.
    """
    tokenizer = load_tokenizer(path)  # before the weights, which may take minutes
    return load_decoder(Decoder, path, device, torch.float32, base), tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer in the folder of a model.

    Raises:
        RequestError: when the tokenizer or config.json is missing or malformed, and as `Tokenizer.limited`.
    """
    config, _ = _read_config(CheckpointFolder(path))
    return Tokenizer.load(path).limited(config.vocab_size)


def load_decoder(
    kind: type[DecoderT],
    path: Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    base: BaseKind = "float32",
) -> DecoderT:
    """Read the model of a Hugging Face folder as `kind`, a decoder class that defines the tensors.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    config, stored = check_headers(kind, path)
    with torch.device("meta"):
        decoder = kind(config)
    kinds = base_kinds(decoder, base)
    for name, tensor in read_tensors([stored[name] for name in decoder.state_dict()]):
        # One at a time, so that a narrow base never has all of its weights in float32 on the device.
        owner, _, attribute = name.rpartition(".")
        part = decoder.get_submodule(owner)
        setattr(part, attribute, convert_tensor(getattr(part, attribute), tensor, device, dtype))
        if name in kinds:
            convert_matrix(decoder, name, kinds[name])
    install_merged_projections(decoder)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        check_tied(stored["lm_head.weight"], decoder.model.embed_tokens.weight)
    return decoder


def convert_tensor(old: Tensor, tensor: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Convert a tensor from a file to replace `old`: a parameter to `dtype`, a buffer to `old.dtype`."""
    if not isinstance(old, nn.Parameter):
        return torch.empty(tensor.shape, device=device, dtype=old.dtype).copy_(tensor)
    weight = torch.empty(tensor.shape, device=device, dtype=dtype).copy_(tensor)
    return nn.Parameter(weight, old.requires_grad)


def check_headers(kind: type[Decoder], path: Path) -> tuple[DecoderConfig, dict[str, StoredTensor]]:
    """Return the configuration of a folder and its tensors by name, checked against the decoder class `kind`.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    folder = CheckpointFolder(Path(path))
    config, read = _read_config(folder)
    stored = unpack_experts(_drop_mtp(unquantized_tensors(folder), config, read), config)
    _check_counts(config, stored, path)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in kind(config).state_dict().items()}
    _check_shapes(stored, shapes, path)
    return config, stored


def _empty_decoder(config: DecoderConfig) -> Decoder:
    """Return a float32 decoder with uninitialized parameters."""
    with torch.device("meta"):
        decoder = Decoder(config)
    # Not `to_empty`: on meta tensors it imports much of torch's compiler.
    tensors = {name: torch.empty(tensor.shape) for name, tensor in decoder.state_dict().items()}
    decoder.load_state_dict(tensors, assign=True)
    return decoder


def _read_config(folder: CheckpointFolder) -> tuple[DecoderConfig, Reader]:
    """Return the configuration with the end tokens of generation_config.json, and a config.json reader."""
    file = folder.file("config.json")
    if not file.exists() and folder.file("adapter_config.json").exists():
        remedy = "merge it into its base model and save the result: PeftModel.merge_and_unload()"
        parent = folder.path.parent
        if (parent / "config.json").is_file():
            remedy = f"{parent}, if that is the model with the adapter merged; otherwise {remedy}"
        raise RequestError("is a LoRA adapter, not a model", where=str(folder.path), remedy=remedy)
    read = folder.config
    config = DecoderConfig.from_hf(read.raw, where=read.where)
    return config.replace(eos_token_ids=folder.end_tokens()), read


def _drop_mtp(
    stored: dict[str, StoredTensor], config: DecoderConfig, read: Reader
) -> dict[str, StoredTensor]:
    """Remove the tensors of multi-token prediction, which the decoder lacks, and print their number."""
    prefixes = ["mtp."] if config.family.linear else []
    if "num_nextn_predict_layers" in config.family.options:
        count = min(read.count("num_nextn_predict_layers", 0, least=0), len(stored))
        prefixes = [f"model.layers.{config.num_layers + extra}." for extra in range(count)]
    remaining = {name: tensor for name, tensor in stored.items() if not name.startswith(tuple(prefixes))}
    if len(remaining) < len(stored):
        skipped = f"skipping {len(stored) - len(remaining)} tensors for multi-token prediction"
        print(
            f"{escape_control(read.where)}: {skipped}, which the decoder does not use",
            file=sys.stderr,
            flush=True,
        )
    return remaining


def _check_counts(config: DecoderConfig, stored: Mapping[str, StoredTensor], path: Path) -> None:
    """Check that all layers and experts are stored, before a model of that size is created."""
    if config.num_layers > len(stored):
        raise _missing_tensor(f"model.layers.{config.num_layers - 1}.self_attn.o_proj.weight", stored, path)
    layer = next((layer for layer in range(config.num_layers) if config.is_sparse(layer)), None)
    if config.experts is None or layer is None:
        return
    network, up = (config.family.module_name(name) for name in ("mlp", "up_proj"))
    experts = f"model.layers.{layer}.{network}.experts"
    if config.family.fused_experts:
        name = f"{experts}.gate_up_proj"
        if name not in stored or stored[name].shape[:1] != (config.experts.count,):
            raise _missing_tensor(f"{name} of {config.experts.count} experts", stored, path)
    elif config.experts.count > len(stored):
        raise _missing_tensor(f"{experts}.{config.experts.count - 1}.{up}.weight", stored, path)


def _check_shapes(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    for name, shape in shapes.items():
        if name not in stored:
            raise _missing_tensor(name, stored, path)
        tensor = stored[name]
        if tensor.shape != shape:
            what = f"tensor {name} has shape {list(tensor.shape)}, but config.json requires {list(shape)}"
            raise RequestError(what, where=str(tensor.file), remedy=_OTHER_CONFIG)
    for name, tensor in stored.items():
        determined = name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")  # by other tensors
        if name not in shapes and not determined:
            what = f"tensor {name} is not part of this architecture"
            raise RequestError(what, where=str(tensor.file), remedy=_OTHER_CONFIG)
        if tensor.dtype not in _DTYPES:
            what = f"tensor {name} is {tensor.dtype}, not one of {', '.join(_DTYPES)}"
            raise RequestError(what, where=str(tensor.file), remedy="use the unquantized checkpoint")


def _missing_tensor(name: str, stored: Iterable[str], path: Path) -> RequestError:
    inner = name.removeprefix("model.")
    similar = next((stored_name for stored_name in stored if stored_name.endswith(inner)), None)
    remedy = "" if similar is None else f"the files call it {similar}: rename their tensors"
    if name == "lm_head.weight":
        remedy = "set tie_word_embeddings to true in config.json if the head is the embedding matrix"
    return RequestError(f"tensor {name} is missing", where=str(path), remedy=remedy)


def check_tied(head: StoredTensor, embedding: Tensor) -> None:
    """Check that a stored head equals the embedding, to which config.json ties it."""
    ((_, values),) = read_tensors([head])
    if not torch.equal(values.to(embedding), embedding):
        raise RequestError(
            f"tensor {head.name} differs from the embeddings that config.json says it shares",
            where=str(head.file),
            remedy="set tie_word_embeddings to false in config.json",
        )
