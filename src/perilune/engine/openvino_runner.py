"""The runner for Intel devices: OpenVINO computes whole steps, on a paged KV cache in its own layout.

The scheduler, the prefix cache and the sampler are the engine's. The log-probs of a token are equal in
different batches only up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import Blocks
from perilune.engine.openvino_graph import STEP_INPUTS, WeightKind, conversion_error, paged_graph
from perilune.engine.openvino_package import import_openvino, list_devices, openvino_core
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.decoder import Decoder
from perilune.models.transformers_model import TransformersModel

_CPU_BLOCK, _GPU_BLOCK = 32, 16  # tokens per block that the kernels of the plugins require
_PROBE = 5  # tokens
_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names of precisions


@dataclass(frozen=True, slots=True)
class OpenVino:
    """Settings of OpenVINO; creates the runner of an engine: `Engine(decoder, runner=OpenVino())`.

    Attributes:
        device: CPU, GPU, GPU.1, NPU, ...; AUTO selects a GPU, or the CPU if there is none.
        weights: how matrices are stored; int8 has one scale per output channel.
        cache: how keys and values are stored: float32 keeps them as they are computed, in `precision`; u8
            has one scale and zero point per token and head.
        precision: precision of the computation. It is always set, because OpenVINO's own default is a lower
            precision on some devices.
    """

    device: str = "CPU"
    weights: WeightKind = "float32"
    cache: Literal["float32", "u8"] = "float32"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"

    @property
    def block_size(self) -> int:
        """Tokens per block of the cache."""
        return _CPU_BLOCK if self.resolved_device == "CPU" else _GPU_BLOCK

    @property
    def resolved_device(self) -> str:
        """`device`; for AUTO, the device that it selects."""
        if self.device != "AUTO":
            return self.device
        return "GPU" if any(name.startswith("GPU") for name in list_devices()) else "CPU"

    @property
    def properties(self) -> dict[str, str]:
        """Properties of the compiled model."""
        precision = _TYPES[self.precision]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": "u8" if self.cache == "u8" else precision,
            "PERFORMANCE_HINT": "LATENCY",
            "CACHE_DIR": "",  # no cache of compiled models: each weight update would add one
        }
        if self.resolved_device == "CPU":
            properties |= {
                "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
                "ENABLE_CPU_PINNING": "NO",  # the learner uses the same cores
                "KEY_CACHE_QUANT_MODE": "BY_TOKEN",  # scales by channel change with the tokens of a block
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",  # activations are not rounded to int8
            }
        return properties

    def compile(self, model: Any) -> Any:
        """Compile an `openvino.Model` for the device.

        Raises:
            RequestError: when the device cannot compute it, or not in the precision of these settings.
        """
        try:
            compiled = openvino_core().compile_model(model, self.resolved_device, self.properties)
            found = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        except RuntimeError as error:
            raise self.device_error(error) from None
        names = {kind: name for name, kind in _TYPES.items()}
        if (used := names.get(found, found)) != self.precision:  # OpenVINO may choose another
            raise RequestError(
                f"OpenVINO's device {self.resolved_device} computes in {used} instead of {self.precision}",
                remedy=f"set the precision to {used}",
            )
        return compiled

    def device_error(self, error: RuntimeError) -> RequestError:
        """Return the error for a failure of the device, with the last line of its message."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        found = ", ".join(list_devices())
        reason = f"{lines[-1] if lines else error} (device {self.device}; this machine has {found})"
        return conversion_error(reason)

    def __call__(self, decoder: Decoder | TransformersModel, num_blocks: Sequence[int]) -> OpenVinoRunner:
        return OpenVinoRunner(decoder, num_blocks, self)


