"""Inference with transformers for architectures that the decoder does not implement.

This is slower than the decoder, and such models cannot be trained. Loading executes no code of the
checkpoint, reads no pickles and does not use the network.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.checkpoints.tensors import StoredTensor, read_tensor_headers
from perilune.models.config.families import DECODER_FAMILIES
from perilune.models.config.layer_kinds import MAX_LAYERS
from perilune.models.config.quantization import read_quantization
from perilune.models.config.reader import Reader, UnsupportedModelError
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

_DEFAULT_POSITIONS = 2048  # for a model whose configuration has no limit
_MAX_CAUSE_CHARACTERS = 300  # of an error message of transformers
_LOCAL_FILES: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_INCOMPLETE = "fetch the folder again, with the config.json of these weights"
_LENGTH_DEPENDENT = {"longrope", "dynamic"}  # rotary scalings that depend on the length of the text


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The attributes of a configuration that an engine needs. `DecoderConfig` has the same attributes."""

    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    distinct_windows: tuple[int | None, ...] = (None,)

    def cache_bytes(self, tokens: int, size: int) -> int:
        """Return the bytes of keys and values of `tokens` tokens; approximate if layers differ."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * tokens * size


class TransformersModel:
    """A causal language model loaded by transformers, for inference.

    Attributes:
        notice: a message that explains why the decoder is not used; empty if none is needed.
    """

    def __init__(self, module: Any, config: ModelShape) -> None:
        self.module, self.config, self.notice = module, config, ""
        self._accepts = inspect.signature(module.forward).parameters.keys()

    @property
    def device(self) -> torch.device:
        return self.module.device  # type: ignore[no-any-return]

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights by their names in transformers."""
        state: Mapping[str, Tensor] = self.module.state_dict()
        return state

    def in_memory(self) -> AbstractContextManager[None]:
        """Return an empty context, as `Decoder.in_memory`: the weights are always in memory."""
        return nullcontext()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load weights by their names in transformers."""
        self.module.load_state_dict(state)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, past: Any, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute logits [S, R, V] of the next token, from int64[S, M] tokens that follow those in `past`.

        Args:
            past: a `DynamicCache` of S sequences with T tokens each, which grows by M.
            rows: int64[R], ascending indices of the M tokens whose logits are needed.
            positions: int64[S, T + M], the position of each token in its sequence, negative for padding on
                the left; None without padding.
        """
        options: dict[str, Tensor] = {}
        if positions is not None:
            options["attention_mask"] = (positions >= 0).long()
            options["position_ids"] = positions[:, -token_ids.shape[1] :].clamp(min=0)
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = rows
        options = {name: value for name, value in options.items() if name in self._accepts}
        logits: Tensor = self.module(
            input_ids=token_ids, past_key_values=past, use_cache=True, **options
        ).logits
        return logits if "logits_to_keep" in options else logits[:, rows]


def load_for_inference(
    path: Path | str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Decoder | TransformersModel, Tokenizer]:
    """Read a model for sampling and scoring with an engine.

    Returns a `StoredDecoder` if the decoder implements the architecture, otherwise a `TransformersModel`
    whose `notice` gives the reason.

    Raises:
        RequestError: as `load_checkpoint` and `load_transformers_model`.
    """
    try:
        return open_checkpoint(Path(path), device, dtype)
    except UnsupportedModelError as error:
        model = load_transformers_model(path, device, dtype)
        model.notice = (
            f"{error.what}. transformers computes the model instead, several times slower."
            " Sampling and scoring work, training does not"
        )
    return model, Tokenizer.load(path)


def load_transformers_model(
    path: Path | str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> TransformersModel:
    """Read the model of a Hugging Face folder with transformers.

    Raises:
        RequestError: when transformers does not know the architecture, or weights are missing, pickled or do
            not have the shapes in config.json.
    """
    path = Path(path)
    folder = CheckpointFolder(path)
    with _quiet_transformers():
        config, raw = _read_config(folder)
        shape = _read_shape(config, raw, folder)
        module, report = _load_module(path, config, dtype, read_tensor_headers(folder))
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            what = f"tensor {sorted(report[kind])[0]} is {kind[:-5]}"
            raise RequestError(what, where=str(path), remedy=_INCOMPLETE)
    module.eval().requires_grad_(False).to(device)
    return TransformersModel(module, shape)


def _load_module(path: Path, config: Any, dtype: torch.dtype, stored: Mapping[str, StoredTensor]) -> Any:
    """Return the module, and transformers' report of missing and mismatched tensors."""
    from transformers import AutoModelForCausalLM

    try:
        _check_size(config, stored, path)
        return AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL_FILES,
        )
    except RequestError:
        raise
    except Exception as error:  # a hostile config.json can raise anything in transformers
        raise _load_error(error, path) from None


