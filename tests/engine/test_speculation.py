"""Speculative decoding gives bitwise equal samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.decode_step import GatheredAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Delta, Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.speculation import SpeculationSettings, find_continuation
from perilune.errors import RequestError
from perilune.models import kernels
from perilune.models.adapters.files import Adapter
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.config.rope import Rope
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

exact = pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
TOKENIZER = Tokenizer.characters()
# Confident enough to repeat itself at a low temperature.
CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2, max_position_embeddings=512)


def make(seed: int = 0, **changes: Any) -> Decoder:
    decoder = Decoder(CONFIG.replace(**changes))
    decoder.initialize(seed)
    return decoder


DECODER, OTHER = make(), make(1)
ALWAYS = SpeculationSettings(match=1, adaptive=False)
INT8 = SpeculationSettings("draft", tokens=4, adaptive=False)


def engine(
    speculation: SpeculationSettings | None = ALWAYS, decoder: Decoder = DECODER, **options: Any
) -> Engine:
    engine = Engine(decoder, **{"slots": 8, "cache_tokens": 2048, "tokenizer": TOKENIZER, **options})
    if speculation is not None:
        engine.speculate(speculation)
    return engine


def repeating(seed: int, length: int) -> list[int]:
    """A prompt that repeats pieces of itself."""
    rng = np.random.default_rng(seed)
    piece = rng.integers(98, size=12)
    tokens = [token for _ in range(1 + length // 8) for token in piece[rng.integers(6) :][:8].tolist()]
    return tokens[:length]


def finish(
    engine: Engine, requests: list[Request], between: int = 0, *, stream: bool = True
) -> dict[tuple[int, int], list[Delta]]:
    """The deltas of every sample; the requests arrive `between` steps apart."""
    samples: dict[tuple[int, int], list[Delta]] = {}
    numbers: dict[int, int] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.unfinished:
        if waiting:
            number, request = waiting.pop(0)
            numbers[engine.add(request, stream=stream)] = number
        for _ in range(between if waiting else 1):
            for delta in engine.step():
                number = numbers.get(delta.request_id, 0)
                samples.setdefault((number, delta.sample), []).append(delta)
    return samples


def facts(deltas: list[Delta]) -> list[Any]:
    return [
        (
            (d.token_ids, d.logprobs, d.policy_version, d.text, d.finish_reason, d.raw_logprobs),
            (d.top_logprobs, None if d.routed_experts is None else d.routed_experts.tolist()),
        )
        for d in deltas
    ]


def same(found: dict[Any, list[Delta]], expected: dict[Any, list[Delta]]) -> bool:
    return {key: facts(of) for key, of in found.items()} == {key: facts(of) for key, of in expected.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.5, "temperature": 0.5},
    {"min_p": 0.2, "stop_token_ids": (4, 5), "min_tokens": 6},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1, "temperature": 0.2},
    {"stop": ("a", "bc"), "raw_logprobs": True, "top_logprobs": 3, "temperature": 0.4},
]
requests = st.builds(
    lambda seed, length, tokens, n, option, key: Request(
        repeating(seed, length), SamplingParams(tokens, **OPTIONS[option]), (key, 0, 0), n
    ),
    st.integers(0, 3),
    st.integers(1, 60),
    st.integers(6, 32),
    st.integers(1, 3),
    st.integers(0, len(OPTIONS) - 1),
    st.integers(0, 3),
)


class Oracle:
    """A proposer that drafts the tokens of earlier samples, with every fourth token wrong."""

    cost = 0.0

    def __init__(self, engine: Engine, known: dict[tuple[int, int], list[Delta]]) -> None:
        self._sequences, self._known, self._first = engine._sequences, known, engine._next_id

    def propose(self, rows: Any, most: Any) -> list[Any]:
        return [self._draft(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, row: int, count: int) -> Any:
        sequences = self._sequences
        number = sequences.entries[row].id - self._first  # type: ignore[union-attr]
        deltas = self._known[number, int(sequences.sample[row])]
        drawn = sequences.length[row] - sequences.prompt_length[row]
        tokens = [token for delta in deltas for token in delta.token_ids]
        drafted = np.array(tokens[drawn : drawn + count], dtype=np.int64)
        wrong = (np.arange(drawn, drawn + len(drafted)) * 2654435761 >> 7) % 4 == 0
        return np.where(wrong, (drafted + 1) % sequences.vocab_size, drafted)


def check(
    slow: Engine, fast: Engine, asked: list[Request], between: int = 0, *, stream: bool = True
) -> dict[tuple[int, int], list[Delta]]:
    """Assert that mostly right drafts do not change samples; return the deltas."""
    expected = finish(slow, asked, between, stream=stream)
    fast.speculate(ALWAYS)
    fast._scheduler.speculation._proposer = Oracle(fast, expected)  # type: ignore[union-attr]
    assert same(finish(fast, asked, between, stream=stream), expected)
    return expected


@exact
@settings(max_examples=6, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=5),
    st.sampled_from([{}, {"cache_tokens": 160}, {"slots": 2, "token_budget": 5}]),
    st.integers(1, 3),
)
def test_samples_do_not_depend_on_proposed_tokens(
    asked: list[Request], room: dict[str, int], between: int
) -> None:
    plain = check(engine(None, **room), engine(None, **room), asked, between)
    for speculation in (ALWAYS, INT8, SpeculationSettings("draft", draft=OTHER, adaptive=False)):
        assert same(finish(engine(speculation, **room), asked, between), plain)


MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 3, 48, dense_layers=(1,)))
GEMMA = CONFIG.replace(
    architecture="gemma3_text", windows=(40, None, 40), num_layers=3, local_rope=Rope(10.0)
)
BACKENDS: dict[str, tuple[DecoderConfig, Any]] = {
    "int8 weights and cache": (CONFIG, partial(NativeRunner, weights="int8", cache="int8")),
    "bfloat16": (CONFIG, partial(NativeRunner, weights="bfloat16")),
    "torch": (CONFIG, TorchRunner),
    "windows": (GEMMA, NativeRunner),
    "windows in torch": (GEMMA, TorchRunner),
    "experts": (MIXTURE, NativeRunner),
}


@exact
@pytest.mark.parametrize("name", BACKENDS)
def test_speculation_is_exact_with_every_runner_and_cache(name: str) -> None:
    """Covers prefix hits, forks, preemption and recorded routes."""
    config, runner = BACKENDS[name]
    decoder = Decoder(config)
    decoder.initialize(0)
    slow, fast, drafted = (engine(None, decoder, cache_tokens=448, runner=runner) for _ in range(3))
    if config.experts is not None:
        for llm in (slow, fast, drafted):
            llm.record_routes()
    shared = repeating(0, 100)
    asked = [
        Request(shared + repeating(seed, 20 * seed), SamplingParams(40, 0.5), (seed, 0, 0), 3)
        for seed in range(3)
    ]
    expected = check(slow, fast, asked, stream=False)
    if runner is not TorchRunner:
        drafted.speculate(INT8)
        assert same(finish(drafted, asked, stream=False), expected)
    again = check(slow, fast, asked[:1])
    assert fast.counters.cached_tokens > 0
    assert max(slow.counters.preemptions, fast.counters.preemptions) > 0
    assert again[0, 0][0].cached_tokens >= 96


@exact
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("speculation", [INT8, replace(INT8, draft=OTHER)])
def test_speculation_is_exact_across_weight_updates(
    speculation: SpeculationSettings, recompute: bool
) -> None:
    request = Request(repeating(0, 30), SamplingParams(30, 0.3))
    fast, slow = (engine(of, make()) for of in (speculation, None))
    fast.add(request)
    before = [delta for _ in range(4) for delta in fast.step()]
    slow.add(request)
    for _ in before:
        slow.step()
    for llm in (fast, slow):
        llm.update_weights(make(1).state_dict(), 7, recompute=recompute)
    accepted = fast.counters.accepted_tokens
    assert facts(finish(fast, [])[0, 0]) == facts(finish(slow, [])[0, 0])
    assert fast.counters.accepted_tokens > accepted or not recompute


@exact
def test_speculation_is_exact_with_adapters() -> None:
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.down_proj"
    out, inner = DECODER.get_submodule(name).weight.shape
    pair = torch.randn(4, inner, generator=generator), torch.randn(out, 4, generator=generator)
    slow, fast = engine(None), engine(None)
    for llm in (slow, fast):
        llm.add_adapter("poet", Adapter({name: pair}, 0.5))
    asked = [Request(repeating(0, 30), SamplingParams(20, 0.5), n=2, adapter=of) for of in (None, "poet")]
    found = check(slow, fast, asked)
    assert facts(found[0, 0]) != facts(found[1, 0])
    drafted = engine(INT8)
    drafted.add_adapter("poet", Adapter({name: pair}, 0.5))
    assert same(finish(drafted, asked), found)


@exact
def test_speculation_is_exact_with_constraints_and_resumed_samples() -> None:
    pytest.importorskip("llguidance")
    from perilune.engine.constraints import Constraints

    constraint = Constraints(TOKENIZER, CONFIG.vocab_size, (1,)).regex("(ab|[0-9]+,)*")
    asked = [
        Request([5, 6], SamplingParams(24, 0.7, stop_token_ids=(1,)), n=2, constraint=constraint),
        Request([5, 6, 7, 8], SamplingParams(9, stop=("b",)), position=2, first_sample=3),
    ]
    check(engine(None), engine(None), asked)


@exact
def test_draft_model_with_equal_weights_is_always_accepted() -> None:
    """Requires every token of prompts, forks, preempted samples and later turns in the draft's cache."""
    llm = engine(SpeculationSettings("draft", tokens=3, draft=DECODER, adaptive=False), cache_tokens=448)
    for turn in range(2):
        asked = [
            Request(repeating(seed, 50 + 30 * turn), SamplingParams(75), (seed, 0, 0), 2) for seed in range(3)
        ]
        finish(llm, asked)
    assert llm.counters.preemptions > 0
    assert llm.counters.accepted_tokens == llm.counters.proposed_tokens > 200


