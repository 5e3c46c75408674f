"""The preflight checks gradients and advantages. Before a long run it must also solve a bandit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_in_learning import gradients_scaled_twice, loss_has_the_wrong_sign, micro_batch_forgotten
from task_cases import metrics, run_task

from perilune.errors import WorkFailedError
from perilune.learn.algorithms import RL_ALGORITHMS
from perilune.learn.algorithms.group_relative import GRPO
from perilune.learn.weights import COMPONENTS
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.config.rope import Rope
from perilune.tasks.checks import gradient
from perilune.tasks.checks.advantages import check_advantages
from perilune.tasks.checks.bandit import solve_bandit
from perilune.tasks.checks.gradient import check_gradient
from perilune.tasks.checks.preflight import MIN_LONG_RUN_STEPS
from perilune.tasks.checks.twin import Twin
from perilune.tasks.rl.spec import RLSpec

KINDS = ["grpo", "cispo", "dgpo", "gigpo", "gspo", "pkpo", "ppo", "reinforce_pp", "toggle"]


def spec(**options: Any) -> RLSpec:
    return RLSpec.model_validate({"checkpoint": "model", **options})


@pytest.mark.parametrize("algorithm", KINDS)
def test_every_algorithm_solves_the_bandit(algorithm: str) -> None:
    message = solve_bandit(
        spec(algorithm=algorithm, kl=0.05, temperature=0.7, updates_per_batch=2), torch.device("cpu")
    )
    assert f"{algorithm} solved a bandit in" in message


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": {"name": "ppo", "critic_lr": 1e-3, "bootstrap_truncated": True, "entropy_bonus": 0.01}},
        {"algorithm": {"name": "rloo", "ratio": "sequence-product"}, "epochs_per_batch": 2},
        {"algorithm": "reinforce_pp", "kl": 0.05, "kl_estimator": "k1_reward", "schedule": "linear"},
        {"algorithm": "grpo", "kl": 0.05, "kl_estimator": "k3_corrected"},
    ],
)
def test_every_learning_option_solves_the_bandit(options: dict[str, Any]) -> None:
    assert "solved a bandit in" in solve_bandit(spec(**options), torch.device("cpu"))


def test_solve_bandit_does_not_change_the_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    solve_bandit(spec(algorithm="ppo"), torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("plant", [gradients_scaled_twice, micro_batch_forgotten, loss_has_the_wrong_sign])
def test_preflight_stops_a_long_run_with_a_wrong_gradient(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(
        WorkFailedError, match="gradient of the policy loss differs from an independent computation"
    ) as caught:
        run_task(tmp_path / "rl", "rl", steps=MIN_LONG_RUN_STEPS)
    assert caught.value.where == "preflight"
    assert metrics(tmp_path / "rl") == []


def test_solve_bandit_detects_inverted_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are negated, and everything after that is consistent."""
    right = GRPO.weight_group

    def turned(self: GRPO, group: Any, context: Any) -> Any:
        return right(self, [replace(episode, reward=-episode.reward) for episode in group], context)

    monkeypatch.setattr(GRPO, "weight_group", turned)
    with pytest.raises(WorkFailedError, match="grpo does not learn: in 40 steps"):
        solve_bandit(spec(), torch.device("cpu"))


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": False},
    "olmo2": {},
    "gemma3_text": {
        "windows": (3, 3, None), "local_rope": Rope(100.0), "query_pre_attn_scalar": 48, "head_dim": 256,
        "logit_softcap": 30.0,
    },
    "qwen3_moe": {"experts": Experts(8, 2, 64, dense_layers=(1,))},
    "glm4_moe": {
        "experts": Experts(8, 2, 64, dense_layers=(0,), shared_size=64, groups=2),
        "rope": Rope(1e4, None, 0.5),
    },
    "gpt_oss": {"experts": Experts(8, 2, 160), "windows": (3, None, 3)},
    "gemma2": {"score_softcap": 5.0, "windows": (3, None, 3)},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_check_gradient_passes_for_every_model_family(family: str) -> None:
    sizes = {
        "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 160, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 64,
    }  # fmt: skip
    config = DecoderConfig(architecture=family, **{**sizes, **FAMILIES[family]})  # type: ignore[arg-type]
    lora: dict[str, Any] = {"rank": 8}
    if config.family.fused_experts:
        lora["targets"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for options in ({"kl": 0.1, "algorithm": "ppo"}, {"kl": 0.1, "algorithm": "gspo", "lora": lora}):
        check_gradient(Twin(spec(**options), config, torch.device("cpu")))


@pytest.mark.parametrize("algorithm", [*RL_ALGORITHMS])
def test_check_advantages_and_gradient_pass_for_every_algorithm(algorithm: str) -> None:
    twin = Twin(spec(algorithm=algorithm, kl=0.05, temperature=0.7), PRESETS["tiny"], torch.device("cpu"))
    check_advantages(twin)
    check_gradient(twin)


def test_gradient_check_covers_every_loss_component() -> None:
    assert set(gradient._LOSSES) == set(gradient._LABELS) == set(COMPONENTS)
