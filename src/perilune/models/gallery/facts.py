"""The models of the gallery: shipped configurations with their sources, and configurations of the user."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.models.card.from_config import model_card
from perilune.models.card.model_card import ITEM_BYTES, ModelCard
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.families import FAMILIES
from perilune.models.config.family import Family
from perilune.models.config.quantization import KEY as QUANTIZATION
from perilune.models.config.quantization import read_quantization
from perilune.models.config.reader import Reader, UnsupportedModelError
from perilune.models.gallery.concepts import find_concepts, is_windowed
from perilune.models.transformers_model import check_supported

LENGTHS = (1024, 32768, 131072)
"""Sequence lengths, in tokens, for which the gallery computes cache and FLOPs."""

_CACHE_ITEM = ITEM_BYTES["bfloat16"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model.

    Attributes:
        identity: the model's id on the Hugging Face hub, or the file of a user's model.
        source: where the configuration was read.
        config: the content of config.json; for shipped models, only shapes and options.
        published: "total" and perhaps "active" parameters as rounded by the publisher, and their "source".
    """

    name: str
    identity: str
    source: str
    config: Mapping[str, Any]
    published: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1)
def shipped() -> tuple[Entry, ...]:
    """Return the models whose configurations are part of the package."""
    text = (files("perilune.models.gallery") / "models.json").read_text(encoding="utf-8")
    return tuple(
        Entry(entry["name"], entry["id"], entry["source"], entry["config"], entry.get("published", {}))
        for entry in json.loads(text)["models"]
    )


def describe(entry: Entry) -> dict[str, Any]:
    """Return all facts of the gallery on one model, as JSON values.

    `layers` lists runs of equal layers in order. `cache_bytes` (bfloat16, one sequence) and `token_flops` (to
    generate the next token) are by length, null beyond the model's context. `weight_bytes` is by dtype.
    `runs` says how Perilune runs the checkpoint: "natively", "with transformers" or "not", with the reason.

    Raises:
        RequestError: when the configuration is malformed.
    """
    card = model_card(entry.config, where=entry.identity)
    family = FAMILIES.get(card.model_type, Family())
    lengths = {length: length <= card.max_positions for length in LENGTHS}
    return {
        "name": entry.name,
        "id": entry.identity,
        "source": entry.source,
        "model_type": card.model_type,
        "published": dict(entry.published),
        "parameters": card.parameters,
        "active_parameters": card.active_parameters,
        "hidden_size": card.hidden_size,
        "vocab_size": card.vocab_size,
        "tied": card.tied,
        "max_positions": card.max_positions,
        "norms": norms(family),
        "layers": group_equal_layers(card),
        "concepts": find_concepts(entry.config, card),
        "cache_bytes": {
            str(n): card.cache_bytes(n, _CACHE_ITEM) if fits else None for n, fits in lengths.items()
        },
        "token_flops": {str(n): card.decode_flops(n) if fits else None for n, fits in lengths.items()},
        "weight_bytes": {
            kind: size * card.parameters for kind, size in ITEM_BYTES.items() if kind != "float16"
        },
        "runs": support(entry.config),
        "notes": list(card.notes),
    }


def norms(family: Family) -> str:
    """Describe in words where a layer normalizes."""
    if family.parallel:
        return "before both, side by side"
    positions = [word for word, used in (("before", family.pre_norm), ("after", family.post_norm)) if used]
    return " and ".join(positions)


def group_equal_layers(card: ModelCard) -> list[dict[str, Any]]:
    """Merge equal neighbors into one item: number, mixer and its kind, feed-forward, number of experts."""
    runs = []
    for _, group in groupby(card.layers, key=lambda layer: layer.name):
        layers = list(group)
        mixer, network = layers[0].mixer, layers[0].feed_forward
        kind = "linear" if mixer.state_size else "window" if is_windowed(mixer, card) else "full"
        runs.append(
            {
                "count": len(layers),
                "mixer": mixer.name,
                "kind": kind,
                "feed_forward": network.name,
                "experts": network.experts if network.experts > 1 else 0,
            }
        )
    return runs


def support(config: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return how Perilune runs a model with this config.json, determined by the code that loads checkpoints.

    `quantized` is true if Perilune refuses the quantization of the published weights. `runs` then describes
    the unquantized model.
    """
    plain = {key: value for key, value in config.items() if key != QUANTIZATION}
    try:
        DecoderConfig.from_hf(plain)
    except UnsupportedModelError as error:
        reason = error.what
    except RequestError as error:
        return {"runs": "not", "reason": error.what, "quantized": False}
    else:
        return {"runs": "natively", "reason": "", "quantized": not _reads(config)}
    quantized = config.get(QUANTIZATION) is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            check_supported(CheckpointFolder(Path(folder)))
        except RequestError as error:
            return {"runs": "not", "reason": f"{reason}; {error.what}", "quantized": quantized}
    return {"runs": "with transformers", "reason": reason, "quantized": quantized}


def _reads(config: Mapping[str, Any]) -> bool:
    try:
        read_quantization(Reader(config, "config.json"))
    except RequestError:
        return False
    return True
