"""The simulated engine schedules like the real one: rows, prefill chunks, forks and preemptions."""

import numpy as np
import pytest

from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Request, SamplingParams
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.decoder import Decoder
from perilune.simulate.engine import SimulatedEngine, SimulatedModel, StepLog
from perilune.simulate.recording import RecordedEngine
from perilune.simulate.step_cost import FEATURE_NAMES, StepCost, StepWork, fit_relative, fit_step_cost

FULL = PRESETS["tiny"].replace(num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2, head_dim=16)
WINDOWS = FULL.replace(architecture="qwen2", windows=(None, 32))
COST = StepCost({name: 1e-3 * (1 + number) for number, name in enumerate(FEATURE_NAMES)})
SMALL = {"slots": 8, "cache_tokens": 8 * 200, "token_budget": 4096}


def requests(seed: int, count: int, *, longest: int = 60, most: int = 30) -> list[Request]:
    """Prompts and completions of various lengths, some in groups, some with a common prefix."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 90, size=40).tolist()
    requests = []
    for number in range(count):
        own = rng.integers(1, 90, size=int(rng.integers(3, longest))).tolist()
        params = SamplingParams(int(rng.integers(2, most)), stop_token_ids=(1, 2, 3))
        prompt = shared + own if number % 4 == 0 else own
        requests.append(Request(prompt, params, (seed, 0, number), (1, 1, 4)[number % 3]))
    return requests


def decoder_of(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    decoder.initialize(0)
    return decoder


def drained(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.unfinished:
        deltas += engine.step()
    return deltas


def traces(decoder: Decoder, asked: list[Request]) -> dict[tuple[int, int], np.ndarray]:
    """The tokens sampled by the real engine, which do not depend on the batch."""
    engine = Engine(decoder, slots=64)
    for request in asked:
        engine.add(request, stream=False)
    return {(part.request_id, part.sample): np.array(part.token_ids, np.int32) for part in drained(engine)}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param(FULL, {}, id="ragged groups"),
        pytest.param(FULL, {"token_budget": 24}, id="chunked prefill"),
        pytest.param(FULL, {"cache_tokens": 16 * 14}, id="preempting"),
        pytest.param(WINDOWS, {"token_budget": 40}, id="windows"),
        pytest.param(WINDOWS, {"cache_tokens": 16 * 14, "token_budget": 24}, id="windows, preempting"),
    ],
)
def test_simulated_steps_equal_those_of_the_real_engine(config: DecoderConfig, size: dict[str, int]) -> None:
    decoder, asked = decoder_of(config), requests(0, 30)
    known = traces(decoder, asked)
    real = RecordedEngine(decoder, **{**SMALL, **size})
    real.run_timed(asked, lambda: 0.0)

    log = StepLog()
    simulated = SimulatedEngine(SimulatedModel.from_config(config), COST, **{**SMALL, **size}, log=log)
    for number, request in enumerate(asked):
        simulated.submit(request.token_ids, [known[number, sample] for sample in range(request.n)])
    ended = drained(simulated)

    assert log.works == real.log.works
    assert log.chunks == real.log.chunks
    assert simulated.counters == real.counters
    assert (simulated.counters.preemptions > 0) == ("cache_tokens" in size)
    assert (simulated.peak_use > 0.9) == ("cache_tokens" in size)
    assert len(ended) == len(known)
    assert simulated.clock.now == pytest.approx(sum(map(COST.step_seconds, log.works)))
    assert not simulated._traces  # dropped after their requests are scheduled


def test_second_turn_hits_the_prefix_cache_like_the_real_engine() -> None:
    decoder = decoder_of(FULL)
    first = Request(list(range(1, 41)), SamplingParams(30), (0, 0, 0), 2)
    real = RecordedEngine(decoder, **SMALL)
    real.add(first, stream=False)
    turns = {delta.sample: delta.token_ids for delta in drained(real)}
    context = [first.token_ids + turns[sample] + [5, 6, 7] for sample in range(2)]
    for number, tokens in enumerate(context):
        real.add(Request(tokens, SamplingParams(4), (0, 1, number)), stream=False)
    second = drained(real)

    log = StepLog()
    simulated = SimulatedEngine(SimulatedModel.from_config(FULL), COST, **SMALL, log=log)
    simulated.submit(first.token_ids, [np.array(turns[sample]) for sample in range(2)])
    drained(simulated)
    for tokens, delta in zip(context, second, strict=True):
        simulated.submit(tokens, [np.array(delta.token_ids)])
    drained(simulated)
    assert log.chunks == real.log.chunks
    assert [(w.rows, w.begun) for w in log.works] == [(w.rows, w.begun) for w in real.log.works]
    assert simulated.counters.cached_tokens == real.counters.cached_tokens > 0


def test_weight_swap_takes_effect_between_two_steps() -> None:
    simulated = SimulatedEngine(SimulatedModel.from_config(FULL), COST, **SMALL)
    simulated.submit([1, 2, 3], [np.arange(1, 11)])
    for _ in range(4):
        simulated.step()
    simulated.swap_weights(7)
    (delta,) = drained(simulated)
    assert delta.policy_version == [0] * 4 + [7] * 6
    assert simulated.counters.prompt_tokens == 3 + (3 + 4)  # recomputed with the new weights


def test_fit_recovers_the_costs_behind_measured_times() -> None:
    rng = np.random.default_rng(0)
    works = [
        StepWork(
            int(rows),
            float(rows * 50),
            float(rows * 50 * (prefill > 5)),
            prefill % 4,
            int(prefill),
            float(prefill**2),
            int(prefill > 0),
            int(rows) % 3,
            1,
        )
        for rows in (0, 1, 2, 3, 4, 6, 8, 12, 16, 40, 100)
        for prefill in (0, 5, 90, 400)
    ]
    seconds = [COST.step_seconds(work) * rng.uniform(0.99, 1.01) for work in works]
    cost = fit_step_cost(works, seconds)
    errors = [abs(cost.step_seconds(work) / time - 1) for work, time in zip(works, seconds, strict=True)]
    assert max(errors) < 0.03
    assert min(cost.seconds.values()) >= 0


def test_coefficients_are_not_negative() -> None:
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    fitted = fit_relative(features, np.array([3.0, 2.0, 1.0]))  # decreasing, unlike any cost
    assert fitted[1] == 0 and fitted[0] == pytest.approx((1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1))
