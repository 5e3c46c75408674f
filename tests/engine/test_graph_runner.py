"""GraphRunner on a CPU: steps over fixed buffers, and a recorded graph in place of a CUDA graph."""

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tag, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.engine import graph_runner, select_runner
from perilune.engine.decode_step import DecodeStep, GatheredAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner, bucket
from perilune.engine.request import Prompt, Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.models.adapters.files import Adapter
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.grouped_experts import ExpertGroups, StackedWeight
from perilune.models.native import ops

TINY = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2, max_position_embeddings=512)
GEMMA = TINY.replace(architecture="gemma3_text", windows=(20, None), num_heads=4, num_kv_heads=2)
EXPERTS = TINY.replace(architecture="qwen3_moe", experts=Experts(4, 2, 32, normalized=True))


@pytest.fixture(scope="module", autouse=True)
def by_torch_in_small_buckets() -> Iterator[None]:
    """Disable the C kernels, as on a GPU; small buckets test the same code as large ones."""
    with (
        mock.patch.object(ops, "is_available", lambda: False),
        mock.patch.object(graph_runner, "_FEWEST_COLUMNS", 2),
    ):
        yield


def make(config: DecoderConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(config)
    decoder.initialize(seed)
    return decoder.to(dtype)


def gathered_product(x: Tensor, weight: StackedWeight, groups: ExpertGroups) -> Tensor:
    """A `GroupedProduct` in torch that gathers the matrix of each pair."""
    pairs = len(groups.order)
    experts = torch.searchsorted(groups.ends, torch.arange(pairs), right=True)
    rows = x[groups.order // (pairs // len(x))]
    if weight.values.dtype == torch.bfloat16:
        rows = rows.bfloat16().to(x.dtype)
    out = (weight.values[experts].to(x.dtype) @ rows[..., None])[..., 0]
    if weight.scales is not None:
        out = out * weight.scales[experts].to(x.dtype)
    return torch.empty_like(out).index_copy_(0, groups.order, out)


def graphed(decoder: Decoder, num_blocks: Any, **options: Any) -> GraphRunner:
    options = {"attention": GatheredAttention, "experts": gathered_product} | options
    return GraphRunner(decoder, num_blocks, **options)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(98, size=length).tolist()  # type: ignore[no-any-return]


def play(
    engine: Engine, moves: list[tuple[str, int]]
) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """Tokens and log-probs of every sample after the engine has executed `moves`."""
    samples: dict[tuple[int, int], tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))

    def step() -> None:
        for delta in engine.step():
            tokens, logprobs = samples[delta.request_id, delta.sample]
            tokens += delta.token_ids
            logprobs += delta.logprobs

    for index, (move, size) in enumerate(moves):
        if move == "add":
            engine.add(
                Request(prompt(size, index), SamplingParams(8 + size % 20), (index, 0, 0), 1 + size % 3)
            )
        elif move == "abort":
            engine.abort(size % max(1, index))
        elif move == "learn":
            engine.update_weights(make(engine._config, size).state_dict(), size + 1, recompute=size % 2 == 0)
        else:
            for _ in range(size % 6):
                step()
    while engine.unfinished:
        step()
    return dict(samples)


moves = st.lists(
    st.tuples(st.sampled_from(["add", "add", "step", "step", "abort", "learn"]), st.integers(1, 70)),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize("config", [TINY, GEMMA, EXPERTS], ids=["dense", "windows", "experts"])
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(moves=moves, room=st.sampled_from([{}, {"cache_tokens": 160}, {"slots": 3, "token_budget": 12}]))
def test_graph_runner_samples_equal_those_of_torch_runner(
    config: DecoderConfig, moves: list[tuple[str, int]], room: dict[str, int]
) -> None:
    """Float64 keeps weights as plain tensors, as on a GPU."""

    def played(runner: Any) -> Any:
        options = {"slots": 8, "cache_tokens": 2048, **room}
        return play(Engine(make(config, dtype=torch.float64), runner=runner, **options), moves)

    expected, found = played(TorchRunner), played(graphed)
    assert found.keys() == expected.keys()
    for sample, (tokens, logprobs) in expected.items():
        assert found[sample][0] == tokens
        np.testing.assert_allclose(found[sample][1], logprobs, atol=1e-6)


class RecordedGraph:
    """A CUDA graph on a CPU: records operations with their tensors and replays them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            if isinstance(out, Tensor) and again.data_ptr() != out.data_ptr():
                out.copy_(again)
            elif isinstance(out, list | tuple):
                for target, source in zip(out, again, strict=True):
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)


class Recording(TorchDispatchMode):
    """Replaces `torch.cuda.graph`."""

    def __init__(self, graph: RecordedGraph, pool: Any, capture_error_mode: str) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = not {Tag.data_dependent_output, Tag.dynamic_output_shape}.isdisjoint(func.tags)
        assert func is torch.ops.aten.index.Tensor or not waits, "a step waits for the device"
        out = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, out))
        return out


@pytest.mark.parametrize("config", [TINY, GEMMA, EXPERTS], ids=["dense", "windows", "experts"])
@pytest.mark.parametrize("weights", [None, "bfloat16", "int8"])
def test_captured_steps_replay_correctly_with_new_inputs_and_weights(
    config: DecoderConfig, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay reads only its buffers and the weights in place. Float64 keeps weights as plain tensors."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    captured = []
    capture = DecodeStep._capture
    monkeypatch.setattr(
        DecodeStep, "_capture", lambda self, graphs: (captured.append(self), capture(self, graphs))
    )

    def capturing(decoder: Decoder, num_blocks: Any) -> GraphRunner:
        runner = graphed(decoder, num_blocks, weights=weights)
        runner._graphs = (0, 0)
        return runner

    def plain(decoder: Decoder, num_blocks: Any) -> TorchRunner:
        return TorchRunner(decoder, num_blocks, weights=weights)

    moves = [("add", 30), ("step", 5), ("add", 9), ("step", 5), ("add", 44), ("step", 3), ("abort", 1)]
    moves += [("learn", 1), ("add", 3), ("step", 5), ("learn", 4), ("add", 61)]
    found, expected = (
        play(Engine(make(config, dtype=torch.float64), runner=runner, slots=8, cache_tokens=2048), moves)
        for runner in (capturing, plain)
    )
    assert len(captured) > 3
    assert found.keys() == expected.keys()
    for sample, (tokens, logprobs) in expected.items():
        assert found[sample][0] == tokens
        np.testing.assert_allclose(found[sample][1], logprobs, atol=1e-6)


def test_adapters_are_exact_when_replaced_and_after_weight_updates() -> None:
    name = "model.layers.0.self_attn.q_proj"
    generator = torch.Generator().manual_seed(0)
    shape = make(TINY).get_submodule(name).weight.shape
    pairs = {
        name: (torch.randn(2, shape[1], generator=generator), torch.randn(shape[0], 2, generator=generator))
    }
    text, key, params = prompt(20, 0), (0, 0, 0), SamplingParams(20)

    def adapted(engine: Engine) -> list[tuple[int, int, list[int]]]:
        """The deltas of a request with the adapter and of a concurrent one without."""
        first = engine.add(Request(text, params, key, 2, adapter="own"))
        engine.add(Request(text, SamplingParams(30), key, 2))
        deltas = []
        while engine.unfinished:
            deltas += [(delta.request_id - first, delta.sample, delta.token_ids) for delta in engine.step()]
        return deltas

    deltas = []
    for runner in (TorchRunner, graphed):
        engine = Engine(make(TINY), runner=runner, slots=8, cache_tokens=2048)
        plain = engine.sample([Prompt(text, key)], 2, params)[0]
        for index in range(2):  # the second replaces the first and must not add to it
            engine.add_adapter("own", Adapter(pairs, 1.0 + index))
        deltas.append(adapted(engine))
        again = engine.sample([Prompt(text, key)], 2, params)[0]
        assert [reply.token_ids.tolist() for reply in again] == [reply.token_ids.tolist() for reply in plain]

        engine.update_weights(make(TINY, seed=7).state_dict(), 1)  # the weights below the adapters
        fresh = Engine(make(TINY, seed=7), runner=runner, slots=8, cache_tokens=2048)
        fresh.add_adapter("own", Adapter(pairs, 2.0))
        assert adapted(engine) == adapted(fresh) != deltas[0]
    assert deltas[0] == deltas[1]
    by_request = [[tokens for request, _, tokens in deltas[0] if request == index] for index in (0, 1)]
    assert by_request[0] != by_request[1][: len(by_request[0])]


def test_bucket_rounds_rows_and_columns_up() -> None:
    rows = [bucket(count, 1)[0] for count in (1, 2, 3, 5, 8, 9, 17, 33, 49, 65, 193, 256, 257, 385)]
    assert rows == [1, 2, 4, 8, 8, 16, 24, 48, 64, 96, 256, 256, 384, 512]
    assert len({bucket(count, 1) for count in range(1, 513)}) == 15
    with mock.patch.object(graph_runner, "_FEWEST_COLUMNS", 64):
        assert [bucket(1, columns)[1] for columns in (1, 64, 65, 256, 257)] == [64, 64, 256, 256, 1024]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [TINY, GEMMA, EXPERTS], ids=["dense", "windows", "experts"])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_cuda_graph_samples_agree_with_torch_runner(config: DecoderConfig, cache: Any) -> None:
    """On a GPU with Triton, within the rounding of a different summation order."""
    runners: list[GraphRunner] = []

    def captured(decoder: Decoder, num_blocks: Any) -> GraphRunner:
        runners.append(GraphRunner(decoder, num_blocks, cache=cache))
        return runners[0]

    def plain(decoder: Decoder, num_blocks: Any) -> TorchRunner:
        return TorchRunner(decoder, num_blocks, None if cache is None else torch.int8)

    moves = [("add", 30), ("step", 5), ("add", 9), ("step", 5), ("add", 300), ("step", 3), ("abort", 1)]
    moves += [("learn", 1), ("add", 3), ("step", 5), ("learn", 4), ("add", 61)]
    options = {"slots": 8, "cache_tokens": 4096}
    expected, found = (
        play(Engine(make(config).to("cuda"), runner=runner, **options), moves) for runner in (plain, captured)
    )
    graphs = [step._graph for step in runners[0]._steps.values()]
    assert graphs and None not in graphs
    same = sum(found[sample][0] == tokens for sample, (tokens, _) in expected.items())
    assert found.keys() == expected.keys() and same >= 0.8 * len(expected)
    for sample, (tokens, logprobs) in expected.items():
        if found[sample][0] == tokens:
            np.testing.assert_allclose(found[sample][1], logprobs, atol=5e-3)


def test_graph_runner_cache_is_bfloat16_with_bfloat16_products() -> None:
    decoder = make(TINY)
    assert graphed(decoder, (4,)).cache.dtype == torch.float32
    decoder.set_precision("bfloat16")
    assert graphed(decoder, (4,)).cache.dtype == torch.bfloat16
    assert TorchRunner(decoder, (4,)).cache.dtype == torch.float32  # on a CPU


def test_cache_of_a_gpu_is_bfloat16_without_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the memory plan assumes; for example in Gemma 2, whose scores the graphs' kernels do not bound."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(select_runner, "TorchRunner", lambda *arguments: made.append(arguments))
    on_gpu = SimpleNamespace(norm=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    config = GEMMA.replace(architecture="gemma2", local_rope=None, score_softcap=50.0)
    for precision in ("float32", "bfloat16"):
        decoder: Any = SimpleNamespace(model=on_gpu, config=config, precision=precision)
        fastest_runner(decoder, (4, 4))
    assert [arguments[2] for arguments in made] == [None, torch.bfloat16]
