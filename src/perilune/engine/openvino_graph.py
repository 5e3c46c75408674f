"""The decoder as an OpenVINO graph over a paged cache.

The decoder is traced on torch's meta device with its weights as inputs, so a graph depends on the
configuration alone. `PagedGraph.with_weights` inserts the current weights as constants, because OpenVINO
runs faster with constants than with inputs. Attention is OpenVINO's paged attention operator, which reads the
engine's block tables.

N tokens, S sequences, R rows of logits, W distinct windows.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from perilune.engine.openvino_package import import_openvino
from perilune.errors import RequestError
from perilune.models.attention import AttentionLayer
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder, SelfAttention
from perilune.models.layers import RMSNorm
from perilune.models.narrow import round_weight

WeightKind = Literal["float32", "int8"]

STEP_INPUTS = ("token_ids", "positions", "logit_rows", "past", "begins", "longest")
"""Inputs of a step: int64[N] tokens and positions, int64[R] rows of logits, int32[S] cached tokens,
int32[S + 1] bounds of the sequences, and the int32 length of the longest."""

_PLACEHOLDER = "perilune::paged_attention"
_library: list[torch.library.Library] = []


class PagedGraph:
    """The graph of all decoders of one configuration, without weights.

    Its inputs are `STEP_INPUTS`, then `blocks.I` int32[B] and `block_begins.I` int32[S + 1] for each window,
    then `keys.L` and `values.L` for each layer. Its output is logits float32[R, V].

    Args:
        takes_inputs: whether the first input is `inputs` float32[N, d], the inputs of the first layer,
            instead of tokens. A second output is then the last hidden states float32[R, d].

    Raises:
        RequestError: when OpenVINO cannot convert the decoder.
    """

    def __init__(self, config: DecoderConfig, *, takes_inputs: bool = False) -> None:
        import_openvino()
        from openvino.frontend.pytorch import ConversionExtension

        if reason := _unsupported_reason(config):
            raise conversion_error(reason)
        with torch.device("meta"):
            traced = Decoder(config)
        self._named_weights = list(_named_weights(traced))
        tables = [f"{name}.{index}" for index in range(len(config.distinct_windows)) for name in _TABLES]
        caches = [f"{name}.{layer}" for layer in range(config.num_layers) for name in _CACHES]
        first = ["inputs" if takes_inputs else "token_ids"]
        names = [*first, *STEP_INPUTS[1:], *tables, *caches, *self._named_weights]
        convert = ConversionExtension(_PLACEHOLDER, lambda node: [_paged_attention(node, config)])
        step, examples = _make_step(traced, names), _example_inputs(traced, names)
        self._model = convert_function(step, examples, names, [convert])

    def with_weights(self, decoder: Decoder, kind: WeightKind) -> Any:
        """Return an `openvino.Model` with a copy of the current weights of `decoder`.

        Args:
            kind: how matrices are stored. int8 has one scale per output channel. Embeddings are float32.
        """
        from openvino import opset13

        model = self._model.clone()
        inputs = {port.get_any_name(): port.get_node() for port in model.inputs}
        for name, weight in _named_weights(decoder).items():
            if kind == "int8" and name.endswith(".matrix"):
                narrow = round_weight(weight, "int8")
                assert narrow.scales is not None
                wide = opset13.convert(opset13.constant(narrow.values.numpy()), "f32")
                constant = opset13.multiply(wide, opset13.constant(narrow.scales[:, None].numpy()))
            else:
                constant = opset13.constant(weight.detach().float().contiguous().numpy())
            inputs[name].output(0).replace(constant.output(0))
            model.remove_parameter(inputs[name])
        model.validate_nodes_and_infer_types()
        return model


_TABLES, _CACHES = ("blocks", "block_begins"), ("keys", "values")


@lru_cache(maxsize=4)
def paged_graph(config: DecoderConfig, *, takes_inputs: bool = False) -> PagedGraph:
    """Return the graph of `config`, converted once."""
    return PagedGraph(config, takes_inputs=takes_inputs)


def convert_function(
    function: Callable[..., Any],
    examples: Sequence[Tensor],
    names: Sequence[str],
    extensions: Sequence[Any] = (),
) -> Any:
    """Return the `openvino.Model` of a function of tensors, whose inputs have these names.

    Sizes of the examples may vary between calls if `function` reads them from shapes.

    Raises:
        RequestError: when OpenVINO is missing or cannot convert the function.
    """
    ov = import_openvino()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # OpenVINO needs torch.jit.trace, which is deprecated
            script = torch.jit.trace(function, tuple(examples), check_trace=False)  # type: ignore[no-untyped-call]
        model = ov.convert_model(script, extension=list(extensions) or None)
    except (RuntimeError, TypeError, ValueError) as error:
        raise conversion_error(str(error).strip().partition("\n")[0]) from error
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    return model


def conversion_error(reason: str) -> RequestError:
    """Return the error for a model that OpenVINO cannot compute."""
    return RequestError(
        f"OpenVINO cannot compute this model: {reason}",
        remedy="remove the setting that selects OpenVINO; Perilune's own engine then computes the model",
    )


def _unsupported_reason(config: DecoderConfig) -> str:
    """Return why OpenVINO cannot compute a model that Perilune's decoder implements; "" if it can."""
    if config.experts is not None:
        return "it is a mixture of experts, and a traced graph cannot route tokens to experts"
    if config.latent is not None:
        return "OpenVINO's paged attention cannot read a latent cache"
    if config.delta is not None:
        return "OpenVINO's paged attention has no linear attention"
    if config.family.sinks or config.score_softcap is not None:
        return "its attention has sinks or capped scores, which the conversion does not support"
    return ""


