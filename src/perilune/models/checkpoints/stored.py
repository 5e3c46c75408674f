"""A decoder whose matrices stay in their files until an engine copies them.

An engine keeps its own copy of the weights in the layout that its kernels read. From a `StoredDecoder` it
reads one layer at a time, so that only this copy is in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perilune.models.checkpoints.loading import check_headers, check_tied, convert_tensor, load_tokenizer
from perilune.models.checkpoints.tensors import StoredTensor, read_tensors
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

_LOAD_LOCK = threading.RLock()  # prevents a thread from unloading weights that another thread uses

_Slot = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its tensors, and the meta tensor that stands for it while it is on disk."""


class StoredDecoder(Decoder):
    """A decoder that keeps norms and biases in memory, and reads its matrices only inside `in_memory`.

    An `Engine` can sample from it and score with it. It cannot be called, trained or saved.

    Args:
        stored: the tensors in files, by name.
        device, dtype: device and dtype of the tensors that are read.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.requires_grad_(False)
        self._device, self._dtype = device, dtype
        tensors = chain(self.named_parameters(), self.named_buffers())
        self._stored = {tensor: stored[name] for name, tensor in tensors}
        self._read([slot for slot in _find_disk_slots(self) if slot[2].dim() == 1])

    @contextmanager
    def in_memory(self, *parts: nn.Module) -> Iterator[None]:
        """Load the weights of `parts`, by default of all parts, for the duration of the context.

        Other threads wait until the context ends.
        """
        with _LOAD_LOCK:
            slots = [slot for part in parts or (self,) for slot in _find_disk_slots(part)]
            self._read(slots)
            try:
                yield
            finally:
                for module, name, meta in slots:
                    setattr(module, name, meta)

    def widened(self) -> StoredDecoder:
        """Return a decoder that reads the same files in float32."""
        if self._dtype == torch.float32:
            return self
        stored = {tensor.name: tensor for tensor in self._stored.values()}
        return StoredDecoder(self.config, stored, self._device, torch.float32)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = True) -> Any:
        """Use these weights in memory instead of those in the files."""
        state = {name: tensor.to(self._device, self._dtype) for name, tensor in state_dict.items()}
        return super().load_state_dict(state, strict=strict, assign=assign)

    def _read(self, slots: list[_Slot]) -> None:
        targets = {self._stored[slot[2]].name: slot for slot in slots}
        for stored, tensor in read_tensors([self._stored[slot[2]] for slot in slots]):
            module, name, meta = targets[stored]
            setattr(module, name, convert_tensor(meta, tensor, self._device, self._dtype))


def open_decoder(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> StoredDecoder:
    """Open the model of a Hugging Face folder. Only norms and biases are read now.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    config, stored = check_headers(Decoder, path)
    decoder = StoredDecoder(config, stored, torch.device(device), dtype)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        with decoder.in_memory(decoder.model.embed_tokens):
            check_tied(stored["lm_head.weight"], decoder.model.embed_tokens.weight)
    return decoder


def open_checkpoint(
    path: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[StoredDecoder, Tokenizer]:
    """Open the model of a Hugging Face folder, and read its tokenizer.

    Raises:
        RequestError: as `load_checkpoint`.
    """
    tokenizer = load_tokenizer(Path(path))
    return open_decoder(Path(path), device, dtype), tokenizer


def _find_disk_slots(part: nn.Module) -> list[_Slot]:
    return [
        (module, name, tensor)
        for module in part.modules()
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        if tensor.is_meta
    ]
