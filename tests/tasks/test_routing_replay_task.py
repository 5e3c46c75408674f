"""Routing replay in an rl stage: a tiny Qwen3-MoE, in one process and with rollout processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import make_bundle, make_job, metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import episodes_to_bytes, map_episodes, read_episodes
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
from perilune.tasks.checks.gold_watch import GoldWatch
from perilune.tasks.checks.logprobs import rescore
from perilune.tasks.rl.stage import plugin

MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 2, 32, dense_layers=(1,)))


OPTIONS: dict[str, Any] = {
    "steps": 2,
    "kl": 0.1,
    "off_policy": {"proximal": "learner", "weight": "truncate"},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Job options with the mixture-of-experts model."""
    tokenizer, folder = Tokenizer.characters(), tmp_path_factory.mktemp("model") / "mixture"
    save_checkpoint(folder, new_model(MIXTURE, tokenizer, seed=0), tokenizer)
    return {"model": {"path": str(folder)}, "inputs": {"model": folder}, **OPTIONS}


@pytest.fixture(scope="module")
def replayed(mixture: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("run") / "replayed", "rl", routing_replay=True, **mixture)


def recorded(bundle: Path) -> list[Episode]:
    return read_episodes(bundle / "artifacts" / "episodes" / "step-000001.parquet")


def test_replay_changes_nothing_when_sampler_and_learner_agree(
    mixture: dict[str, Any], replayed: Path, tmp_path: Path
) -> None:
    plain = run_task(tmp_path / "plain", "rl", **mixture)
    differences = {change.path for change in compare_artifacts(plain, replayed)}
    assert all(path.startswith(("artifacts/episodes/", "artifacts/metrics.jsonl")) for path in differences)
    for line, before in zip(metrics(replayed), metrics(plain), strict=True):
        routing = {name: line.pop(name) for name in [*line] if name.startswith("routing/")}
        assert routing["routing/missing"] == routing["routing/flipped"] == 0
        assert line == before
    for episode in recorded(replayed):
        assert episode.routed_experts is not None and episode.routed_experts.dtype == np.uint8
        assert episode.routed_experts.shape == (len(episode.prompt_ids) + len(episode.token_ids) - 1, 2, 2)
    assert all(episode.routed_experts is None for episode in recorded(plain))


@pytest.mark.slow
def test_rollout_processes_return_routes(mixture: dict[str, Any], replayed: Path, tmp_path: Path) -> None:
    options = {"routing_replay": True, "asynchronous": {"staleness": 0}, **mixture}
    other = run_task(tmp_path / "asynchronous", "rl", **options)
    differences = {change.path for change in compare_artifacts(replayed, other)}
    assert differences <= {"artifacts/schedule.jsonl", "artifacts/metrics.jsonl"}
    assert metrics(other)[0]["routing/missing"] == 0


def test_memory_mapped_routes_survive_deletion_of_the_file(replayed: Path, tmp_path: Path) -> None:
    episodes = recorded(replayed)
    (path := tmp_path / "group.arrow").write_bytes(episodes_to_bytes(episodes))
    mapped = map_episodes(path)
    path.unlink()
    for episode, again in zip(episodes, mapped, strict=True):
        assert again.routed_experts is not None and not again.routed_experts.flags.owndata
        np.testing.assert_array_equal(episode.routed_experts, again.routed_experts)
        np.testing.assert_array_equal(episode.token_ids, again.token_ids)


def test_routing_replay_is_refused_for_dense_models() -> None:
    job = make_job("rl", routing_replay=True)
    with pytest.raises(RequestError, match="no experts"):
        plugin.describe(plugin.spec.model_validate(job.spec), job)


def test_sampler_check_replays_routes(tmp_path: Path) -> None:
    """Without replay, a flipped expert would look like a sampler error."""
    tokenizer, decoder = Tokenizer.characters(), new_model(MIXTURE, Tokenizer.characters(), seed=0)
    engine = Engine(decoder, slots=2)
    engine.record_routes()
    ((out,),) = engine.sample([Prompt(tokenizer.encode("1+2="), (0, 1, 0))], 1, SamplingParams(12))
    task = Task("task", ({"role": "user", "content": "1+2="},), {})
    routes = (out.routed_experts + 3) % 8
    episode = replace(
        Episode.from_completion(task, out, tokenizer), prompt_ids=np.array(tokenizer.encode("1+2="), np.int32)
    )
    flipped = replace(episode, routed_experts=routes)
    (batch,) = pack_each([flipped], 1000)
    replayed = token_logprobs(decoder, batch).numpy()
    assert np.abs(replayed - episode.logprobs).max() > 0.01
    np.testing.assert_allclose(rescore(decoder, flipped, 1.0), replayed, atol=1e-4)
    np.testing.assert_allclose(rescore(decoder, episode, 1.0), episode.logprobs, atol=1e-4)
    watch = GoldWatch(Workspace(make_bundle(tmp_path / "bundle", make_job("rl"))), lambda: decoder, 1.0, 4096)
    kl = [watch.observe(1, [[replace(x, metrics={"gold": 1.0})]])["kl_start"] for x in (flipped, episode)]
    assert kl[0] == kl[1]  # the starting policy uses its own routes
