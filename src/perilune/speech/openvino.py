"""The three modules of a speech model as OpenVINO graphs, made from the loaded weights.

The talker uses the paged graph of text models, with embeddings as inputs. The code predictor and the codec
decoder are traced with their weights. Stages, queues and sampling are the same as without OpenVINO.

B utterances or streams, T frames, Q codes of a frame, d hidden size of the talker.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.openvino_graph import convert_function
from perilune.engine.openvino_package import import_openvino
from perilune.engine.openvino_runner import OpenVino, OpenVinoRunner
from perilune.engine.runner import deliver_hidden_states, embed_inputs
from perilune.engine.step import StepBatch
from perilune.models.attention import AttentionLayer
from perilune.models.decoder import Decoder
from perilune.speech.codec import CodecDecoder
from perilune.speech.stages import NextLogits, forbidden_tokens
from perilune.speech.streaming import CodecState
from perilune.speech.talker import CodePredictor, Talker


@dataclass(frozen=True, slots=True)
class OpenVinoTalker:
    """Creates the runner of the talker's engine."""

    talker: Talker
    settings: OpenVino

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    def __call__(self, decoder: Decoder, num_blocks: Sequence[int]) -> OpenVinoTalkerRunner:
        return OpenVinoTalkerRunner(self.talker, num_blocks, self.settings)


class OpenVinoTalkerRunner(OpenVinoRunner):
    """Computes the talker, and masks all tokens other than codes and the end token."""

    takes_inputs = True

    def __init__(self, talker: Talker, num_blocks: Sequence[int], settings: OpenVino) -> None:
        self._forbidden = forbidden_tokens(talker.config)
        super().__init__(talker.decoder, num_blocks, settings)

    def load_weights(self, decoder: Decoder) -> None:
        self._decoder = decoder
        super().load_weights(decoder)

    def _inputs(self, batch: StepBatch) -> dict[str, NDArray[Any]]:
        inputs = super()._inputs(batch)
        tokens = torch.from_numpy(inputs.pop("token_ids"))
        return inputs | {"inputs": embed_inputs(self._decoder, batch, tokens).detach().numpy()}

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        logits = self._compute_logits(batch)
        deliver_hidden_states(batch, torch.from_numpy(self._request.get_output_tensor(1).data))
        return logits.masked_fill_(self._forbidden, -torch.inf)


class OpenVinoPredictor:
    """The code predictor as one graph for all codes of a frame, with the keys and values of earlier codes.

    Raises:
        RequestError: when OpenVINO cannot convert or compute it.
    """

    def __init__(self, predictor: CodePredictor, settings: OpenVino) -> None:
        predictor = deepcopy(predictor).requires_grad_(False)
        config = predictor.decoder.config
        self._cache_shape = (2 * config.num_layers, 0, config.num_kv_heads, config.head_dim)
        caches = torch.zeros(2 * config.num_layers, 2, 3, config.num_kv_heads, config.head_dim)
        inputs = torch.zeros(2, 2, predictor.embeddings[0].embedding_dim)  # type: ignore[arg-type]
        examples = (inputs, caches, torch.zeros(1, dtype=torch.int64))
        model = convert_function(_make_predictor_step(predictor), examples, _PREDICTOR_INPUTS)
        self._request = settings.compile(model).create_infer_request()

    def begin(self, frames: int) -> NextLogits:
        layers, *rest = self._cache_shape
        caches = np.zeros((layers, frames, *rest), np.float32)

        def next_logits(inputs: Tensor, code: int) -> Tensor:
            nonlocal caches
            head = np.array([code - 1])
            logits, caches = _infer(self._request, _PREDICTOR_INPUTS, inputs.numpy(), caches, head)
            return torch.from_numpy(logits)

        return next_logits


_PREDICTOR_INPUTS = ("inputs", "caches", "head")


def _make_predictor_step(predictor: CodePredictor) -> Any:
    """Return the function to trace.

    From the inputs float[B, N, d] of N new positions, the keys and values float[2 L, B, P, KV, D] of the
    earlier positions, and the index int64[1] of a head, it computes logits float[B, codes] and the keys and
    values of all positions.
    """
    heads = torch.stack([head.weight for head in predictor.heads])  # type: ignore[misc]
    config = predictor.decoder.config
    kv_heads, size = config.num_kv_heads, config.head_dim

    def step(inputs: Tensor, caches: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        (frames, new, _), before = inputs.shape, caches.shape[2]
        positions = torch.arange(before, before + new)
        hidden = torch.arange(before + new) > positions[:, None]
        extended: list[Tensor] = []

        def attention(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
            for cache, x in zip(caches[2 * layer.index : 2 * layer.index + 2], (k, v), strict=True):
                extended.append(torch.cat([cache, x.view(frames, new, kv_heads, size)], dim=1))
            keys, values = (cache.transpose(1, 2)[:, :, None] for cache in extended[-2:])
            q = q.view(frames, new, kv_heads, -1, size).permute(0, 2, 3, 1, 4) * size**-0.5
            weights = (q @ keys.transpose(3, 4)).masked_fill(hidden, -torch.inf).softmax(-1)
            return (weights @ values).permute(0, 3, 1, 2, 4).reshape(q.shape[0] * new, -1, size)

        out = predictor.hidden(inputs.flatten(0, 1), positions.repeat(frames), attention)
        out = out.view(frames, new, -1)[:, -1]
        return out @ heads.index_select(0, head)[0].t(), torch.stack(extended)

    return step


class OpenVinoCodec:
    """The codec decoder as a graph; called like `CodecDecoder`.

    Raises:
        RequestError: when OpenVINO cannot convert or compute it.
    """

    device = torch.device("cpu")

    def __init__(self, codec: CodecDecoder, settings: OpenVino) -> None:
        codec = deepcopy(codec).requires_grad_(False)
        self.config = codec.config
        state, codes = CodecState.start(1), torch.zeros(2, 3, codec.config.codebooks, dtype=torch.int64)
        codec(codes[:1], state)
        self._tails = {key: tail.shape[1:] for key, tail in state.tails.items()}

        def decode(codes: Tensor, frames: Tensor, *tails: Tensor) -> tuple[Tensor, ...]:
            state = CodecState(frames, dict(zip(self._tails, tails, strict=True)))
            return codec(codes, state), *(state.tails[key] for key in self._tails)

        self._names = ("codes", "frames", *self._tails)
        examples = (codes, torch.zeros(2, dtype=torch.int64), *self._initial(2))
        self._request = settings.compile(convert_function(decode, examples, self._names)).create_infer_request()

    def _initial(self, streams: int) -> list[Tensor]:
        return [torch.zeros(streams, *shape) for shape in self._tails.values()]

    def __call__(self, codes: Tensor, state: CodecState) -> Tensor:
        """Return samples float[B, T * frame] of int64[B, T, Q] codes. `state` advances by T frames."""
        tails = list(state.tails.values()) or self._initial(len(codes))
        arrays = (tensor.numpy() for tensor in (codes, state.frames, *tails))
        samples, *after = map(torch.from_numpy, _infer(self._request, self._names, *arrays))
        state.frames = state.frames + codes.shape[1]
        state.tails = dict(zip(self._tails, after, strict=True))
        return samples


def _infer(request: Any, names: Sequence[str], *arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Return copies of the outputs for these inputs."""
    tensor = import_openvino().Tensor
    for name, array in zip(names, arrays, strict=True):
        request.set_tensor(name, tensor(np.ascontiguousarray(array)))
    request.infer()
    return [output.data.copy() for output in request.output_tensors]
