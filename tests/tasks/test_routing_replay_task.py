"""Routing replay in an rl stage: a tiny Qwen3-MoE, in one process and with rollout processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import make_job, metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.data.episode import Episode
from perilune.data.episodes_file import map_episodes, read_episodes, to_bytes
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.learn.batch import pack_each
from perilune.learn.trainer import token_logprobs
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.checks.logprobs import rescored
from perilune.tasks.rl.stage import plugin

MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 2, 32, dense_layers=(1,)))
CORRECTED = {"off_policy": {"proximal": "learner", "weight": "truncate"}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tokenizer, folder = Tokenizer.characters(), tmp_path_factory.mktemp("model") / "mixture"
    save_checkpoint(folder, new_model(MIXTURE, tokenizer, seed=0), tokenizer)
    return {"model": {"path": str(folder)}, "inputs": {"model": folder}}


def test_a_stage_replays_and_changes_nothing_where_sampler_and_learner_agree(
    mixture: dict[str, Any], tmp_path: Path
) -> None:
    options = {**mixture, "steps": 2, "kl": 0.1}
    plain = run_task(tmp_path / "plain", "rl", **options)
    replayed = run_task(tmp_path / "replayed", "rl", routing_replay=True, **options)
    differences = {one.path for one in compare_artifacts(plain, replayed)}
    assert all(path.startswith(("artifacts/episodes/", "artifacts/metrics.jsonl")) for path in differences)
    for line, before in zip(metrics(replayed), metrics(plain), strict=True):
        routing = {name: line.pop(name) for name in [*line] if name.startswith("routing/")}
        assert routing["routing/missing"] == routing["routing/flipped"] == 0
        assert line == before
    for one in read_episodes(replayed / "artifacts" / "episodes" / "step-000001.parquet"):
        assert one.routed_experts is not None and one.routed_experts.dtype == np.uint8
        assert one.routed_experts.shape == (len(one.prompt_ids) + len(one.token_ids) - 1, 2, 2)


@pytest.mark.slow
def test_rollout_processes_hand_routes_over(mixture: dict[str, Any], tmp_path: Path) -> None:
    options = {**mixture, "steps": 2, "routing_replay": True, **CORRECTED}
    one = run_task(tmp_path / "synchronous", "rl", **options)
    other = run_task(tmp_path / "asynchronous", "rl", asynchronous={"staleness": 0}, **options)
    differences = {one.path for one in compare_artifacts(one, other)}
    assert differences <= {"artifacts/schedule.jsonl", "artifacts/metrics.jsonl"}
    assert metrics(other)[0]["routing/missing"] == 0


def test_a_mapped_file_gives_routes_after_it_was_deleted(tmp_path: Path, mixture: dict[str, Any]) -> None:
    bundle = run_task(tmp_path / "run", "rl", **mixture, steps=1, routing_replay=True)
    episodes = read_episodes(bundle / "artifacts" / "episodes" / "step-000001.parquet")
    (path := tmp_path / "group.arrow").write_bytes(to_bytes(episodes))
    mapped = map_episodes(path)
    path.unlink()
    for one, again in zip(episodes, mapped, strict=True):
        assert again.routed_experts is not None and not again.routed_experts.flags.owndata
        np.testing.assert_array_equal(one.routed_experts, again.routed_experts)
        np.testing.assert_array_equal(one.token_ids, again.token_ids)


def test_a_dense_model_has_nothing_to_replay() -> None:
    job = make_job("rl", routing_replay=True)
    with pytest.raises(RequestError, match="no experts"):
        plugin.describe(plugin.spec.model_validate(job.spec), job)


def test_the_check_of_the_sampler_replays_routes() -> None:
    """Otherwise a flipped expert would look like a wrong sampler."""
    tokenizer, decoder = Tokenizer.characters(), new_model(MIXTURE, Tokenizer.characters(), seed=0)
    engine = Engine(decoder, slots=2)
    engine.record_routes()
    ((one,),) = engine.sample([Prompt(tokenizer.encode("1+2="), (0, 1, 0))], 1, SamplingParams(12))
    task = Task("task", ({"role": "user", "content": "1+2="},), {})
    routes = (one.routed_experts + 3) % 8
    episode = replace(
        Episode.from_completion(task, one, tokenizer), prompt_ids=np.array(tokenizer.encode("1+2="), np.int32)
    )
    flipped = replace(episode, routed_experts=routes)
    (batch,) = pack_each([flipped], 1000)
    replayed = token_logprobs(decoder, batch).numpy()
    assert np.abs(replayed - episode.logprobs).max() > 0.01
    np.testing.assert_allclose(rescored(decoder, flipped, 1.0), replayed, atol=1e-4)
    np.testing.assert_allclose(rescored(decoder, episode, 1.0), episode.logprobs, atol=1e-4)
