"""Recorded routes equal those of a run without cache, with prefix hits, preemption and weight updates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from perilune.data.routes import missing_rows
from perilune.engine.decode_step import GatheredAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Completion, Prompt, Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder

MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 3, 48, dense_layers=(1,)))
PARAMS = SamplingParams(24)
RUNNERS: dict[str, Callable[..., Any]] = {
    "native": NativeRunner,
    "torch": TorchRunner,
    "graph": partial(GraphRunner, attention=GatheredAttention),
}


def make_decoder(config: DecoderConfig = MIXTURE, seed: int = 0) -> Decoder:
    decoder = Decoder(config)
    decoder.initialize(seed)
    return decoder


def recording_engine(decoder: Decoder, **options: Any) -> Engine:
    engine = Engine(decoder, **options)
    engine.record_routes()
    return engine


def sequence(prompt: Prompt, one: Completion) -> list[int]:
    return [*prompt.token_ids, *one.token_ids.tolist()]


class Recorder:
    """The routes of the learner's decoder in one forward pass over a whole sequence."""

    def __init__(self, decoder: Decoder, tokens: list[int]) -> None:
        self.layers: list[np.ndarray] = []
        with torch.no_grad():
            ids = torch.tensor(tokens)
            decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])), self)

    def forced_experts(self, layer: int, rows: int) -> None:
        return None

    def observe(self, layer: int, logits: torch.Tensor, own: torch.Tensor, chosen: torch.Tensor) -> None:
        assert layer == len(self.layers)
        self.layers.append(chosen.numpy())


def expected_routes(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Routes [T - 1, layers, K] of a whole sequence, computed without cache."""
    return np.stack(Recorder(decoder, tokens[:-1]).layers, axis=1)


def check_routes(decoder: Decoder, prompt: Prompt, one: Completion) -> None:
    assert one.routed_experts is not None and one.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(one.routed_experts, expected_routes(decoder, sequence(prompt, one)))


def prompts(count: int, length: int = 21) -> list[Prompt]:
    return [Prompt([(7 * i + 3 * j + j * j) % 60 for j in range(length)], (0, 1, i)) for i in range(count)]


@pytest.mark.parametrize("runner", RUNNERS)
def test_sample_has_routes_of_every_token_but_its_last(runner: str) -> None:
    decoder = make_decoder()
    engine = recording_engine(decoder, slots=8, runner=RUNNERS[runner])
    few = prompts(2)
    for prompt, group in zip(few, engine.sample(few, 3, PARAMS), strict=True):
        for reply in group:  # samples 1 and 2 have a copy of the prompt's partial second block
            check_routes(decoder, prompt, reply)


def test_cached_prefix_keeps_its_routes() -> None:
    decoder = make_decoder()
    engine = recording_engine(decoder, slots=8)
    (prompt,) = prompts(1, 40)
    for _ in range(2):
        ((reply,),) = engine.sample([prompt], 1, PARAMS)
        check_routes(decoder, prompt, reply)
    assert engine.counters.cached_tokens == 32


def test_preempted_samples_have_all_routes() -> None:
    decoder = make_decoder()
    engine = recording_engine(decoder, slots=6, cache_tokens=160)
    many = prompts(6)
    for prompt, (reply,) in zip(many, engine.sample(many, 1, PARAMS), strict=True):
        check_routes(decoder, prompt, reply)
    assert engine.counters.preemptions


def test_routes_use_uint16_with_more_than_255_experts() -> None:
    decoder = make_decoder(MIXTURE.replace(experts=Experts(256, 2, 16)))
    for runner in (NativeRunner, TorchRunner):
        engine = recording_engine(decoder, slots=4, runner=runner)
        (prompt,) = prompts(1)
        ((reply,),) = engine.sample([prompt], 1, PARAMS)
        assert reply.routed_experts is not None and reply.routed_experts.dtype == np.uint16
        np.testing.assert_array_equal(reply.routed_experts, expected_routes(decoder, sequence(prompt, reply)))
        assert not missing_rows(reply.routed_experts).any()


def test_routes_outside_the_windows_of_all_layers_are_missing() -> None:
    decoder = make_decoder(MIXTURE.replace(windows=(16,) * MIXTURE.num_layers))
    # This runner writes padding into the null block.
    engine = recording_engine(decoder, slots=2, runner=TorchRunner)
    (prompt,) = prompts(1, 70)
    ((reply,),) = engine.sample([prompt], 1, PARAMS)
    assert reply.routed_experts is not None
    expected, missing = expected_routes(decoder, sequence(prompt, reply)), missing_rows(reply.routed_experts)
    assert missing[:48].all() and not missing[-16:].any()
    np.testing.assert_array_equal(reply.routed_experts[~missing], expected[~missing])


@pytest.mark.parametrize("recompute", [False, True])
def test_routes_after_a_weight_update_in_flight(recompute: bool) -> None:
    """With recompute, all routes are those of the new weights. Without, the prompt's routes are missing."""
    decoder = make_decoder()
    engine = recording_engine(decoder, slots=2)
    (prompt,) = prompts(1)
    engine.add(Request(prompt.token_ids, PARAMS), stream=False)
    for _ in range(10):
        assert not engine.step()
    decoder.initialize(1)
    engine.update_weights(None, 1, recompute=recompute)
    while not (deltas := engine.step()):
        pass
    routes, tokens = deltas[0].routed_experts, [*prompt.token_ids, *deltas[0].token_ids]
    assert routes is not None
    if recompute:
        np.testing.assert_array_equal(routes, expected_routes(decoder, tokens))
    else:
        missing = missing_rows(routes)
        assert missing[: len(prompt.token_ids) - 1].all() and not missing[len(prompt.token_ids) - 1 :].any()


def test_completions_have_no_routes_without_record_routes() -> None:
    ((reply,),) = Engine(make_decoder(), slots=2).sample(prompts(1), 1, PARAMS)
    assert reply.routed_experts is None


def test_record_routes_rejects_dense_models() -> None:
    with pytest.raises(RequestError, match="no experts"):
        recording_engine(make_decoder(PRESETS["tiny"]), slots=2)
