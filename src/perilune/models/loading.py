"""Hugging Face folders: config.json, safetensors and the tokenizer, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.models.config import PRESETS, DecoderConfig
from perilune.models.decoder import Decoder

if TYPE_CHECKING:
    from perilune.models.tokenizer import Tokenizer


def new_model(preset: str | DecoderConfig, tokenizer: Tokenizer, seed: int) -> Decoder:
    """A fresh model whose vocabulary is the tokenizer's.

    Raises:
        RequestError: when there is no such preset.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise RequestError(f"no model preset {preset!r}", remedy=f"one of: {', '.join(PRESETS)}")
        preset = PRESETS[preset]
    config = preset.replace(vocab_size=tokenizer.vocab_size, eos_token_ids=(tokenizer.eos_token_id,))
    decoder = Decoder(config)
    decoder.initialize(seed)
    return decoder


def save_checkpoint(path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Write `decoder` and `tokenizer` as a Hugging Face folder."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", decoder.config.to_hf())
    tokenizer.save(path)


def load_checkpoint(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Decoder, Tokenizer]:
    """Read a Hugging Face folder."""
    from perilune.models.tokenizer import Tokenizer

    return load_decoder(path, device, dtype), Tokenizer.load(path)


def load_decoder(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Read the model of a Hugging Face folder, without its tokenizer."""
    config = DecoderConfig.from_hf(read_json(path / "config.json"), where=str(path / "config.json"))
    decoder = Decoder(config)
    decoder.load_state_dict(load_file(path / "model.safetensors"))
    return decoder.to(device=device, dtype=dtype)
