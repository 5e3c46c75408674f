"""Loads and saves folders in the layout of Qwen3-TTS.

    config.json, model.safetensors        talker and code predictor
    tokenizer.json or vocab.json, merges.txt
    generation_config.json                how codes are sampled
    speech_tokenizer/config.json, model.safetensors

Folders are untrusted, as in `models/checkpoints/loading.py`. The codec's encoder and the speaker encoder of
base models are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers
from torch import Tensor, nn

from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.models.checkpoints.folder import WEIGHTS, CheckpointFolder
from perilune.models.checkpoints.tensors import StoredTensor, read_tensor_headers, read_tensors
from perilune.models.config.reader import Reader
from perilune.models.gguf.vocabulary import SPLITTINGS, pre_tokenizer
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech.codec import CodecDecoder
from perilune.speech.config import MODEL_TYPE, CodecConfig, SpeechConfig
from perilune.speech.sampling import SpeechSampling
from perilune.speech.talker import Talker

ModuleT = TypeVar("ModuleT", bound=nn.Module)

CODEC_FOLDER = "speech_tokenizer"
_FLOATS = ("F64", "F32", "F16", "BF16")
_IGNORED = ("encoder.", "speaker_encoder.")  # prefixes of tensors that are not loaded
# Prefixes of tensor names in `Talker`, and their prefixes in a folder; None: not in a folder.
_NAMES: Mapping[str, str | None] = {
    "predictor.decoder.model.embed_tokens.": None,
    "predictor.decoder.model.": "talker.code_predictor.model.",
    "predictor.embeddings.": "talker.code_predictor.model.codec_embedding.",
    "predictor.heads.": "talker.code_predictor.lm_head.",
    "predictor.projection.": "talker.code_predictor.small_to_mtp_projection.",
    "decoder.model.embed_tokens.": "talker.model.codec_embedding.",
    "decoder.model.": "talker.model.",
    "decoder.lm_head.": "talker.codec_head.",
    "text_embedding.": "talker.model.text_embedding.",
    "text_projection.": "talker.text_projection.",
}


@dataclass(slots=True, eq=False)
class SpeechModel:
    """A speech model in float32.

    Attributes:
        sampling: how codes are sampled unless a request says otherwise.
    """

    talker: Talker
    codec: CodecDecoder
    tokenizer: Tokenizer
    sampling: SpeechSampling

    @property
    def config(self) -> SpeechConfig:
        """The shape of all parts."""
        return self.talker.config

    def to(self, device: str | torch.device) -> SpeechModel:
        self.talker, self.codec = self.talker.to(device), self.codec.to(device)
        return self


def is_speech_folder(path: Path) -> bool:
    """Return whether `path` is a folder whose config.json describes a speech model."""
    try:
        raw = read_json(CheckpointFolder(path).file("config.json"))
    except RequestError:
        return False
    return isinstance(raw, Mapping) and raw.get("model_type") == MODEL_TYPE


def new_speech_model(config: SpeechConfig, tokenizer: Tokenizer, seed: int) -> SpeechModel:
    """Return a new model with random weights.

    Raises:
        RequestError: when the tokenizer has more tokens than the model.
    """
    _check_vocabulary(tokenizer, config, "tokenizer")
    talker = Talker(config)
    talker.initialize(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codec = CodecDecoder(config.codec)
        for parameter in (level.embedding_sum for level in codec.quantizer.codebooks):
            nn.init.normal_(parameter)
    return SpeechModel(talker, codec, tokenizer, SpeechSampling())


def load_speech_model(path: Path) -> SpeechModel:
    """Read the folder `path`.

    Raises:
        RequestError: naming the file, and the tensor or key, that is missing, malformed or not implemented.
    """
    folder = CheckpointFolder(path)
    inner = CheckpointFolder(path / CODEC_FOLDER)
    codec_file, file = inner.file("config.json"), folder.file("config.json")
    codec_config = CodecConfig.from_hf(read_json(codec_file), where=str(codec_file))
    config = SpeechConfig.from_hf(read_json(file), codec_config, where=str(file))
    parts = max(config.talker.num_layers, config.predictor.num_layers, config.code_groups)
    talker = _load_module(lambda: Talker(config), folder, stored_name, parts)
    codec = _load_module(
        lambda: CodecDecoder(codec_config), inner, "decoder.{}".format, codec_config.num_layers
    )
    tokenizer = _load_tokenizer(folder)
    _check_vocabulary(tokenizer, config, str(path))
    return SpeechModel(talker, codec, tokenizer, _read_sampling(folder))


def save_speech_model(path: Path, model: SpeechModel, encoder: Mapping[str, Tensor] | None = None) -> None:
    """Write a folder that `load_speech_model` reads. config.json comes last.

    Args:
        encoder: tensors of a codec encoder, kept under "encoder." beside the decoder.
    """
    inner = path / CODEC_FOLDER
    inner.mkdir(parents=True, exist_ok=True)
    codec = {f"decoder.{name}": tensor for name, tensor in model.codec.state_dict().items()}
    codec |= {f"encoder.{name}": tensor for name, tensor in (encoder or {}).items()}
    _save_tensors(inner / WEIGHTS, codec)
    write_json(inner / "config.json", model.config.codec.to_hf())
    named = {stored_name(name): tensor for name, tensor in model.talker.state_dict().items()}
    _save_tensors(path / WEIGHTS, {name: tensor for name, tensor in named.items() if name is not None})
    model.tokenizer.save(path)
    write_json(path / "generation_config.json", model.sampling.to_hf())
    write_json(path / "config.json", model.config.to_hf())


def stored_name(name: str) -> str | None:
    """Return the name in a folder of a tensor of `Talker`; None if folders do not have it."""
    for beginning, stored in _NAMES.items():
        if name.startswith(beginning):
            return None if stored is None else stored + name.removeprefix(beginning)
    raise AssertionError(name)


def _load_module(
    build: Callable[[], ModuleT], folder: CheckpointFolder, name_of: Callable[[str], str | None], parts: int
) -> ModuleT:
    """Return the module with the tensors of `folder`.

    Args:
        name_of: returns the name in the folder of a tensor of the module; None if folders do not have it.
        parts: number of layers or tables, which have at least one tensor each.
    """
    stored = read_tensor_headers(folder)
    if parts > len(stored):  # before a huge module is created
        raise RequestError(f"config.json requires {parts} layers or codebooks", where=str(folder.path))
    with torch.device("meta"):
        module = build()
    names: dict[str, str] = {}
    for name, parameter in module.state_dict().items():
        key = name_of(name)
        if key is None:
            _replace_parameter(module, name, torch.zeros(parameter.shape))
            continue
        _check_tensor(stored.get(key), key, tuple(parameter.shape), folder.path)
        names[key] = name
    for key, item in stored.items():
        if key not in names and not key.startswith(_IGNORED):
            raise RequestError(f"tensor {key} is not part of this architecture", where=str(item.file))
    for key, tensor in read_tensors([stored[key] for key in names]):
        _replace_parameter(module, names[key], tensor.float())
    return module


def _check_tensor(stored: StoredTensor | None, name: str, shape: tuple[int, ...], path: Path) -> None:
    if stored is None:
        raise RequestError(f"tensor {name} is missing", where=str(path))
    if stored.shape != shape:
        message = f"tensor {name} has shape {list(stored.shape)}, but config.json requires {list(shape)}"
        raise RequestError(message, where=str(stored.file))
    if stored.dtype not in _FLOATS:
        message = f"tensor {name} is {stored.dtype}, not one of {', '.join(_FLOATS)}"
        raise RequestError(message, where=str(stored.file))


def _replace_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor))


def _save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, file, {"format": "pt"})


def _read_sampling(folder: CheckpointFolder) -> SpeechSampling:
    file = folder.file("generation_config.json")
    return SpeechSampling.from_hf(read_json(file), where=str(file)) if file.is_file() else SpeechSampling()


def _check_vocabulary(tokenizer: Tokenizer, config: SpeechConfig, where: str) -> None:
    if tokenizer.vocab_size > config.text_vocab_size:
        raise RequestError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model has {config.text_vocab_size}",
            where=where,
            remedy="the tokenizer belongs to another model",
        )


def _load_tokenizer(folder: CheckpointFolder) -> Tokenizer:
    """Return the tokenizer of the folder; Qwen publishes it as vocab.json and merges.txt."""
    vocabulary, merges = folder.file("vocab.json"), folder.file("merges.txt")
    if folder.file("tokenizer.json").exists() or not (vocabulary.is_file() and merges.is_file()):
        return Tokenizer.load(folder.path)
    file = folder.file("tokenizer_config.json")
    config = read_json(file) if file.is_file() else {}
    added = Reader(config, str(file)).raw.get("added_tokens_decoder") or {}
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare exceptions
        raise RequestError(f"is malformed: {error}", where=str(vocabulary)) from None
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(SPLITTINGS["qwen2"])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([_read_added_tokens(token, str(file)) for token in _sort_by_id(added, str(file))])
    return Tokenizer(backend, config, where=str(file))


def _sort_by_id(added: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(added, Mapping) or not all(str(key).isdecimal() for key in added):
        raise RequestError("added_tokens_decoder does not map ids to tokens", where=where)
    return [added[key] for key in sorted(added, key=int)]


def _read_added_tokens(raw: Mapping[str, Any], where: str) -> AddedToken:
    content = Reader(raw, where).raw.get("content")
    if not isinstance(content, str) or not content:
        raise RequestError("added_tokens_decoder has a token without content", where=where)
    return AddedToken(content, special=raw.get("special") is True, normalized=False)
