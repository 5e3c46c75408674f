"""A decoder whose matrices stay in their files, for those who make a copy of them that is faster to read.

An engine keeps weights in the order its kernels read them. Taken from a `StoredDecoder`, one layer at a
time, they are all that is in memory; beside a decoder that learns they are a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perilune.models.checkpoints.loading import (
    Stored,
    check_tied,
    checked_headers,
    read_tensors,
    tokenizer_of,
)
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder

if TYPE_CHECKING:
    from perilune.models.text.tokenizer import Tokenizer

_Place = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of one of its parameters, and what stands for it while it is in its file."""


class StoredDecoder(Decoder):
    """A decoder that has its norms and biases, and reads its matrices while they have to be `present`.

    It samples and scores through an `Engine`. It cannot be called itself, nor learn, nor be saved.

    Args:
        stored: where each tensor is, by name.
        device, dtype: what tensors are read to.
    """

    def __init__(
        self, config: DecoderConfig, stored: Mapping[str, Stored], device: torch.device, dtype: torch.dtype
    ) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.to(dtype).requires_grad_(False)
        self._device, self._dtype = device, dtype
        self._stored = {parameter: stored[name] for name, parameter in self.named_parameters()}
        self._read([place for place in _absent(self) if place[2].dim() == 1])

    @contextmanager
    def in_memory(self, *parts: nn.Module) -> Iterator[None]:
        """Have the weights of these parts, or of all, in memory meanwhile."""
        places = [place for part in parts or (self,) for place in _absent(part)]
        self._read(places)
        try:
            yield
        finally:
            for module, name, stands_for_it in places:
                setattr(module, name, stands_for_it)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = True) -> Any:
        """Have these weights from now on, in memory, instead of those in the files."""
        state = {name: tensor.to(self._device, self._dtype) for name, tensor in state_dict.items()}
        return super().load_state_dict(state, strict=strict, assign=assign)

    def _read(self, places: list[_Place]) -> None:
        wanted = {self._stored[stands_for_it].name: (module, name) for module, name, stands_for_it in places}
        for stored, tensor in read_tensors([self._stored[place[2]] for place in places]):
            value = tensor.to(self._device, self._dtype)
            setattr(*wanted[stored], nn.Parameter(value, requires_grad=False))


def open_decoder(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> StoredDecoder:
    """The model of a Hugging Face folder, of which only norms and biases are read for now.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    config, stored = checked_headers(Decoder, path)
    decoder = StoredDecoder(config, stored, torch.device(device), dtype)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        with decoder.in_memory(decoder.model.embed_tokens):
            check_tied(stored["lm_head.weight"], decoder.model.embed_tokens.weight)
    return decoder


def open_checkpoint(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[StoredDecoder, Tokenizer]:
    """The same, with the tokenizer of the folder.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    decoder = open_decoder(Path(path), device, dtype)
    return decoder, tokenizer_of(decoder, Path(path))


def _absent(part: nn.Module) -> list[_Place]:
    return [
        (module, name, parameter)
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
