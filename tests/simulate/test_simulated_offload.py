"""A simulated engine offloads the same blocks as a real engine, and its clock counts the copies."""

from typing import Any

import numpy as np
import pytest

from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadCounters, OffloadSettings
from perilune.engine.request import Request, SamplingParams
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.memory import get_model_card
from perilune.simulate.engine import SimulatedEngine, SimulatedModel
from perilune.simulate.hardware import DISK_BANDWIDTH, VALUE_BYTES, parse_machines
from perilune.simulate.offload import OffloadTimes, SimulatedOffloadStore
from perilune.simulate.serving import Arrival, Replica, serve
from perilune.simulate.step_cost import FEATURE_NAMES, StepCost

FULL = PRESETS["tiny"].replace(num_layers=2, max_position_embeddings=512)
WINDOWS = FULL.replace(architecture="gemma3_text", windows=(40, None))
COST = StepCost(dict.fromkeys(FEATURE_NAMES, 0.001))
SIZE = {"slots": 2, "cache_tokens": 320, "token_budget": 64}
SESSIONS, TURNS, ANSWER = 6, 4, 24
Key = tuple[int, int, int]


def converse(engine: Engine, submit: Any, known: dict[Key, list[int]] | None = None) -> dict[Key, list[int]]:
    """Play the sessions in turns, so that each is evicted before its next turn; returns the answers."""
    histories = [np.random.default_rng(seed).integers(98, size=40).tolist() for seed in range(SESSIONS)]
    answers = {}
    for turn in range(TURNS):
        for session, history in enumerate(histories):
            key = (0, turn, session)
            submit(history, key)
            while engine.unfinished:
                for delta in engine.step():
                    answers[key] = delta.token_ids if known is None else known[key]
            history += [*answers[key], 5, 6, 7]
    return answers


@pytest.mark.parametrize("config", [FULL, WINDOWS], ids=["full", "windows"])
def test_simulated_engine_offloads_the_blocks_of_the_real_engine(config: DecoderConfig) -> None:
    decoder = Decoder(config)
    decoder.initialize(0)
    sizes = [1024 * (1 + number) for number in range(len(config.distinct_windows))]
    real = Engine(decoder, **SIZE)
    real.offload(OffloadSettings(1 << 40, 0, always=True))
    params = SamplingParams(ANSWER)
    known = converse(real, lambda tokens, key: real.add(Request(tokens, params, key), stream=False))

    simulated = SimulatedEngine(SimulatedModel.from_config(config), COST, **SIZE)
    times = OffloadTimes(sizes, 1e9, 1e8)
    settings = OffloadSettings(1 << 40, 0, always=True)
    simulated.offload_to(SimulatedOffloadStore(settings, times, simulated.clock))
    converse(simulated, lambda tokens, key: simulated.submit(tokens, [np.array(known[key])]), known)

    assert simulated.counters == real.counters
    assert simulated.offloaded == real.offloaded
    assert real.offloaded.loaded_from_memory > 50


def test_simulated_store_opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: pytest.fail("it opens a file"))
    clock = SimulatedEngine(SimulatedModel.from_config(FULL), COST, **SIZE).clock
    SimulatedOffloadStore(OffloadSettings(0, 1 << 30), OffloadTimes([1], 1.0, 1.0), clock)


def test_copies_take_the_time_of_their_bytes() -> None:
    engine = SimulatedEngine(SimulatedModel.from_config(FULL), COST, **SIZE)
    store = SimulatedOffloadStore(OffloadSettings(3000, 9000), OffloadTimes([1000], 1e3, 1e2), engine.clock)
    digests = [bytes([number]) for number in range(4)]
    store.save(0, [1, 2, 3, 4], digests)  # four copies to memory, one block on to the disk
    assert engine.clock.now == pytest.approx(4 + 10)
    assert store.counters == OffloadCounters(stored=4)
    store.write(0, np.array([5]), store.read(0, digests[:1]) or [])  # from the disk
    assert engine.clock.now == pytest.approx(14 + 10 + 1)
    store.write(0, np.array([6]), store.read(0, digests[1:2]) or [])  # from memory
    assert engine.clock.now == pytest.approx(25 + 1)
    assert (store.counters.loaded_from_disk, store.counters.loaded_from_memory) == (1, 1)


def test_fleet_loads_offloaded_prefixes_if_that_is_faster() -> None:
    model, machines = get_model_card(PRESETS["large"]), parse_machines("1xL4")
    pool = Replica(machines, model, slots=2).cache_tokens
    sessions = pool // 1024 + 2  # more than the cache holds
    arrivals = [
        Arrival(number, 5.0 * number, 1100, 4, (2 * (number % sessions), 2 * (number % sessions) + 1))
        for number in range(3 * sessions)
    ]
    plain, tiered = (
        serve(Replica(machines, model, 2, offload), arrivals) for offload in (None, OffloadSettings(1 << 40))
    )
    assert plain.counts["cached"] == 0  # the least recently used prefix is always the next one
    assert tiered.counts["cached"] == 2 * sessions * 1024
    assert tiered.counts["loaded_from_memory"] > 0 and tiered.busy < plain.busy
    times = OffloadTimes.of(machines, model)
    assert sum(times.block_bytes) == model.cache_bytes(16, VALUE_BYTES)
    assert times.memory == pytest.approx(0.7 * 32e9) and times.disk == pytest.approx(0.7 * DISK_BANDWIDTH)