def check_supported(folder: CheckpointFolder) -> None:
    """Check whether the engine can run the model of this config.json with transformers. Weights are not read.

    Raises:
        RequestError: when transformers has no such language model, or the engine cannot use it.
    """
    with _quiet_transformers():
        _read_shape(*_read_config(folder), folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers, including its report of missing tensors."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _read_config(folder: CheckpointFolder) -> tuple[Any, Mapping[str, Any]]:
    """Return a language model's configuration in transformers, and the content of its config.json."""
    raw = read_json(folder.file("config.json"))
    _check_loadable(raw, folder)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder.path), **_LOCAL_FILES)
        supported = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    except Exception as error:  # a hostile config.json can raise anything in transformers
        raise _load_error(error, folder.path) from None
    if not supported:
        raise _load_error(f"{raw['model_type']} is not a causal language model", folder.path)
    return config, raw


def _load_error(cause: object, path: Path) -> RequestError:
    text = " ".join(str(cause).split())
    return RequestError(
        f"transformers cannot load this model: {text[:_MAX_CAUSE_CHARACTERS]}",
        where=str(path),
        remedy="use a checkpoint whose architecture is part of transformers",
    )


def _check_loadable(raw: Any, folder: CheckpointFolder) -> None:
    where = str(folder.path / "config.json")
    if not isinstance(raw, Mapping) or not isinstance(raw.get("model_type"), str):
        raise RequestError("has no model_type", where=where)
    quantization = read_quantization(Reader(raw, where))
    if quantization is not None:
        raise RequestError(
            f"the weights are in {quantization.method}, which Perilune reads only for its own decoder",
            where=f"{where}:quantization_config",
            remedy="use the unquantized checkpoint",
        )
    if (folder.path / "adapter_config.json").exists():
        raise RequestError(
            "is an adapter, not a model", where=str(folder.path), remedy="merge it into its base model first"
        )


def _check_size(config: Any, stored: Mapping[str, StoredTensor], path: Path) -> None:
    """Refuse a configuration with more parameters than the files hold, before they are allocated."""
    from transformers import AutoModelForCausalLM

    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not isinstance(layers, int) or layers > len(stored):
        raise RequestError(
            f"num_hidden_layers is {layers!r}, but the files hold {len(stored)} tensors",
            where=str(path),
            remedy=_INCOMPLETE,
        )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    required = sum(parameter.numel() for parameter in empty.parameters())
    available = sum(tensor.numel for tensor in stored.values())
    if required > available:
        raise RequestError(
            f"config.json describes {required} parameters, but the files hold {available}",
            where=str(path),
            remedy=_INCOMPLETE,
        )


def _read_shape(config: Any, raw: Mapping[str, Any], folder: CheckpointFolder) -> ModelShape:
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 1)
    if not isinstance(layers, int) or layers > MAX_LAYERS:  # transformers makes a configuration for each
        what = f"num_hidden_layers is {layers!r}, but must be an integer up to {MAX_LAYERS}"
        raise RequestError(what, where=str(folder.path / "config.json"), remedy=_INCOMPLETE)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        what = f"a {raw['model_type']} model has no attention heads, but the engine needs keys and values"
        raise RequestError(what, where=str(folder.path), remedy="use a model with attention in every layer")
    recurrent = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
    if recurrent:
        if raw["model_type"] != text.model_type and text.model_type in DECODER_FAMILIES:
            Reader(raw, str(folder.path / "config.json")).architecture()  # raises: it is multimodal
        kinds = ", ".join(map(repr, recurrent))
        raise RequestError(
            f"a {raw['model_type']} model has layers of kind {kinds}, whose state the engine cannot cache",
            where=str(folder.path / "config.json"),
            remedy="use a model with attention in every layer",
        )
    return ModelShape(
        vocab_size=text.vocab_size,
        max_position_embeddings=_max_positions(text),
        num_layers=text.num_hidden_layers,
        num_kv_heads=_largest_value(text, "num_key_value_heads") or heads,
        head_dim=_largest_value(text, "head_dim") or text.hidden_size // heads,
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_ids=folder.end_tokens(),
    )


def _largest_value(config: Any, name: str) -> int | None:
    """Return a value of the configuration; the largest value if layers differ, None if there is none."""
    layers = getattr(config, "per_layer_config", None) or [config]
    values = [value for layer in layers if isinstance(value := getattr(layer, name, None), int)]
    return max(values, default=None)


def _max_positions(config: Any) -> int:
    """Return the maximum number of tokens of a text.

    Some rotary scalings change the angles of all positions once a text exceeds the original length. Cached
    keys would then be wrong, and scoring a text would differ from sampling it. So the original length is the
    limit.
    """
    longest = getattr(config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]
    for rope in nested:
        if rope.get("rope_type") in _LENGTH_DEPENDENT:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, original or longest)
    return int(longest)