class OpenVinoRunner:
    """Computes steps with OpenVINO.

    Every `load_weights` puts the weights into the graph as constants and compiles it.

    Args:
        decoder: the decoder whose weights are copied.
        num_blocks: blocks of the cache for each of the `distinct_windows`, including the null block.

    Raises:
        RequestError: when openvino is missing, it cannot convert the model, or the device cannot compute it
            in the precision of the settings.
    """

    takes_inputs = False

    def __init__(
        self, decoder: Decoder | TransformersModel, num_blocks: Sequence[int], settings: OpenVino
    ) -> None:
        if isinstance(decoder, TransformersModel):
            raise conversion_error("Perilune's decoder does not implement it, transformers does")
        self._core, self._settings = openvino_core(), settings
        config = self._config = decoder.config
        self._graph = paged_graph(config, takes_inputs=self.takes_inputs)
        self._table_of = [
            config.distinct_windows.index(config.window(layer)) for layer in range(config.num_layers)
        ]
        self._caches: dict[str, Any] = {}
        self._compiled: Any = None
        self._request: Any = None
        with decoder.in_memory():
            self.load_weights(decoder)
        self._allocate(num_blocks)
        self._check_device()

    def load_weights(self, decoder: Decoder) -> None:
        self._request = self._compiled = None  # free their memory before compiling
        self._compiled = self._settings.compile(self._graph.with_weights(decoder, self._settings.weights))
        self._request = self._compiled.create_infer_request()
        for name, cache in self._caches.items():
            self._request.set_tensor(name, cache)

    def _allocate(self, num_blocks: Sequence[int]) -> None:
        """Create the KV cache in the layout that the device requires."""
        ov, device = import_openvino(), self._settings.resolved_device
        for layer, table in enumerate(self._table_of):
            for name in (f"keys.{layer}", f"values.{layer}"):
                port = self._compiled.input(name)
                _, *sizes = (
                    dimension.get_length() if dimension.is_static else 0 for dimension in port.partial_shape
                )
                shape = ov.Shape([num_blocks[table], *sizes])
                if device == "CPU":
                    cache = ov.Tensor(port.element_type, shape)
                else:
                    cache = self._core.get_default_context(device).create_tensor(port.element_type, shape, {})
                self._caches[name] = cache
                self._request.set_tensor(name, cache)
        self.clear()

    def run(self, batch: StepBatch) -> Tensor:
        return self._compute_logits(batch)

    def _compute_logits(self, batch: StepBatch) -> Tensor:
        request, ov = self._request, import_openvino()
        for name, array in self._inputs(batch).items():
            request.set_tensor(name, ov.Tensor(array))
        request.infer()
        return torch.from_numpy(request.get_output_tensor(0).data.copy())

    def _inputs(self, batch: StepBatch) -> dict[str, NDArray[Any]]:
        bounds = batch.cu_seqlens
        past = batch.positions[bounds[:-1]]
        lengths = past + np.diff(bounds)
        columns = -(-lengths // self._settings.block_size)
        step = (batch.token_ids, batch.positions, batch.logit_rows, past, bounds, lengths.max())
        dtypes = [np.int64] * 3 + [np.int32] * 3
        inputs = {
            name: np.array(array, dtype=dtype)
            for name, array, dtype in zip(STEP_INPUTS, step, dtypes, strict=True)
        }
        used = np.arange(batch.block_tables.shape[2]) < columns[:, None]
        begins = np.concatenate([[0], np.cumsum(columns)]).astype(np.int32)
        for index, table in enumerate(batch.block_tables):
            inputs[f"blocks.{index}"], inputs[f"block_begins.{index}"] = table[used], begins
        return inputs

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        for layer, table in enumerate(self._table_of):
            for name in (f"keys.{layer}", f"values.{layer}"):
                self._copy(self._caches[name], sources[table], targets[table])

    def _copy(self, cache: Any, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        if self._settings.resolved_device == "CPU":
            cache.data[targets] = cache.data[sources]
            return
        ov, (_, *sizes) = import_openvino(), cache.shape
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            parts = (ov.RemoteTensor(cache, [i, 0, 0, 0], [i + 1, *sizes]) for i in (source, target))
            next(parts).copy_to(next(parts))

    def clear(self) -> None:
        for cache in self._caches.values():
            if self._settings.resolved_device == "CPU":
                cache.data[...] = 0
            else:
                cache.copy_from(import_openvino().Tensor(cache.element_type, cache.shape))

    def _check_device(self) -> None:
        """Check that the device keeps keys and values: a text in two steps must have the logits of one step.

        Raises:
            RequestError: when they differ, or the device fails.
        """
        tokens = np.arange(_PROBE, dtype=np.int64) % self._config.vocab_size

        def step(start: int, end: int) -> Tensor:
            tables = np.ones((len(self._config.distinct_windows), 1, 1), dtype=np.int32)
            bounds, last = np.array([0, end - start]), np.array([end - start - 1])
            batch = StepBatch(tokens[start:end], np.arange(start, end), bounds, 0, tables, last)
            return self._compute_logits(batch)

        try:
            expected = step(0, _PROBE)
            step(0, 3)
            resumed = step(3, _PROBE)
        except RuntimeError as error:
            raise self._settings.device_error(error) from None
        if not (expected - resumed).abs().max() <= 0.05 * expected.abs().max():
            device = self._settings.resolved_device
            raise conversion_error(f"{device} does not keep keys and values between steps")
        self.clear()
