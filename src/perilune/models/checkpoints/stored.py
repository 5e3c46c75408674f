"""A decoder whose matrices stay in their files until an engine copies them.

An engine keeps its own copy of the weights in the layout that its kernels read. From a `StoredDecoder` it
reads one layer at a time, so that only this copy is in memory.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perilune.models.checkpoints.loading import check_tied, checked_headers, read_as, tokenizer_of
from perilune.models.checkpoints.tensors import Stored, read_tensors
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

_LOADING = threading.RLock()  # otherwise one thread would take the weights away from another

_Place = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its tensors, and the meta tensor that represents it while it is on disk."""


class StoredDecoder(Decoder):
    """A decoder that holds its norms and biases, and reads its matrices only inside `in_memory`.

    It can be sampled from and scored with through an `Engine`. It cannot be called, trained or saved.

    Args:
        stored: the tensors in files, by name.
        device, dtype: device and dtype of the tensors that are read.
    """

    def __init__(
        self, config: DecoderConfig, stored: Mapping[str, Stored], device: torch.device, dtype: torch.dtype
    ) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.requires_grad_(False)
        self._device, self._dtype = device, dtype
        tensors = chain(self.named_parameters(), self.named_buffers())
        self._stored = {tensor: stored[name] for name, tensor in tensors}
        self._read([place for place in _on_disk(self) if place[2].dim() == 1])

    @contextmanager
    def in_memory(self, *parts: nn.Module) -> Iterator[None]:
        """Load the weights of `parts`, by default of all parts, for the duration of the context.

        Other threads wait until the context ends.
        """
        with _LOADING:
            places = [place for part in parts or (self,) for place in _on_disk(part)]
            self._read(places)
            try:
                yield
            finally:
                for module, name, meta in places:
                    setattr(module, name, meta)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = True) -> Any:
        """Use these weights from now on, in memory, instead of those in the files."""
        state = {name: tensor.to(self._device, self._dtype) for name, tensor in state_dict.items()}
        return super().load_state_dict(state, strict=strict, assign=assign)

    def _read(self, places: list[_Place]) -> None:
        targets = {self._stored[place[2]].name: place for place in places}
        for stored, tensor in read_tensors([self._stored[place[2]] for place in places]):
            module, name, meta = targets[stored]
            setattr(module, name, read_as(meta, tensor, self._device, self._dtype))


def open_decoder(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> StoredDecoder:
    """Open the model of a Hugging Face folder. Only norms and biases are read now.

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
    """`open_decoder`, and the tokenizer of the folder.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    tokenizer = tokenizer_of(Path(path))
    return open_decoder(Path(path), device, dtype), tokenizer


def _on_disk(part: nn.Module) -> list[_Place]:
    return [
        (module, name, tensor)
        for module in part.modules()
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        if tensor.is_meta
    ]
