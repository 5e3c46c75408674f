"""Continuous batching: samples do not depend on other requests, preemption, caching or chunking."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.errors import RequestError
from perilune.models import kernels
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.rope import Rope
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import max_blocks_touched, window_blocks
from perilune.models.text.tokenizer import Tokenizer

exact = pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2, max_position_embeddings=512)
TOKENIZER = Tokenizer.characters()


def make(seed: int = 0) -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(seed)
    return decoder


DECODER = make()
Samples = dict[int, tuple[list[int], list[float]]]


def engine(**options: Any) -> Engine:
    return Engine(DECODER, **{"slots": 16, "cache_tokens": 4096, "tokenizer": TOKENIZER, **options})


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(98, size=length).tolist()  # type: ignore[no-any-return]


def finish(engine: Engine, *ids: int) -> list[Samples]:
    """Tokens and log-probs of every sample of each request, keyed by sample index."""
    pieces: dict[int, Samples] = {request_id: defaultdict(lambda: ([], [])) for request_id in ids}
    while engine.unfinished:
        for delta in engine.step():
            if delta.request_id in pieces:
                tokens, logprobs = pieces[delta.request_id][delta.sample]
                tokens += delta.token_ids
                logprobs += delta.logprobs
    return list(pieces.values())


def run_alone(request: Request) -> Samples:
    llm = engine()
    return finish(llm, llm.add(request))[0]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.2},
    {"min_p": 0.1, "stop_token_ids": (4, 5), "min_tokens": 6},
    {"repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
    {"stop": ("a",), "raw_logprobs": True, "top_logprobs": 3},
]
requests = st.builds(
    lambda shared, own, tokens, n, option, key: Request(
        prompt(shared) + prompt(own, seed=1 + own), SamplingParams(tokens, **OPTIONS[option]), (key, 0, 0), n
    ),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(6, 24),
    st.integers(1, 4),
    st.integers(0, len(OPTIONS) - 1),
    st.integers(0, 3),
)


@exact
@settings(max_examples=7, deadline=None)
@given(
    st.lists(requests, min_size=2, max_size=6),
    st.sampled_from([{}, {"cache_tokens": 160}, {"slots": 3}, {"slots": 2, "token_budget": 5}]),
    st.integers(0, 2),
)
def test_samples_do_not_depend_on_other_requests(
    asked: list[Request], room: dict[str, int], between: int
) -> None:
    crowded = engine(**room)
    ids = []
    undelivered: dict[int, Samples] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    for request in asked:
        ids.append(crowded.add(request))
        for _ in range(between):
            for delta in crowded.step():
                tokens, logprobs = undelivered[delta.request_id][delta.sample]
                tokens += delta.token_ids
                logprobs += delta.logprobs
    rest = finish(crowded, *ids)
    for request, request_id, later in zip(asked, ids, rest, strict=True):
        first = undelivered[request_id]
        whole = {
            sample: (
                first[sample][0] + later.get(sample, ([], []))[0],
                first[sample][1] + later.get(sample, ([], []))[1],
            )
            for sample in {*first, *later}
        }
        assert whole == run_alone(request)
    assert crowded.cache_use == 0
    assert not _has_request_state(crowded)


@exact
def test_preemption_does_not_change_samples() -> None:
    asked = [Request(prompt(20, seed), SamplingParams(50), (seed, 0, 0), 2) for seed in range(4)]
    crowded = engine(cache_tokens=256)
    found = finish(crowded, *(crowded.add(request) for request in asked))
    assert crowded.counters.preemptions > 0
    assert found == [run_alone(request) for request in asked]


@exact
def test_prefix_cache_hit_does_not_change_samples() -> None:
    request = Request(prompt(70), SamplingParams(20), (3, 0, 0), 3)
    llm = engine()
    first, *_ = finish(llm, llm.add(request))
    assert llm.counters.cached_tokens == 0
    again, *_ = finish(llm, llm.add(request))
    assert llm.counters.cached_tokens == 64
    assert again == first == run_alone(request)


@exact
@pytest.mark.parametrize("how", ["sample", "in pieces", "whole"])
def test_prefix_cache_finds_answers_of_earlier_turns(how: str) -> None:
    llm, first = engine(), Request(prompt(20), SamplingParams(30))
    if how == "sample":
        answer = llm.sample([Prompt(first.token_ids, first.key)], 1, first.params)[0][0].token_ids.tolist()
    else:
        (answer, _) = finish(llm, llm.add(first, stream=how == "in pieces"))[0][0]
    longer = Request(prompt(20) + answer + [5], SamplingParams(20), (1, 0, 0))
    deltas = list(llm.stream(longer))
    assert deltas[0].cached_tokens == 48
    assert [token for delta in deltas for token in delta.token_ids] == run_alone(longer)[0][0]


@exact
def test_penalties_count_tokens_sampled_before_a_resume() -> None:
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    tokens, logprobs = run_alone(Request(prompt(9), SamplingParams(20, **penalties)))[0]
    rest = Request(prompt(9) + tokens[:8], SamplingParams(12, **penalties), position=8)
    assert run_alone(rest)[0] == (tokens[8:], logprobs[8:])
    assert tokens != run_alone(Request(prompt(9), SamplingParams(20)))[0][0]


@exact
def test_chunked_prefill_does_not_change_samples_or_scores() -> None:
    request = Request(prompt(400), SamplingParams(8), n=2)
    whole, pieces = engine(slots=2), engine(slots=2, token_budget=7)
    expected, found = (finish(llm, llm.add(request))[0] for llm in (whole, pieces))
    assert pieces.counters.steps > 50 > whole.counters.steps
    assert found == expected
    scored = pieces.score([request.token_ids] * 2, [tokens for tokens, _ in found.values()])
    assert [again.tolist() for again in scored] == [logprobs for _, logprobs in found.values()]


@exact
@pytest.mark.parametrize("swapped_at", [1, 7, 19])
def test_weight_update_in_flight_equals_resuming_with_new_weights(swapped_at: int) -> None:
    decoder = make(1)
    engine = Engine(decoder, slots=4, cache_tokens=1024)
    request = Request(prompt(21), SamplingParams(20), (5, 6, 7), 2)
    request_id = engine.add(request)
    before: Samples = defaultdict(lambda: ([], []))
    for _ in range(swapped_at):
        for delta in engine.step():
            before[delta.sample][0].extend(delta.token_ids)
    engine.update_weights(DECODER.state_dict(), 1)
    after = finish(engine, request_id)[0]
    for sample in range(2):
        tokens = before[sample][0]
        anew = Request(
            request.token_ids + tokens,
            SamplingParams(20 - swapped_at),
            request.key,
            position=swapped_at,
            first_sample=sample,
        )
        assert after[sample] == run_alone(anew)[0]


def test_weight_update_without_recompute_feeds_no_prompt_again() -> None:
    decoder = make(1)
    engine = Engine(decoder, slots=4, cache_tokens=1024)
    engine.add(Request(prompt(40), SamplingParams(8), n=2))
    for _ in range(3):
        engine.step()
    fed = engine.counters.prompt_tokens
    engine.update_weights(DECODER.state_dict(), 4, recompute=False)
    versions = [version for delta in engine.step() for version in delta.policy_version]
    assert versions == [4, 4]
    assert engine.counters.prompt_tokens == fed
    while engine.unfinished:
        engine.step()
    engine.add(Request(prompt(40), SamplingParams(2)))
    engine.step()
    assert engine.counters.cached_tokens == 0  # blocks of the old weights are not reused


def test_abort_frees_all_blocks_of_a_request() -> None:
    llm = engine(slots=4)
    ids = [llm.add(Request(prompt(30, seed), SamplingParams(40), n=3)) for seed in range(3)]
    for _ in range(5):
        llm.step()
    partial = llm.abort(ids[0])
    assert [len(sample.token_ids) for sample in partial] == [5, 5, 5]
    assert {sample.finish_reason for sample in partial} == {"aborted"}
    assert llm.abort(ids[0]) == llm.abort(99) == []
    for request_id in ids[1:]:
        llm.abort(request_id)
    assert (llm.running, llm.waiting, llm.cache_use, llm.unfinished) == (0, 0, 0, False)
    assert llm.step() == []
    assert not _has_request_state(llm)


def test_closing_a_stream_aborts_only_its_request() -> None:
    llm = engine()
    other = llm.add(Request(prompt(10), SamplingParams(6), (1, 0, 0)))
    for delta in llm.stream(Request(prompt(8), SamplingParams(30))):
        assert delta.request_id != other
        break
    assert llm.running == 1
    assert finish(llm, other) == [run_alone(Request(prompt(10), SamplingParams(6), (1, 0, 0)))]


def test_unstreamed_request_returns_whole_samples() -> None:
    request = Request(prompt(10), SamplingParams(12, stop_token_ids=tuple(range(30))), n=4)
    llm = engine()
    llm.add(request, stream=False)
    deltas: list[Delta] = []
    while llm.unfinished:
        deltas += llm.step()
    assert len(deltas) == 4
    assert {delta.sample: (delta.token_ids, delta.logprobs) for delta in deltas} == run_alone(request)
    for delta in deltas:
        assert delta.finish_reason in {"stop", "length"}
        tokens = delta.token_ids[: len(delta.token_ids) - (delta.finish_reason == "stop")]
        assert delta.text == TOKENIZER.decode(tokens)


def test_sample_works_while_requests_are_in_flight() -> None:
    from perilune.engine.request import Prompt

    llm = engine()
    request = Request(prompt(10), SamplingParams(20), (1, 0, 0))
    request_id = llm.add(request)
    groups = llm.sample([Prompt(prompt(5), (0, 0, 0))], 2, SamplingParams(5))
    assert [len(sample.token_ids) for sample in groups[0]] == [5, 5]
    assert finish(llm, request_id) == [run_alone(request)]


def test_deltas_have_raw_logprobs_and_top_logprobs() -> None:
    params = SamplingParams(10, temperature=0.5, top_k=4, raw_logprobs=True, top_logprobs=2)
    llm = engine()
    request = Request(prompt(10), params)
    tokens, logprobs, raw = [], [], []
    for delta in llm.stream(request):
        tokens += delta.token_ids
        logprobs += delta.logprobs
        assert delta.raw_logprobs is not None
        assert delta.top_logprobs is not None
        raw += delta.raw_logprobs
        for best, token, logprob in zip(delta.top_logprobs, delta.token_ids, delta.logprobs, strict=True):
            assert len(best) == 2
            assert best[0][1] >= best[1][1]
            assert best[0][1] >= logprob - 1e-5
            assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    (scored,) = llm.score([request.token_ids], [tokens])
    np.testing.assert_allclose(raw, scored, atol=1e-6)
    assert all(
        a > b for a, b in zip(logprobs, raw, strict=True)
    )  # with top_k 4, the probability is divided among four tokens


def test_engine_works_after_weights_with_nan_are_replaced() -> None:
    decoder = make()
    engine = Engine(decoder, slots=4, cache_tokens=1024)
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    engine.add(Request(prompt(40), SamplingParams(8), n=3))
    engine.step()
    with torch.no_grad():
        decoder.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    engine.update_weights(None, 1)
    (delta,) = engine.step()
    assert (delta.finish_reason, "not finite" in str(delta.failure)) == ("aborted", True)
    assert (engine.running, engine.cache_use, engine.unfinished) == (0, 0, False)
    engine.update_weights(state, 2)
    request = Request(prompt(30), SamplingParams(8))
    assert finish(engine, engine.add(request)) == [run_alone(request)]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1], SamplingParams(3, stop=("x",))), "stop texts need a tokenizer"),
        (Request([1] * 60, SamplingParams(9)), "exceed the cache's 64"),
        (Request([1], SamplingParams(3), adapter="poet"), "no adapter 'poet'"),
        (Request([1], SamplingParams(3, logit_bias={98: 1.0})), "logit_bias names token 98"),
        (Request([1], SamplingParams(3), first_sample=2**32), "key"),
    ],
)
def test_add_rejects_impossible_requests(request_: Request, message: str) -> None:
    engine = Engine(DECODER, slots=2, cache_tokens=64)
    with pytest.raises(RequestError, match=message):
        engine.add(request_)
    assert not engine.unfinished


def test_completion_has_raw_logprobs_and_top_logprobs() -> None:
    from perilune.engine.request import Prompt

    params = SamplingParams(6, raw_logprobs=True, top_logprobs=1)
    (group,) = engine().sample([Prompt(prompt(5), (0, 0, 0))], 2, params)
    for completion in group:
        assert isinstance(completion, Completion)
        assert completion.raw_logprobs is not None
        np.testing.assert_allclose(completion.raw_logprobs, completion.logprobs, atol=1e-6)
        assert completion.top_logprobs is not None
        assert len(completion.top_logprobs) == 6


WINDOWS = {
    "mistral": CONFIG.replace(architecture="mistral", windows=(40, 40)),
    "gemma3_text": CONFIG.replace(
        architecture="gemma3_text", windows=(40, None, 40), num_layers=3, local_rope=Rope(10.0)
    ),
}


@exact
@pytest.mark.parametrize("runner", [fastest_runner, TorchRunner])
@pytest.mark.parametrize("config", WINDOWS.values(), ids=WINDOWS)
def test_sliding_window_caching_does_not_change_samples_or_scores(config: DecoderConfig, runner: Any) -> None:
    """Sequences of five windows: prefix hits, sharing, preemption, chunked prefill and scoring."""
    decoder = Decoder(config)
    decoder.initialize(0)

    def sampled(one: Engine) -> list[Samples]:
        asked = [Request(prompt(130, seed), SamplingParams(60), (seed, 0, 0), 2) for seed in range(2)]
        return finish(one, *(one.add(request) for request in asked))

    def made(**options: Any) -> Engine:
        return Engine(decoder, runner=runner, **{"slots": 8, "cache_tokens": 4096, **options})

    roomy, crowded = made(), made(cache_tokens=224, token_budget=48)
    expected = sampled(roomy)
    assert sampled(crowded) == expected
    assert (
        crowded.counters.preemptions > 0 or config.architecture == "mistral"
    )  # mistral fits without preemption
    cached = roomy.counters.cached_tokens
    assert sampled(roomy) == expected
    assert roomy.counters.cached_tokens - cached == 2 * 128
    for seed, samples in enumerate(expected):
        answers = [tokens for tokens, _ in samples.values()]
        for scoring in (roomy, made(cache_tokens=208, token_budget=48, score_tokens=64, slots=1)):
            scored = scoring.score([prompt(130, seed)] * 2, answers)
            assert [scores.tolist() for scores in scored] == [logprobs for _, logprobs in samples.values()]
        for tokens, logprobs in samples.values():
            assert learner_logprobs(decoder, prompt(130, seed), tokens) == logprobs


def learner_logprobs(decoder: Decoder, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probs as the learner computes them, without a cache."""
    tokens = torch.tensor(prompt + answer)
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])))
        logits = decoder.logits(hidden[len(prompt) - 1 : -1])
        return token_logprobs(logits, torch.tensor(answer))[0].tolist()  # type: ignore[no-any-return]


