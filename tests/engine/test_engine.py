"""The engine: sampling, independence from the batch, and exact agreement with scoring and the learner."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.step import StepBatch
from perilune.errors import RequestError, WorkFailedError
from perilune.models import kernels
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.logprobs import log_distribution, token_logprobs

exact = pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
STOP = (1, 2, 3)


def make(**changes: Any) -> Decoder:
    decoder = Decoder(PRESETS["tiny"].replace(**{"initializer_range": 0.15, **changes}))
    decoder.initialize(0)
    return decoder


DECODER = make()


def prompts(lengths: Sequence[int], seed: int = 0, step: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(98, size=n).tolist(), (seed, step, i)) for i, n in enumerate(lengths)]


def flat(groups: list[list[Completion]]) -> list[tuple[list[int], list[float], str]]:
    return [
        (completion.token_ids.tolist(), completion.logprobs.tolist(), completion.finish_reason)
        for group in groups
        for completion in group
    ]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_sample_returns_expected_shapes_dtypes_and_finish_reasons() -> None:
    params = SamplingParams(max_tokens=20, stop_token_ids=STOP)
    groups = Engine(DECODER).sample(prompts([3, 9, 1, 5]), 6, params)
    assert [len(group) for group in groups] == [6] * 4
    reasons = set()
    for completion in (completion for group in groups for completion in group):
        length = len(completion.token_ids)
        assert 1 <= length <= 20
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert completion.policy_version.tolist() == [0] * length
        assert not np.isin(completion.token_ids[:-1], STOP).any()
        stopped = int(completion.token_ids[-1]) in STOP
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or length == 20
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    assert len({tuple(completion.token_ids) for completion in groups[0]}) > 1


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 110}, {"temperature": 0.0, "min_p": 0.01}], ids=str)
def test_limit_tokens_excludes_padding_rows_of_the_embedding(more: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 9.0} | more)
    asked = prompts([3, 9])
    assert {int(t) for group in Engine(DECODER).sample(asked, 20, SamplingParams(12, 9.0)) for sample in group
            for t in sample.token_ids} & set(range(50, 98))  # fmt: skip
    engine = Engine(DECODER)
    engine.limit_tokens(50)
    groups = engine.sample(asked, 20, params)
    for prompt, (completion, *_) in zip(asked, groups, strict=True):
        ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
        hidden = DECODER(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        logits = DECODER.logits(hidden[-13:-1])[:, :50]
        expected = log_distribution(logits, params.temperature)[torch.arange(12), ids[-12:]]
        assert completion.logprobs == pytest.approx(expected.detach().numpy(), abs=1e-5) or "min_p" in more
    assert all(completion.token_ids.max() < 50 for group in groups for completion in group)
    likely = [token for group in groups for c in group for row in c.top_logprobs or () for token, _ in row]
    assert set(likely) <= set(range(50)) and bool(likely) == ("top_logprobs" in more)


def test_sample_with_no_prompts_or_no_samples() -> None:
    params = SamplingParams(max_tokens=3)
    assert Engine(DECODER).sample([], 4, params) == []
    assert Engine(DECODER).sample(prompts([3]), 0, params) == [[]]


@torch.no_grad()
def sample_without_cache(prompt: Prompt, sample: int, params: SamplingParams) -> list[int]:
    """Sample tokens with one forward pass over the whole sequence per token, without a cache."""
    from perilune.engine.random import uniforms
    from perilune.engine.sampler import draw

    tokens = list(prompt.token_ids)
    for position in range(params.max_tokens):
        ids = torch.tensor(tokens)
        hidden = DECODER(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        logprobs = log_distribution(DECODER.logits(hidden[-1:]), params.temperature)
        key = np.array([[*prompt.key, sample]], dtype=np.uint64)
        uniform = torch.from_numpy(uniforms(key, np.array([[position]])))[:, 0]
        token = int(logprobs.argmax()) if params.temperature == 0 else int(draw(logprobs, uniform))
        tokens.append(token)
        if token in params.stop_token_ids:
            break
    return tokens[len(prompt.token_ids) :]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_equal_those_of_a_loop_without_cache(temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, stop_token_ids=STOP)
    asked = prompts([4, 11], seed=2**63, step=5)
    groups = Engine(DECODER).sample(asked, 3, params)
    for prompt, group in zip(asked, groups, strict=True):
        for sample, completion in enumerate(group):
            assert completion.token_ids.tolist() == sample_without_cache(prompt, sample, params)


@exact
@settings(max_examples=5, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    n=st.integers(1, 5),
    slots=st.integers(1, 40),
    max_tokens=st.integers(1, 80),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
)
def test_samples_do_not_depend_on_the_batch(
    lengths: list[int], n: int, slots: int, max_tokens: int, temperature: float
) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_token_ids=STOP)
    asked = prompts(lengths)
    together = Engine(DECODER).sample(asked, n, params)
    assert flat(Engine(DECODER, slots=slots).sample(asked, n, params)) == flat(together)
    alone = [Engine(DECODER).sample([prompt], n, params)[0] for prompt in asked]
    assert flat(alone) == flat(together)
    fewer = [group[:1] for group in together]
    assert flat(Engine(DECODER).sample(asked, 1, params)) == flat(fewer)


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "one key head": {"num_kv_heads": 1},
    "llama, grouped": {"architecture": "llama", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "biased, untied": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "wide": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_layers": 2,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 64,
        "vocab_size": 1000,
        "initializer_range": 0.04,
    },
}


@exact
@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.thorough), 0.8])
@pytest.mark.parametrize("model", MODELS)
def test_logprobs_are_bitwise_equal_to_the_learners(model: str, temperature: float) -> None:
    decoder = make(**MODELS[model])
    params = SamplingParams(max_tokens=64, temperature=temperature, stop_token_ids=STOP)
    asked = prompts([2, 30, 7])
    groups = Engine(decoder, slots=8).sample(asked, 4, params)
    samples = [(p, completion) for p, group in zip(asked, groups, strict=True) for completion in group]
    scored = Engine(decoder).score(
        [p.token_ids for p, _ in samples], [completion.token_ids for _, completion in samples], temperature
    )
    for (_, completion), again in zip(samples, scored, strict=True):
        assert np.array_equal(completion.logprobs, again)
    # As the learner computes them: prompts and completions packed, the prompt shared, with gradients.
    ids = [torch.tensor(p.token_ids) for p in asked] + [
        torch.from_numpy(o.token_ids).long() for _, o in samples
    ]
    cu_seqlens = torch.tensor([0, *map(len, ids)]).cumsum(0)
    prefix_of = torch.tensor([-1] * 3 + [i for i in range(3) for _ in range(4)])
    starts = [len(asked[i].token_ids) if i >= 0 else 0 for i in prefix_of.tolist()]
    positions = torch.cat([torch.arange(len(x)) + start for x, start in zip(ids, starts, strict=True)])
    hidden = decoder(torch.cat(ids), positions, PackedAttention(cu_seqlens, prefix_of))
    assert hidden.requires_grad
    for index, (_, completion) in enumerate(samples):
        begin, length = int(cu_seqlens[3 + index]), len(completion.token_ids)
        last = int(cu_seqlens[int(prefix_of[3 + index]) + 1]) - 1
        rows = torch.tensor([last, *range(begin, begin + length - 1)])
        logprobs, _ = token_logprobs(decoder.logits(hidden[rows]), ids[3 + index], temperature)
        assert np.array_equal(logprobs.detach().numpy(), completion.logprobs)


@exact
@pytest.mark.usefixtures("two_threads")
def test_logprobs_do_not_depend_on_the_number_of_threads() -> None:
    asked, params = prompts([2, 30, 7]), SamplingParams(max_tokens=20)
    groups = Engine(DECODER).sample(asked, 4, params)
    torch.set_num_threads(1)
    assert flat(Engine(DECODER).sample(asked, 4, params)) == flat(groups)


@exact
def test_sampled_and_scored_logprobs_of_long_contexts_are_equal() -> None:
    decoder = make(num_layers=1)
    asked = prompts([180, 700])
    groups = Engine(decoder).sample(asked, 2, SamplingParams(max_tokens=40))
    for prompt, group in zip(asked, groups, strict=True):
        for completion in group:
            (scored,) = Engine(decoder).score([prompt.token_ids], [completion.token_ids])
            assert np.array_equal(completion.logprobs, scored)


def test_bfloat16_logprobs_agree_with_scores_within_rounding() -> None:
    decoder = make().to(torch.bfloat16)
    asked = prompts([5, 8])
    groups = Engine(decoder).sample(asked, 4, SamplingParams(max_tokens=20))
    for prompt, group in zip(asked, groups, strict=True):
        scored = Engine(decoder).score([prompt.token_ids] * 4, [completion.token_ids for completion in group])
        for completion, again in zip(group, scored, strict=True):
            np.testing.assert_allclose(completion.logprobs, again, atol=0.15)


def test_score_does_not_depend_on_the_batch_size() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(98, size=p).tolist(), rng.integers(98, size=t).tolist())
             for p, t in [(3, 5), (1, 1), (9, 0), (4, 30), (2, 2)]]  # fmt: skip
    asked, answers = [p for p, _ in pairs], [t for _, t in pairs]
    whole = Engine(DECODER).score(asked, answers)
    small = Engine(DECODER, score_tokens=10).score(asked, answers)
    assert [len(x) for x in whole] == [5, 1, 0, 30, 2]
    for a, b in zip(whole, small, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert Engine(DECODER).score([], []) == []
    with pytest.raises(RequestError, match="no tokens"):
        Engine(DECODER).score([[]], [[1]])


def test_prompt_logprobs_returns_the_top_tokens_of_each_position() -> None:
    texts = [prompt.token_ids for prompt in prompts([40, 2, 9])]
    expected = Engine(DECODER).score([text[:1] for text in texts], [text[1:] for text in texts])
    for budget in (4096, 10):  # in one batch and in several batches
        pieces = Engine(DECODER, score_tokens=budget).prompt_logprobs(texts, top=3)
        results = [result for batch in pieces for result in batch]
        for text, scores, (logprobs, likely) in zip(texts, expected, results, strict=True):
            np.testing.assert_allclose(logprobs, scores, atol=1e-6)
            ids = torch.tensor(text)
            hidden = DECODER(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
            values, tokens = log_distribution(DECODER.logits(hidden[:-1]), 1.0).topk(3)
            assert [[token for token, _ in row] for row in likely] == tokens.tolist()
            np.testing.assert_allclose(
                [[logprob for _, logprob in row] for row in likely], values.detach(), atol=1e-5
            )


def test_engine_keeps_its_weights_until_update_weights() -> None:
    decoder = make()
    engine = Engine(decoder)
    params = SamplingParams(max_tokens=10)
    before = engine.sample(prompts([4]), 2, params)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.3)
    assert flat(engine.sample(prompts([4]), 2, params)) == flat(before)
    engine.update_weights(None, 3)
    after = engine.sample(prompts([4]), 2, params)
    assert flat(after) != flat(before)
    assert flat(after) == flat(Engine(decoder).sample(prompts([4]), 2, params))
    assert set(after[0][0].policy_version) == {3}
    engine.update_weights(make().state_dict(), 4)
    assert flat(engine.sample(prompts([4]), 2, params)) == flat(before)


def test_policy_version_of_each_token_follows_weight_updates_in_flight() -> None:
    decoder = make()
    engine = Engine(decoder)
    calls: list[tuple[int, int]] = []

    def progress(finished: int, total: int) -> None:
        calls.append((finished, total))
        if len(calls) == 4:
            with torch.no_grad():
                decoder.model.norm.weight.mul_(0.5)
            engine.update_weights(None, 1)

    groups = engine.sample(prompts([4, 4]), 2, SamplingParams(max_tokens=9), progress)
    assert all(sample.policy_version.tolist() == [0] * 4 + [1] * 5 for group in groups for sample in group)
    assert calls[0] == (0, 4)
    assert calls[-1] == (4, 4)


def test_group_larger_than_the_slots_gets_the_same_tokens() -> None:
    params = SamplingParams(max_tokens=12, stop_token_ids=STOP)
    few = Engine(DECODER, slots=3).sample(prompts([5]), 10, params)
    assert [x for x, _, _ in flat(few)] == [
        x for x, _, _ in flat(Engine(DECODER).sample(prompts([5]), 10, params))
    ]


def test_finished_samples_use_no_further_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    engine = Engine(DECODER, slots=16)
    run = engine._runner.run

    def count(batch: StepBatch) -> torch.Tensor:
        rows.append(batch.decodes)
        return run(batch)

    monkeypatch.setattr(engine._runner, "run", count)
    groups = engine.sample(prompts([4] * 8), 8, SamplingParams(50, stop_token_ids=STOP))
    sampled = sum(len(completion.token_ids) for group in groups for completion in group)
    assert sum(rows) == sampled - 64  # every token except the last of a sample is fed once
    assert len(rows) < 64 * 50 / 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt([], (0, 0, 0)), "prompt 1.*no tokens"),
        (Prompt([98], (0, 0, 0)), "outside the vocabulary, 0 to 97"),
        (Prompt([-1], (0, 0, 0)), "token is outside"),
        (Prompt([1], (-1, 0, 0)), "key"),
        (Prompt([1], (0, 2**32, 0)), "key"),
        (Prompt([1] * 4090, (0, 0, 0)), "exceed the model's 4096 positions"),
    ],
)
def test_sample_rejects_invalid_prompts(prompt: Prompt, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(DECODER).sample([Prompt([1], (0, 0, 0)), prompt], 1, SamplingParams(max_tokens=10))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_from_nan_weights_raises_work_failed_error(temperature: float) -> None:
    decoder = make()
    with torch.no_grad():
        decoder.model.norm.weight[0] = torch.nan
    with pytest.raises(WorkFailedError, match="not finite"):
        Engine(decoder).sample(prompts([3]), 2, SamplingParams(max_tokens=4, temperature=temperature))


def test_failed_sample_call_leaves_no_state_in_the_engine() -> None:
    decoder = make()
    engine, params = Engine(decoder), SamplingParams(max_tokens=30)
    expected = flat(engine.sample(prompts([5, 20]), 3, params))
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    with torch.no_grad():
        decoder.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    engine.update_weights(None, 1)
    with pytest.raises(WorkFailedError):
        engine.sample(prompts([30, 30]), 3, params)
    engine.update_weights(state, 2)
    assert flat(engine.sample(prompts([5, 20]), 3, params)) == expected


def test_interrupted_sample_call_leaves_the_engine_usable() -> None:
    engine, params = Engine(DECODER), SamplingParams(max_tokens=30)

    def interrupt(finished: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.sample(prompts([5]), 3, params, interrupt)
    assert flat(engine.sample(prompts([5]), 3, params)) == flat(
        Engine(DECODER).sample(prompts([5]), 3, params)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sampled_and_scored_logprobs_agree_on_a_gpu() -> None:
    decoder = make().to("cuda")
    asked = prompts([5, 8])
    groups = Engine(decoder).sample(asked, 4, SamplingParams(max_tokens=20, stop_token_ids=STOP))
    for prompt, group in zip(asked, groups, strict=True):
        scored = Engine(decoder).score([prompt.token_ids] * 4, [completion.token_ids for completion in group])
        for completion, again in zip(group, scored, strict=True):
            np.testing.assert_allclose(completion.logprobs, again, atol=1e-3)
