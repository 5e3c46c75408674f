"""Unit tests of the checks of an rl stage: valid cases they accept and faults they name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_cases import DIGITS
from task_environments import Digits
from torch import nn

from perilune.data.episode import Episode
from perilune.errors import WorkFailedError
from perilune.learn.batch import pack_each
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import OptimizerSettings
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule, Experts, Latent
from perilune.models.decoder import Decoder
from perilune.tasks.checks.epochs import EpochChecker
from perilune.tasks.checks.logprobs import LogprobChecker
from perilune.tasks.checks.optimizer import OptimizerChecker
from perilune.tasks.checks.twin import _scaled_down

TINY = PRESETS["tiny"]
ROUTED = Experts(16, 6, 48, groups=8, groups_per_token=4, shared_size=96, scale=2.0)
LATENT = TINY.replace(
    architecture="deepseek_v3", num_kv_heads=4, head_dim=24, latent=Latent(40, 8, 16, 12, 20), experts=ROUTED
)
LINEAR = TINY.replace(architecture="qwen3_5_text", delta=DeltaRule((0, 2), 2, 6, 8, 12))
MIXTRAL = TINY.replace(architecture="mixtral", experts=Experts(8, 2, TINY.intermediate_size))


@pytest.mark.parametrize("config", [LATENT, LINEAR, MIXTRAL], ids=lambda config: config.architecture)
def test_scaled_down_model_keeps_its_family(config: DecoderConfig) -> None:
    small = _scaled_down(config)
    assert (small.architecture, small.num_layers) == (config.architecture, config.num_layers)
    assert DecoderConfig.from_hf(small.to_hf()) == small
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Decoder(small).parameters())
    assert parameters < 60_000


class Repeating(Digits):
    """Repeats tasks: the cycle has ten tasks, and every fifth task comes twice in a row."""

    def tasks(self, split: Any, seed: int) -> Any:
        few = [task for task, _ in zip(super().tasks(split, seed), range(10), strict=False)]
        for number in range(10**6):
            yield few[number % 10]
            if number % 5 == 0:
                yield few[number % 10]


def groups_of(tasks: list[str]) -> list[tuple[Episode, ...]]:
    none = np.zeros(0, np.int32)
    return [
        (
            Episode(
                f"1/{index}/0",
                f"1/{index}",
                task,
                "e",
                0,
                (),
                none,
                none,
                none.astype(bool),
                none,
                none,
                "stop",
            ),
        )
        for index, task in enumerate(tasks)
    ]


def check_epochs(environment: Digits, ids: list[str], taken: int = 0, size: int = 7) -> None:
    checker = EpochChecker(environment, 1, taken)
    for start in range(taken, len(ids), size):
        checker.check(groups_of(ids[start : start + size]), start)


def test_epoch_checker_allows_environments_with_repeated_tasks() -> None:
    environment = Repeating({**DIGITS})
    stream = environment.tasks("train", 1)
    ids = [next(stream).task_id for _ in range(100)]
    check_epochs(environment, ids)
    with pytest.raises(WorkFailedError, match="repeats within its epoch"):
        check_epochs(environment, [*ids[:50], ids[50], *ids[50:]])


@pytest.mark.parametrize("taken", [0, 3, 12, 15, 40])
def test_epoch_checker_allows_each_task_once_per_epoch(taken: int) -> None:
    environment = Digits({**DIGITS, "limit": 16})
    own = [task.task_id for task in environment.tasks("train", 1)]
    random = np.random.default_rng(0)
    ids = [*own, *(name for _ in range(4) for name in random.permutation(own).tolist())]
    check_epochs(environment, ids, taken)
    twice = [*ids]
    twice[-1] = ids[-2]
    with pytest.raises(WorkFailedError, match="repeats within its epoch"):
        check_epochs(environment, twice, taken)


SMALL = TINY.replace(num_layers=1, hidden_size=16, intermediate_size=16, vocab_size=16)
BIASED = DecoderConfig(
    "gpt_oss", vocab_size=16, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=8, tie_word_embeddings=False, attention_bias=True,
    experts=Experts(count=2, per_token=1, intermediate_size=8, normalized=True),
)  # fmt: skip


def learner(config: DecoderConfig = SMALL) -> Learner:
    decoder = Decoder(config)
    decoder.initialize(0)
    return Learner(decoder, SETTINGS)


SETTINGS = OptimizerSettings(lr=0.01, beta2=0.95, weight_decay=0.1, grad_clip=0.5)


def update(learner: Learner, checker: OptimizerChecker, lr: float, size: float) -> None:
    random = torch.Generator().manual_seed(learner.version)
    for index, parameter in enumerate(learner.optimizer.parameters.values()):
        if (index + learner.version) % 3:  # some have no gradient at a step
            parameter.grad = size * torch.randn(parameter.shape, generator=random)
    with checker.check_update(lr):
        learner.optim_step(lr)


def test_optimizer_checker_accepts_gradients_of_any_size() -> None:
    fresh = learner()
    checker = OptimizerChecker(fresh, SETTINGS)
    for step, size in enumerate([1.0, 1e-3, 1e-8, 1e-20, 0.0, 1e3, 1e-12, 1.0]):
        update(fresh, checker, 0.01 / (step + 1), size)


def test_optimizer_checker_expects_no_decay_of_the_biases_of_experts() -> None:
    fresh = learner(BIASED)
    stacked = {
        name: p for name, p in fresh.optimizer.parameters.items() if p.ndim > 1 and name.endswith("bias")
    }
    assert stacked
    for parameter in stacked.values():
        nn.init.ones_(parameter)
    checker = OptimizerChecker(fresh, SETTINGS)
    for _ in range(4):
        update(fresh, checker, 0.01, 1.0)


def test_gap_is_reported_if_every_episode_has_tokens_of_an_older_version() -> None:
    fresh = learner()
    fresh.version = 1
    tokens = np.array([3, 4], np.int32)
    mixed = Episode(
        "1/0/0", "1/0", "t", "e", 0, (), tokens, tokens, np.ones(2, bool), np.array([-9, -9], np.float32),
        np.array([0, 1], np.int32), "stop", reward=0.0,
    )  # fmt: skip
    gap = {"logprob_gap_max": 6.0, "logprob_gap_mean": 6.0, "logprob_gap_kl": 6.0}
    with pytest.raises(WorkFailedError, match="sampler and learner differ by up to 6 nats"):
        LogprobChecker(fresh, 1.0).check_learner(gap, pack_each([mixed], 64), [[mixed]], 0)


@pytest.mark.parametrize("what", ["weights", "first moments", "second moments"])
def test_optimizer_checker_names_state_changed_between_updates(what: str) -> None:
    fresh = learner()
    checker = OptimizerChecker(fresh, SETTINGS)
    update(fresh, checker, 0.01, 1.0)
    of: dict[str, dict[str, Any]] = {
        "weights": fresh.optimizer.parameters, "first moments": fresh.optimizer.first,
        "second moments": fresh.optimizer.second,
    }  # fmt: skip
    name = max(fresh.optimizer.first, key=lambda name: float(fresh.optimizer.first[name].norm()))
    state = of[what][name]
    (state.data if isinstance(state, nn.Parameter) else state).mul_(0.5)
    with pytest.raises(WorkFailedError, match=f"the {what} of {name} changed between two updates"):
        update(fresh, checker, 0.01, 1.0)


def test_slow_reward_is_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from task_cases import make_bundle, make_job

    from perilune.bundle.workspace import Workspace
    from perilune.tasks.checks import reward

    monkeypatch.setattr(reward, "AUDIT_LIMIT_S", 1e-6)
    workspace = Workspace(make_bundle(tmp_path / "bundle", make_job("rl")))
    reward.check_reward(workspace)
    assert not (workspace.artifacts / reward.AUDIT_FILE).exists()
    assert "the reward was not audited, because scoring an answer takes" in capsys.readouterr().out


def test_reward_audit_is_reused_by_later_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that restores artifacts keeps the audit of the earlier attempt."""
    from task_cases import make_bundle, make_job

    from perilune.bundle.workspace import Workspace
    from perilune.execution.placements.local import restore_outputs
    from perilune.tasks.checks.reward import AUDIT_FILE, check_reward

    monkeypatch.setattr("perilune.tasks.checks.reward.AUDIT_LIMIT_S", 1e9)
    first, second = (Workspace(make_bundle(tmp_path / name, make_job("rl"))) for name in ("a", "b"))
    check_reward(first)
    restore_outputs(first.artifacts, second.artifacts)
    written = (second.artifacts / AUDIT_FILE).stat().st_mtime_ns
    check_reward(second)
    assert (second.artifacts / AUDIT_FILE).stat().st_mtime_ns == written
    assert (second.artifacts / AUDIT_FILE).read_bytes() == (first.artifacts / AUDIT_FILE).read_bytes()
