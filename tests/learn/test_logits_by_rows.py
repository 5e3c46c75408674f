"""Log-probs computed from chunks of logit rows: equal results in bounded memory."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import episode, random_groups, small_decoder

from perilune.data.episode import Episode
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner, token_logprobs
from perilune.learn.weights import WeightedGroup, aggregate
from perilune.models import logprobs
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.memory import MAX_LOGITS_PER_CHUNK, plan_memory
from perilune.tasks.stage.memory_plan import peak_resident_bytes


def imitation(groups: Sequence[Sequence[Episode]]) -> list[WeightedGroup]:
    ones = [aggregate(group, np.ones(len(group)), "token-mean") for group in groups]
    return [WeightedGroup(tuple(group), cross_entropy=each) for group, each in zip(groups, ones, strict=True)]


def step(monkeypatch: pytest.MonkeyPatch, at_once: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict]:
    """Log-probs and gradients of one step that computes `at_once` logits at a time."""
    monkeypatch.setattr(logprobs, "MAX_LOGITS_PER_CHUNK", at_once)
    learner = Learner(small_decoder(dtype=dtype))
    (batch,) = pack(imitation(random_groups(3)), 10_000, temperature=0.7)
    found = token_logprobs(learner.decoder, batch)
    figures = learner.forward_backward([batch])
    return found, {name: p.grad for name, p in learner.decoder.named_parameters()} | {"figures": figures}


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_chunked_logits_give_equal_values_and_gradients_within_rounding(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    size = small_decoder().config.vocab_size
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        whole, expected = step(monkeypatch, 1 << 30, dtype)
        found, gradients = step(monkeypatch, rows * size, dtype)
        assert len(whole) > 14
        assert torch.equal(found, whole)
        assert gradients.pop("figures") == expected.pop("figures")
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 20), st.integers(1, 12), st.booleans())
def test_in_row_chunks_equals_one_call_at_any_chunk_size(count: int, rows: int, learning: bool) -> None:
    hidden = torch.arange(count * 3.0).view(count, 3).requires_grad_()
    tokens = torch.arange(count)
    seen = []

    def of_rows(states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(states))
        return states.sum(1) * 2, ids + 1

    with pytest.MonkeyPatch.context() as patched, torch.set_grad_enabled(learning):
        patched.setattr(logprobs, "MAX_LOGITS_PER_CHUNK", 10 * rows + 9)
        sums, ids = logprobs.compute_in_row_chunks(of_rows, (hidden, tokens), 10)
        assert max(seen) <= rows or count <= rows
        assert sum(seen) == count
    assert torch.equal(sums.detach(), hidden.detach().sum(1) * 2)
    assert torch.equal(ids, tokens + 1)
    if learning:
        sums.sum().backward()
        assert torch.equal(hidden.grad, torch.full_like(hidden, 2.0))


LARGE_VOCABULARY = DecoderConfig("llama", 40_000, 8, 8, 1, 1, 1, 8)


def print_peaks(steps: Sequence[tuple[int, int]]) -> None:
    """Print the peak memory of this process in MiB after each step; a step is (tokens, logits at a time)."""
    learner = Learner(Decoder(LARGE_VOCABULARY))
    learner.decoder.initialize(0)
    for rows, logprobs.MAX_LOGITS_PER_CHUNK in steps:
        answers = [episode(tokens=[7] * 64, name=f"0/{i}/0") for i in range(rows // 64)]
        learner.forward_backward(pack(imitation([[answer] for answer in answers]), 10**6))
        print(peak_resident_bytes() >> 20)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are reliable on Linux")
def test_learner_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    # Use 64 MiB of logits at a time: the allocator keeps smaller blocks on the heap after they are freed.
    steps = [(448, 1 << 24), (1088, 1 << 24), (1088, MAX_LOGITS_PER_CHUNK)]
    code = f"import test_logits_by_rows as here; here.print_peaks({steps})"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    few, many, at_once = map(int, result.stdout.split())
    assert many < few + 40  # MiB; without chunks, the logits of 640 more rows take several times 98 MiB
    assert at_once > many + 100
    plan = plan_memory(LARGE_VOCABULARY, learning=(1088, 67)).total >> 20
    assert 0.5 * plan < at_once < plan