@exact
def test_score_computes_logits_of_long_answers_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [prompt(40), prompt(5, 1), prompt(9, 2)], [prompt(100, 3), prompt(7, 4), []]
    expected = engine().score(*asked)
    monkeypatch.setattr("perilune.engine.engine.MAX_LOGITS", CONFIG.vocab_size * 12)
    llm = engine()
    run, rows = llm._runner.run, []
    monkeypatch.setattr(llm._runner, "run", lambda batch: rows.append(len(batch.logit_rows)) or run(batch))
    assert [scores.tolist() for scores in llm.score(*asked)] == [scores.tolist() for scores in expected]
    assert max(rows) <= 12
    assert sum(rows) == 107
    assert llm.cache_use == 0


def test_score_rejects_tokens_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="outside"):
        engine().score([[1]], [[2, CONFIG.vocab_size]])


def test_sliding_window_bounds_the_blocks_in_use() -> None:
    decoder = Decoder(WINDOWS["gemma3_text"])
    decoder.initialize(0)
    engine = Engine(decoder, slots=4, cache_tokens=4096)
    engine.add(Request(prompt(130), SamplingParams(350), n=4))
    used = []
    while engine.unfinished:
        engine.step()
        used.append([pool.num_used for pool in engine._pools.pools])
    whole, of_window = np.array(used)[1:].max(axis=0)  # without the first step, which feeds the whole prompt
    assert of_window <= 4 * max_blocks_touched(40)
    assert whole >= 4 * (480 - 130) // 16
    assert engine._runner.cache.keys[0].shape[0] == window_blocks(40, 257, slots=4) < 257 + 40


