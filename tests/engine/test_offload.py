"""KV cache offloading to memory and disk: equal samples, hits, and detection of damaged blocks."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadSettings
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.errors import RequestError
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.config.rope import Rope
from perilune.models.decoder import Decoder

CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2, max_position_embeddings=512)
CONFIGS = {
    "full": CONFIG,
    "windows": CONFIG.replace(
        architecture="gemma3_text", windows=(40, None, 40), num_layers=3, local_rope=Rope(10.0)
    ),
}
SESSIONS, TURNS = 6, 4


def decoder(kind: str) -> Decoder:
    made = Decoder(CONFIGS[kind])
    made.initialize(0)
    return made


def engine(model: Decoder, offload: OffloadSettings | None, **options: Any) -> Engine:
    made = Engine(model, slots=2, cache_tokens=320, token_budget=64, **options)
    if offload is not None:
        made.offload(offload)
    return made


def converse(one: Engine) -> list[Completion]:
    """Sample the sessions in turns, so that each is evicted before its next turn."""
    histories = [np.random.default_rng(seed).integers(98, size=40).tolist() for seed in range(SESSIONS)]
    answers = []
    for turn in range(TURNS):
        for session, history in enumerate(histories):
            sampled = one.sample([Prompt(history, (0, turn, session))], 1, SamplingParams(max_tokens=24))
            answers.append(sampled[0][0])
            history += [*sampled[0][0].token_ids.tolist(), 5, 6, 7]
    return answers


def same(left: list[Completion], right: list[Completion]) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("runner", [fastest_runner, TorchRunner])
@pytest.mark.parametrize("kind", CONFIGS)
def test_offloading_to_memory_and_disk_does_not_change_samples(kind: str, runner: Any) -> None:
    model = decoder(kind)
    without = engine(model, None, runner=runner)
    answers = converse(without)
    with_store = engine(model, OffloadSettings(60_000, 1 << 24, always=True), runner=runner)
    assert same(converse(with_store), answers)
    counts = with_store.offloaded
    assert counts.loaded_from_memory > 0
    assert counts.loaded_from_disk > 20
    assert (counts.corrupt, counts.dropped) == (0, 0)
    assert with_store.counters.prompt_tokens < 0.5 * without.counters.prompt_tokens


def test_offloading_restores_int8_blocks_with_their_scales() -> None:
    model = decoder("full")

    def runner(of: Decoder, blocks: tuple[int, ...]) -> TorchRunner:
        return TorchRunner(of, blocks, cache_dtype=torch.int8)

    answers = converse(engine(model, None, runner=runner))
    assert same(converse(engine(model, OffloadSettings(1 << 24, always=True), runner=runner)), answers)


def test_offloading_restores_routes_with_their_blocks() -> None:
    config = CONFIG.replace(architecture="qwen3_moe", experts=Experts(4, 2, 32))
    model = Decoder(config)
    model.initialize(0)
    engines = [engine(model, settings) for settings in (None, OffloadSettings(1 << 24, always=True))]
    for one in engines:
        one.record_routes()
    plain, offloaded = map(converse, engines)
    assert engines[1].offloaded.loaded_from_memory > 20
    for one, other in zip(plain, offloaded, strict=True):
        assert one.routed_experts is not None
        assert other.routed_experts is not None
        assert np.array_equal(one.routed_experts, other.routed_experts)


@pytest.mark.parametrize("disk", [0, 1 << 24])
def test_damaged_offloaded_block_is_recomputed(disk: int) -> None:
    model = decoder("full")
    answers = converse(engine(model, None))
    with_store = engine(model, OffloadSettings(0 if disk else 1 << 24, disk, always=True))
    converse(with_store)
    store = with_store._offload
    assert store is not None
    for block in store._stored.values():
        if block.content is None:
            block.checksum ^= 1
        else:
            block.content[3] ^= 1
    assert same(converse(with_store), answers)
    assert with_store.offloaded.corrupt > 0


def test_full_disk_loses_only_offloaded_blocks(tmp_path: Path) -> None:
    model = decoder("full")
    answers = converse(engine(model, None))
    with_store = engine(model, OffloadSettings(0, 1 << 24, tmp_path, always=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert same(converse(with_store), answers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = with_store._offload
    assert store is not None
    assert store.disk_failure
    assert with_store.offloaded.disk_failures == 1
    assert 0 < store.disk_bytes <= 100_000
    assert list(tmp_path.iterdir()) == []  # the file is unlinked while open


def test_weight_update_empties_the_offload_store() -> None:
    model = decoder("full")
    with_store = engine(model, OffloadSettings(1 << 24, always=True))
    converse(with_store)
    model.initialize(1)
    with_store.update_weights(None, 1)
    store = with_store._offload
    assert store is not None
    assert store.memory_bytes == 0
    assert same(converse(with_store), converse(engine(model, None)))


def test_blocks_are_recomputed_when_that_is_faster_than_loading() -> None:
    model = decoder("full")
    with_store = engine(model, OffloadSettings(1 << 24))
    store = with_store._offload
    assert store is not None
    store.compute_seconds, store.load_seconds = 1e-6, 1.0
    store.record_compute_time = lambda tokens, decodes, seconds: None  # type: ignore[method-assign]
    converse(with_store)
    assert with_store.offloaded.refused > 0
    assert with_store.offloaded.loaded_from_memory == 0


def test_offload_rejects_runner_without_paged_cache() -> None:
    class Bare:
        def __init__(self, model: Decoder, blocks: tuple[int, ...]) -> None: ...

    with pytest.raises(RequestError, match="Bare cannot offload its cache"):
        engine(decoder("full"), OffloadSettings(1), runner=Bare)