@exact
def test_speculation_continues_after_sleep_and_wake_up() -> None:
    request = Request(repeating(0, 30), SamplingParams(30), n=2)
    llm = engine(INT8)
    llm.add(request)
    for _ in range(3):
        llm.step()
    llm.sleep()
    llm.wake_up()
    before = llm.counters.accepted_tokens
    finish(llm, [])
    assert llm.counters.accepted_tokens - before > 20
    assert same(finish(llm, [request]), finish(engine(None), [request]))


@exact
def test_adaptive_speculation_stops_only_when_drafts_are_rejected() -> None:
    llm = engine(SpeculationSettings("draft", draft=OTHER))
    finish(llm, [Request(repeating(0, 30), SamplingParams(200))])
    assert llm.counters.proposed_tokens < 100
    llm = engine(SpeculationSettings("draft"))
    finish(llm, [Request(repeating(0, 30), SamplingParams(200, 0.3))])
    assert llm.counters.steps < 120
    assert llm.counters.sampled_tokens == 200
    alone = llm.counters.proposed_tokens
    finish(llm, [Request(repeating(0, 30), SamplingParams(25, 0.3), n=8)])
    assert llm.counters.proposed_tokens - alone < alone


def test_look_up_takes_the_longest_match_then_the_latest() -> None:
    text = np.array([1, 2, 3, 9, 2, 3, 8, 7, 3, 6, 1, 2, 3], dtype=np.int32)
    assert find_continuation(text, 3, 2).tolist() == [9, 2, 3]
    assert find_continuation(text[4:], 2, 2).tolist() == [8, 7]
    assert find_continuation(text[:9], 2, 1).tolist() == [8, 7]
    assert find_continuation(text[:9], 2, 2).tolist() == []
    assert find_continuation(np.array([4, 5, 6, 5, 6], dtype=np.int32), 5, 2).tolist() == [5, 6, 5, 6, 5]
    assert find_continuation(np.array([5], dtype=np.int32), 5, 1).tolist() == []