@exact
def test_bfloat16_cache_rounds_samples_and_scores_equally() -> None:
    def half(decoder: Decoder, num_blocks: tuple[int, ...]) -> TorchRunner:
        return TorchRunner(decoder, num_blocks, torch.bfloat16)

    asked = [Request(prompt(30, seed), SamplingParams(30), (seed, 0, 0), 2) for seed in range(3)]
    roomy, crowded = engine(runner=half), engine(runner=half, cache_tokens=192, token_budget=40)
    expected = finish(roomy, *(roomy.add(request) for request in asked))
    assert finish(crowded, *(crowded.add(request) for request in asked)) == expected
    assert crowded.counters.preemptions > 0
    for request, samples in zip(asked, expected, strict=True):
        tokens = [tokens for tokens, _ in samples.values()]
        scored = roomy.score([request.token_ids] * 2, tokens)
        whole = engine().score([request.token_ids] * 2, tokens)
        for (_, logprobs), rounded, exactly in zip(samples.values(), scored, whole, strict=True):
            assert rounded.tolist() == logprobs
            assert 0 < np.abs(rounded - exactly).max() < 0.05


def _has_request_state(engine: Engine) -> bool:
    """Whether the engine keeps any state of finished requests."""
    kept = vars(engine._outputs)
    return any(kept[name] for name in ("entries", "_streams", "_tracked", "_collections"))
