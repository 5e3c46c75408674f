"""Failure isolation: failing requests do not affect others; failing steps do not break the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Prompt, Request, SamplingParams
from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.errors import RequestError, WorkFailedError
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

V = 98
POISON = 97


def make() -> Decoder:
    decoder = Decoder(PRESETS["tiny"].replace(initializer_range=0.15, max_position_embeddings=128))
    decoder.initialize(0)
    return decoder


DECODER = make()
NEIGHBOR = Request([5, 6, 7], SamplingParams(12, top_k=20), (7, 0, 0), n=2)


class Panic(BaseException):
    """A panic, as raised by Rust extensions."""


class Faulty:
    """A runner that returns NaN logits after token `POISON` and raises MemoryError while `broken`."""

    def __init__(self, decoder: Any, num_blocks: Sequence[int]) -> None:
        self._inner = fastest_runner(decoder, num_blocks)
        self.broken = False

    def run(self, batch: StepBatch) -> Tensor:
        if self.broken:
            raise MemoryError
        logits = self._inner.run(batch)
        logits[torch.from_numpy(batch.token_ids[batch.logit_rows] == POISON)] = torch.nan
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def faulty_engine() -> tuple[Engine, Faulty]:
    made: list[Faulty] = []

    def runner(decoder: Any, num_blocks: Sequence[int]) -> Faulty:
        made.append(Faulty(decoder, num_blocks))
        return made[0]

    return Engine(DECODER, slots=8, runner=runner), made[0]


Samples = dict[int, tuple[list[int], list[float]]]


def finish(engine: Engine) -> tuple[dict[int, Samples], dict[int, Delta]]:
    """All samples and all failed deltas, keyed by request."""
    samples: dict[int, Samples] = {}
    failed = {}
    while engine.unfinished:
        for delta in engine.step():
            if delta.failure is not None:
                failed[delta.request_id] = delta
            tokens, logprobs = samples.setdefault(delta.request_id, {}).setdefault(delta.sample, ([], []))
            tokens += delta.token_ids
            logprobs += delta.logprobs
    return samples, failed


def run_alone(request: Request) -> Samples:
    engine = Engine(DECODER)
    engine.add(request)
    (samples,) = finish(engine)[0].values()
    return samples


EXPECTED = run_alone(NEIGHBOR)
numbers = st.one_of(
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-9, 1e-6, 0.5, 1.0, 1.5, 2.0, 100.0, 1e30, 1e38, 1e300]),
    st.floats(allow_nan=True, allow_infinity=True),
)
integers = st.sampled_from([-1, 0, 1, 3, V - 1, V, 2**31, 2**63 - 1, 2**63, 10**30])
tokens = st.lists(integers, max_size=3).map(tuple) | st.just(tuple(range(V)))


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([1, 5]) | integers},
        optional={
            "temperature": numbers, "top_p": numbers, "min_p": numbers, "repetition_penalty": numbers,
            "presence_penalty": numbers, "frequency_penalty": numbers,
            "top_k": integers, "min_tokens": st.sampled_from([1, 3]) | integers, "stop_token_ids": tokens,
            "logit_bias": st.dictionaries(integers, numbers, max_size=3),
            "raw_logprobs": st.booleans(), "top_logprobs": integers,
        },
    )
)  # fmt: skip
def test_any_sampling_options_are_rejected_or_served_in_isolation(options: dict[str, Any]) -> None:
    engine = Engine(DECODER, slots=4)
    neighbor = engine.add(NEIGHBOR)
    engine.step()
    strange = None
    with suppress(RequestError):
        strange = engine.add(Request([5, 6], SamplingParams(**options), (1, 0, 0)))
    samples, failed = finish(engine)
    assert not failed
    assert {sample: tokens[1:] for sample, (tokens, _) in EXPECTED.items()} == {
        sample: tokens for sample, (tokens, _) in samples[neighbor].items()
    }
    if strange is not None:
        tokens, logprobs = samples[strange][0]
        assert 1 <= len(tokens) <= options["max_tokens"]
        assert all(0 <= token < V for token in tokens)
        assert all(-np.inf < logprob <= 0 for logprob in logprobs)


class Broken:
    """A constraint that raises `error` in one of its methods."""

    stop_token_ids = (1,)
    failure = ""

    def __init__(self, where: str, error: BaseException) -> None:
        self._where, self._error = where, error

    def _reach(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def start(self, token_ids: Sequence[int] = ()) -> Broken:
        self._reach("start")
        return self

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        self._reach("fill_mask")
        mask[:] = -1

    def advance(self, token_id: int) -> None:
        self._reach("advance")


@pytest.mark.parametrize("where", ["start", "fill_mask", "advance"])
@pytest.mark.parametrize("error", [RequestError("too complex"), WorkFailedError("no"), ValueError(), Panic()])
def test_failing_constraint_fails_only_its_own_request(where: str, error: BaseException) -> None:
    engine = Engine(DECODER, slots=8)
    bad = engine.add(Request([5], SamplingParams(9), n=3, constraint=Broken(where, error)))
    neighbor = engine.add(NEIGHBOR)
    samples, failed = finish(engine)
    assert samples[neighbor] == EXPECTED
    assert list(failed) == [bad]
    wanted = error if isinstance(error, RequestError | WorkFailedError) else None
    assert failed[bad].finish_reason == "aborted"
    assert failed[bad].failure is wanted or (wanted is None and "failed" in str(failed[bad].failure))
    assert (engine.running, engine.cache_use) == (0, 0)
    with pytest.raises(RequestError if isinstance(error, RequestError) else WorkFailedError):
        engine.sample([Prompt([5], (0, 0, 0))], 2, SamplingParams(9), constraint=Broken(where, error))
    with pytest.raises(RequestError if isinstance(error, RequestError) else WorkFailedError):
        list(engine.stream(Request([5], SamplingParams(9), constraint=Broken(where, error))))
    assert (engine.running, engine.cache_use, engine.unfinished) == (0, 0, False)


@pytest.mark.parametrize("stream", [True, False])
def test_failing_detokenizer_fails_only_its_own_request(stream: bool) -> None:
    class Undecodable(Tokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            raise Panic

    tokenizer = Undecodable(Tokenizer.characters()._backend, {"eos_token": "<eos>"})
    engine = Engine(DECODER, tokenizer=tokenizer)
    neighbor = Request([5, 6, 7], SamplingParams(24), (7, 0, 0))
    bad = engine.add(neighbor, stream=stream)
    # sample() returns no text unless asked, so it does not decode.
    completion = engine.sample([Prompt(neighbor.token_ids, neighbor.key)], 1, neighbor.params)[0][0]
    assert completion.token_ids.tolist() == run_alone(neighbor)[0][0]
    assert list(finish(engine)[1]) == [bad]


@pytest.mark.parametrize("options", [{}, {"top_k": 20}])
def test_non_finite_logits_fail_only_their_own_request(options: dict[str, Any]) -> None:
    engine, _ = faulty_engine()
    early = engine.add(NEIGHBOR)
    engine.step()
    bad = engine.add(Request([5, POISON], SamplingParams(9, **options), n=2))
    late = engine.add(NEIGHBOR)
    samples, failed = finish(engine)
    assert list(failed) == [bad]
    assert "not finite" in str(failed[bad].failure)
    assert samples[late] == EXPECTED
    assert {sample: tokens for sample, (tokens, _) in samples[early].items()} == {
        sample: tokens[1:] for sample, (tokens, _) in EXPECTED.items()
    }
    assert engine.cache_use == 0


def test_restart_after_a_failed_step_works_once_the_runner_recovers() -> None:
    engine, runner = faulty_engine()
    engine.add(NEIGHBOR)
    engine.step()
    runner.broken = True
    with pytest.raises(MemoryError):
        engine.step()
    assert (engine.running, engine.unfinished) == (0, False)
    with pytest.raises(MemoryError):
        engine.restart()
    runner.broken = False
    engine.restart()
    engine.add(NEIGHBOR)
    assert list(finish(engine)[0].values()) == [EXPECTED]
