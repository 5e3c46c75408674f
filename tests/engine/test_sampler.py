"""Sampling options against a plain definition in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine import sampler
from perilune.engine.request import Request, SamplingParams
from perilune.engine.sampler import DrawnTokens, Sampler
from perilune.engine.sequences import Entry, Sequences

V = 40
PROMPT = [3, 5, 3]


def drawn(logits: np.ndarray, params: list[SamplingParams], tokens: tuple[int, ...] = ()) -> DrawnTokens:  # type: ignore[type-arg]
    """One token for each sample, after the sampled tokens `tokens`."""
    sequences = Sequences(len(params), V)
    rows = np.arange(len(params))
    for row, its in enumerate(params):
        sequences.assign_row(
            row, Entry(row, Request(PROMPT, its, (row, 0, 0)), np.array(PROMPT, np.int32), 1), 0
        )
    for token in tokens:
        column = np.full(len(params), token)
        sequences.append(rows, column, np.zeros(len(params), dtype=np.float32), 0)
    return Sampler(sequences).draw(torch.from_numpy(logits.astype(np.float32)), rows, None, {})


def distribution(logits: np.ndarray, params: SamplingParams, tokens: tuple[int, ...] = ()) -> np.ndarray:  # type: ignore[type-arg]
    """Log-probs in float64 from the definitions."""
    x = logits.astype(np.float64).copy()
    for token in {*PROMPT, *tokens}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(tokens):
        x[token] -= params.presence_penalty + params.frequency_penalty * tokens.count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(tokens) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    x /= params.temperature or 1
    if params.top_k:
        x[x < np.sort(x)[-min(params.top_k, V)]] = -np.inf
    p = np.exp(x - np.logaddexp.reduce(x))
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        kept = order[: 1 + int((np.cumsum(p[order]) < params.top_p).sum())]
        x[np.setdiff1d(np.arange(V), kept)] = -np.inf
        p = np.exp(x - np.logaddexp.reduce(x))
    x[p < params.min_p * p.max()] = -np.inf
    return x - np.logaddexp.reduce(x)  # type: ignore[no-any-return]


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([1, 3, V, V + 5]),
        "top_p": st.sampled_from([0.1, 0.6, 0.95]),
        "min_p": st.sampled_from([0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-2.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 2.0]),
        "logit_bias": st.just({4: 5.0, 7: -100.0}),
        "min_tokens": st.just(2),
    },
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(options, min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from([(), (9,), (9, 3), (9, 3, 9)]),
)
def test_sampled_logprobs_equal_the_definition_of_each_option(
    chosen: list[dict[str, Any]], seed: int, tokens: tuple[int, ...]
) -> None:
    logits = np.random.default_rng(seed).normal(size=(len(chosen), V)).astype(np.float32) * 2
    params = [SamplingParams(9, stop_token_ids=(0, 1), raw_logprobs=True, **its) for its in chosen]
    draws = drawn(logits.copy(), params, tokens)
    for index, its in enumerate(params):
        expected = distribution(logits[index], its, tokens)
        token = draws.token_ids[index]
        assert draws.logprobs[index] == pytest.approx(expected[token], abs=1e-4)
        if its.temperature == 0:
            assert expected[token] == expected.max()
        raw = distribution(logits[index], SamplingParams(1))
        assert draws.raw_logprobs[index] == pytest.approx(raw[token], abs=1e-4)


def test_options_of_other_rows_do_not_change_a_sample() -> None:
    logits = np.random.default_rng(0).normal(size=(4, V))
    params = [
        SamplingParams(9),
        SamplingParams(9, temperature=0.6),
        SamplingParams(9, top_k=2),
        SamplingParams(9),
    ]
    mixed = drawn(logits.copy(), params)
    plain = drawn(logits.copy(), [params[0], params[1], params[0], params[3]])
    for index in (0, 1, 3):
        assert mixed.token_ids[index] == plain.token_ids[index]
        assert mixed.logprobs[index] == plain.logprobs[index]


def test_min_p_of_other_rows_does_not_change_top_logprobs() -> None:
    logits = np.random.default_rng(0).normal(size=(2, V))
    params = [SamplingParams(9, logit_bias={4: 100.0}, top_logprobs=5), SamplingParams(9, min_p=0.1)]
    alone = drawn(logits[:1].copy(), params[:1]).top_logprobs[0]
    assert len(alone) == 5 and alone[1][1] < -90
    assert drawn(logits.copy(), params).top_logprobs[0] == alone


def test_top_p_works_when_nucleus_exceeds_the_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.engine import sampler

    monkeypatch.setattr(sampler, "_NUCLEUS_CANDIDATES", 4)
    logits = np.random.default_rng(1).normal(size=(3, V)) * 0.1
    params = [SamplingParams(9, top_p=p) for p in (0.05, 0.5, 0.9)]
    draws = drawn(logits.copy(), params)
    for index, its in enumerate(params):
        expected = distribution(logits[index], its)
        assert draws.logprobs[index] == pytest.approx(expected[draws.token_ids[index]], abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_tokens": 5},
        {"repetition_penalty": 0.0}, {"repetition_penalty": float("nan")}, {"logit_bias": {1: float("nan")}},
        {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"presence_penalty": float("nan")},
        {"stop": ("",)}, {"top_logprobs": -1}, {"top_p": float("nan")}, {"top_k": 2.5},
    ],
)  # fmt: skip
def test_sampling_params_reject_invalid_options(wrong: dict[str, Any]) -> None:
    from perilune.errors import RequestError

    with pytest.raises(RequestError):
        SamplingParams(max_tokens=4, **wrong)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_two_step_draw_equals_draw(vocab_size: int, seed: int) -> None:
    """GPUs draw without a cumulative sum over all tokens. Covers zero probabilities and extreme uniforms."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 4, (40, vocab_size)).astype(np.float32)
    logits[random.random(logits.shape) < 0.3] = -np.inf
    logits[:, random.integers(vocab_size)] = 0.0
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    uniform = torch.from_numpy(np.r_[0.0, np.nextafter(1.0, 0.0), random.random(38)])
    drawn = sampler._draw_in_two_steps(logprobs, uniform)
    assert logprobs.gather(1, drawn[:, None]).isfinite().all()
    assert (drawn == sampler.draw(logprobs, uniform)).all()
    unknown = torch.full((1, vocab_size), torch.nan)
    assert sampler._draw_in_two_steps(unknown, uniform[-1:]).item() == vocab_size - 1
