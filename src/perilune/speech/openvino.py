"""The three modules of a speech model as OpenVINO graphs, made from the loaded weights.

The talker uses the paged graph of text models, with embeddings as inputs. The code predictor and the codec
decoder are traced with their weights. Stages, queues and sampling are the same as without OpenVINO.

B utterances or streams, T frames, Q codes of a frame, d hidden size of the talker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.openvino_graph import conversion_error, convert_function
from perilune.engine.openvino_package import import_openvino
from perilune.engine.openvino_runner import OpenVino, OpenVinoRunner
from perilune.engine.runner import deliver_hidden_states, embed_inputs
from perilune.engine.step import StepBatch
from perilune.models.attention import AttentionLayer
from perilune.models.decoder import Decoder
from perilune.speech.codec import CodecDecoder
from perilune.speech.stages import NextLogits, begin_frames, forbidden_tokens
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
        return OpenVinoTalkerRunner(self.talker, decoder, num_blocks, self.settings)


class OpenVinoTalkerRunner(OpenVinoRunner):
    """Computes the talker, and masks all tokens other than codes and the end token."""

    takes_inputs = True

    def __init__(
        self, talker: Talker, decoder: Decoder, num_blocks: Sequence[int], settings: OpenVino
    ) -> None:
        self._forbidden = forbidden_tokens(talker.config)
        super().__init__(decoder, num_blocks, settings)

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

    def __init__(self, talker: Talker, settings: OpenVino) -> None:
        predictor, config = deepcopy(talker.predictor).requires_grad_(False), talker.config.predictor
        groups = talker.config.code_groups
        self._shape = (2 * config.num_layers, groups, config.num_kv_heads, config.head_dim)
        inputs = torch.zeros(2, 2, talker.config.talker.hidden_size)
        examples = inputs, torch.tensor([0]), torch.from_numpy(self._empty_cache(2))
        model = convert_function(_make_predictor_step(predictor, groups), examples, _STEP)
        self._request = settings.compile(model).create_infer_request()
        with torch.no_grad():
            rows = talker.embed_codec(torch.arange(4)).view(2, 2, -1)
            codes = zip(range(1, groups), (rows, rows[:, 1:]), strict=False)
            ours, graph = begin_frames(talker, 2), self.begin(2)
            _check(settings, "code predictor", ((ours(x, i), graph(x, i)) for i, x in codes))

    def _empty_cache(self, frames: int) -> NDArray[np.float32]:
        layers, *rest = self._shape
        return np.zeros((layers, frames, *rest), np.float32)

    def begin(self, frames: int) -> NextLogits:
        """Return the computation of a batch of B frames."""
        cache, before = self._empty_cache(frames), 0

        def next_logits(inputs: Tensor, code: int) -> Tensor:
            nonlocal cache, before
            logits, cache = _infer(self._request, _STEP, inputs.numpy(), np.array([before]), cache)
            before += inputs.shape[1]
            return torch.from_numpy(logits)

        return next_logits


_STEP = ("inputs", "before", "cache")


def _make_predictor_step(predictor: CodePredictor, groups: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function to trace: the logits after N new positions of B frames.

    Its inputs are float[B, N, d], the int64[1] number of earlier positions, and the keys and values
    float[2 L, B, Q, KV, D] of the last Q positions, of which the earliest may not exist yet. Sizes other than
    B and N are constant, because OpenVINO is slow to change them. Its outputs are logits float[B, codes] of
    the next code, and the new keys and values.
    """
    heads = torch.stack([head.weight for head in predictor.heads])  # type: ignore[misc]
    config = predictor.decoder.config
    kv_heads, size = config.num_kv_heads, config.head_dim

    def step(inputs: Tensor, before: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames, new, _ = inputs.shape
        positions = before + torch.arange(new)
        columns = positions[-1:] + torch.arange(1 - groups, 1)
        hidden = (columns < 0) | (columns > positions[:, None])
        extended: list[Tensor] = []

        def attention(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
            for i, x in enumerate((k, v)):
                joined = torch.cat([cache[2 * layer.index + i], x.view(frames, new, kv_heads, size)], dim=1)
                extended.append(joined[:, new:])
            keys, values = (part.transpose(1, 2)[:, :, None] for part in extended[-2:])
            q = q.view(frames, new, kv_heads, -1, size).permute(0, 2, 3, 1, 4) * size**-0.5
            weights = (q @ keys.transpose(3, 4)).masked_fill(hidden, -torch.inf).softmax(-1)
            return (weights @ values).permute(0, 3, 1, 2, 4).reshape(-1, config.num_heads, size)

        out = predictor.hidden(inputs.flatten(0, 1), positions.repeat(frames), attention)
        head = heads.index_select(0, positions[-1:] - 1)[0]
        return out.view(frames, new, -1)[:, -1] @ head.t(), torch.stack(extended)

    return step


class OpenVinoCodec:
    """The codec decoder as a graph; called like `CodecDecoder`.

    Raises:
        RequestError: when OpenVINO cannot convert or compute it.
    """

    device = torch.device("cpu")

    def __init__(self, codec: CodecDecoder, settings: OpenVino) -> None:
        codec = deepcopy(codec).requires_grad_(False)
        self.config = config = codec.config
        codes = (torch.arange(2 * 3 * config.codebooks) % config.codebook_size).view(2, 3, -1)
        ours, graph = CodecState.start(2), CodecState.start(2)
        expected = [codec(codes, ours), codec(codes[:, :2], ours)]
        self._tails = {key: tail.shape[1:] for key, tail in ours.tails.items()}

        def decode(codes: Tensor, frames: Tensor, *tails: Tensor) -> tuple[Tensor, ...]:
            state = CodecState(frames, dict(zip(self._tails, tails, strict=True)))
            return codec(codes, state), *(state.tails[key] for key in self._tails)

        self._names = ("codes", "frames", *self._tails)
        examples = (codes, torch.zeros(2, dtype=torch.int64), *self._initial(2))
        self._request = settings.compile(
            convert_function(decode, examples, self._names)
        ).create_infer_request()
        found = (self(chunk, graph) for chunk in (codes, codes[:, :2]))
        _check(settings, "codec decoder", zip(expected, found, strict=True))

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


def _check(settings: OpenVino, module: str, results: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Check that torch and the device compute the same: a wrong graph or cache would be heard only later.

    Raises:
        RequestError: when a pair of expected and found results differs, or the device fails.
    """
    try:
        for expected, found in results:
            if not (expected - found).abs().max() <= 0.05 * expected.abs().max():
                raise conversion_error(f"{settings.resolved_device} computes its {module} wrongly")
    except RuntimeError as error:
        raise settings.device_error(error) from None


def _infer(request: Any, names: Sequence[str], *arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Return copies of the outputs for these inputs."""
    tensor = import_openvino().Tensor
    for name, array in zip(names, arrays, strict=True):
        request.set_tensor(name, tensor(np.ascontiguousarray(array)))
    request.infer()
    return [output.data.copy() for output in request.output_tensors]