def test_draft_token_with_nan_logits_does_not_change_samples() -> None:
    """A token whose embedding is NaN is proposed but never sampled."""
    asked = [Request([5, 6, 7], SamplingParams(20, logit_bias={9: -100.0}), n=2)]
    decoder = make(tie_word_embeddings=False)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[9] = torch.nan
    llm = engine(ALWAYS, decoder)
    expected = finish(engine(None, decoder), asked)
    oracle = Oracle(llm, expected)
    llm._scheduler.speculation._proposer = oracle  # type: ignore[union-attr]
    right = oracle._draft
    oracle._draft = lambda row, count: np.append(right(row, count)[: count - 1], 9)  # type: ignore[method-assign]
    assert same(finish(llm, asked), expected)
    assert not any(delta.failure for deltas in expected.values() for delta in deltas)
    assert llm.counters.proposed_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 17}, "tokens is 17"),
        ({"match": 0}, "match is 0"),
        ({"draft": DECODER}, "lookup uses no draft"),
        ({"method": "draft", "draft": make(vocab_size=64)}, "98 tokens, the draft one of 64"),
        ({"method": "draft", "draft": make(max_position_embeddings=64)}, "has 64 positions, the engine 512"),
    ],
)
def test_speculate_rejects_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine(SpeculationSettings(**options))


def test_speculate_rejects_runners_that_are_not_exact() -> None:
    graphs = partial(GraphRunner, attention=GatheredAttention)
    with pytest.raises(RequestError, match="with GraphRunner, the logits of a token depend"):
        engine(ALWAYS, runner=graphs)
    with pytest.raises(RequestError, match="TorchRunner cannot draft with int8"):
        engine(INT8, runner=TorchRunner)


def test_refused_speculation_leaves_the_engine_as_it_was() -> None:
    llm = Engine(DECODER, slots=2, cache_tokens=512, runner=TorchRunner)
    with pytest.raises(RequestError, match="cannot draft"):
        llm.speculate(INT8)
    llm.sleep()
    llm.wake_up()
    assert finish(llm, [Request([5], SamplingParams(2))])