def _named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Return the weights of the traced graph by name; matrices of products end in `.matrix`."""
    table = {f"rope.{i}": decoder.inverse_frequencies[rope] for i, rope in enumerate(_ropes(decoder.config))}
    table["embedding"] = decoder.model.embed_tokens.weight
    for index, projection in enumerate(decoder.projections()):
        matrix, bias = projection.stack_parts()
        table[f"projection.{index}.matrix"] = matrix
        if bias is not None:
            table[f"projection.{index}.bias"] = bias
    table |= {name: norm.factor() for name, norm in _norms(decoder)}
    table |= {name: attention.qk_norm_weight() for name, attention in _head_normed_attentions(decoder)}
    return table


def _set_weights(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    """Make a decoder that is being traced compute with `weights`."""
    ropes = _ropes(decoder.config)
    decoder.inverse_frequencies = {rope: weights[f"rope.{i}"] for i, rope in enumerate(ropes)}
    for index, projection in enumerate(decoder.projections()):
        projection.frozen = weights[f"projection.{index}.matrix"], weights.get(f"projection.{index}.bias")
    for name, norm in _norms(decoder):
        _replace_weight(norm, weights[name])
        norm.offset = False
    for name, attention in _head_normed_attentions(decoder):
        attention.frozen_qk_norm = weights[name]
    _replace_weight(decoder.model.embed_tokens, weights["embedding"])


def _replace_weight(module: torch.nn.Module, weight: Tensor) -> None:
    """Replace a parameter with an input of the trace."""
    module._parameters.pop("weight", None)
    module.__dict__["weight"] = weight


def _ropes(config: DecoderConfig) -> list[Any]:
    """Return the distinct rotary embeddings of the layers."""
    return list(filter(None, dict.fromkeys(config.layer_rope(layer) for layer in range(config.num_layers))))


def _norms(decoder: Decoder) -> Iterator[tuple[str, RMSNorm]]:
    """Yield the norms by name, without those of single heads."""
    for name, module in decoder.named_modules():
        by_head = decoder.config.qk_norm == "head" and name.endswith(("q_norm", "k_norm"))
        if isinstance(module, RMSNorm) and not by_head:
            yield name, module


def _head_normed_attentions(decoder: Decoder) -> Iterator[tuple[str, SelfAttention]]:
    for name, module in decoder.named_modules():
        if isinstance(module, SelfAttention) and module.qk_norm == "head":
            yield name, module


def _make_step(decoder: Decoder, names: Sequence[str]) -> Callable[..., Any]:
    """Return the function to trace: logits from inputs in the order of `names`."""
    config = decoder.config

    def step(*inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        given = dict(zip(names, inputs, strict=True))
        _set_weights(decoder, given)

        def attention(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
            assert layer.options is None, "models with sinks or capped scores are refused"
            table = config.distinct_windows.index(layer.window)
            flat = [x.reshape(q.shape[0], -1) for x in (q, k, v)]
            caches = [given[f"{name}.{layer.index}"] for name in _CACHES]
            tables = [given["past"], given["begins"], *(given[f"{name}.{table}"] for name in _TABLES)]
            placeholder = torch.ops.perilune.paged_attention
            out: Tensor = placeholder(*flat, *caches, *tables, given["longest"], layer.window or 0)
            return out

        embedded, positions = given.get("inputs"), given["positions"]
        hidden = decoder(given.get("token_ids", positions), positions, attention, inputs=embedded)
        hidden = hidden.index_select(0, given["logit_rows"])
        logits = decoder.logits(hidden)
        return logits if embedded is None else (logits, hidden)

    _define_placeholder()
    return step


def _example_inputs(decoder: Decoder, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return meta tensors of the inputs' shapes, with arbitrary sizes where they vary."""
    config, weights = decoder.config, _named_weights(decoder)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **dict.fromkeys(("token_ids", "positions"), ((5,), torch.int64)),
        "inputs": ((5, config.hidden_size), torch.float32),
        "logit_rows": ((2,), torch.int64),
        "past": ((3,), torch.int32),
        "begins": ((4,), torch.int32),
        "longest": ((), torch.int32),
        "blocks": ((6,), torch.int32),
        "block_begins": ((4,), torch.int32),
        **dict.fromkeys(_CACHES, ((2, config.num_kv_heads, 16, config.head_dim), torch.float32)),
    }

    def example(name: str) -> Tensor:
        if name in weights:
            return weights[name].detach().to("meta")
        shape, dtype = shapes[name.partition(".")[0]]
        return torch.empty(shape, dtype=dtype, device="meta")

    return tuple(map(example, names))


