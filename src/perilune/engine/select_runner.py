"""The choice of the default runner for a model."""

from collections.abc import Sequence

import torch

from perilune.engine import graph_runner
from perilune.engine.graph_runner import GraphRunner
from perilune.engine.native_runner import NativeRunner, weight_kind
from perilune.engine.runner import Runner, TorchRunner
from perilune.engine.transformers_runner import TransformersRunner
from perilune.models.decoder import Decoder
from perilune.models.native.decoder import supports
from perilune.models.transformers_model import TransformersModel


def fastest_runner(decoder: Decoder | TransformersModel, num_blocks: Sequence[int]) -> Runner:
    """Return CUDA graphs on a GPU and the C kernels on a CPU if they support the model, otherwise torch.

    A `TransformersModel` is computed by transformers.

    Raises:
        RequestError: on a GPU, when Triton is not installed.
    """
    if isinstance(decoder, TransformersModel):
        return TransformersRunner(decoder, num_blocks)
    weight = decoder.model.norm.weight
    on_gpu = weight.device.type == "cuda"
    if on_gpu and graph_runner.supports(decoder.config):
        return GraphRunner(decoder, num_blocks)
    on_cpu = weight.device.type == "cpu" and decoder.dtype in {torch.float32, torch.bfloat16}
    if on_cpu and supports(decoder.config, weight_kind(decoder)):
        return NativeRunner(decoder, num_blocks)
    narrow = on_gpu and decoder.precision == "bfloat16"  # a GPU's cache has the precision of products
    return TorchRunner(decoder, num_blocks, torch.bfloat16 if narrow else None)


def is_split_invariant(runner: Runner) -> bool:
    """Return whether `runner` computes the same bits for any division of a sequence into steps."""
    if type(runner) is TorchRunner:
        return runner.cache.device.type == "cpu" and runner.decoder.dtype == torch.float32
    return isinstance(runner, NativeRunner)