def _define_placeholder() -> None:
    """Define the placeholder operator for paged attention in a trace."""
    if _library:
        return
    library = torch.library.Library("perilune", "FRAGMENT")  # type: ignore[no-untyped-call]
    names = ("q", "k", "v", *_CACHES, "past", "begins", *_TABLES, "longest")
    tensors = ", ".join(f"Tensor {name}" for name in names)
    library.define(f"paged_attention({tensors}, int window) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("paged_attention", lambda q, *_: torch.empty_like(q), "Meta")  # type: ignore[no-untyped-call]
    _library.append(library)


def _paged_attention(node: Any, config: DecoderConfig) -> Any:
    """Return OpenVINO's paged attention for a placeholder, with all optional features off."""
    from openvino import opset13
    from openvino.op import _PagedAttentionExtension as PagedAttention

    def constant(value: Any, dtype: Any) -> Any:
        return opset13.constant(np.array(value, dtype=dtype)).output(0)

    def empty(dtype: Any, *shape: int) -> Any:
        return constant(np.zeros(shape or (0,)), dtype)

    *operands, longest = (node.get_input(index) for index in range(10))
    paged = PagedAttention(
        [
            *operands,
            constant(config.head_dim**-0.5, np.float32),
            constant(node.get_values_from_const_input(10), np.int32),  # 0 means no window
            empty(np.float32),  # slopes of ALiBi
            longest,
            empty(np.int32),  # window of the scores to return
            *(empty(np.int32), empty(np.int32, 0, 0), empty(np.float32, 0, 0)),  # rotation of cached keys
            *(empty(np.float32), constant(0, np.int32), constant(0, np.int32)),  # sparse attention
            empty(np.float32, 0, 0, 0, 0),  # sinks
            *(constant(0, np.int32), empty(np.int32), empty(np.int32), empty(np.int32)),  # eviction
            empty(np.int32),  # kinds of tokens
            *(empty(np.uint8), empty(np.int32)),  # trees of drafts
        ]
    )
    shape = {"k_head_size": config.head_dim, "num_k_heads": config.num_kv_heads}
    shape |= {"v_head_size": config.head_dim, "num_v_heads": config.num_kv_heads}
    for name, value in shape.items():
        paged.get_rt_info()[name] = value
    return paged.output(0)
