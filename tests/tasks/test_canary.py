"""Before a long run its algorithm must solve a bandit, with the gradient that can be written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_cases import metrics, run_task

from perilune.errors import WorkFailedError
from perilune.learn import losses
from perilune.learn.algorithms.grpo import GRPO
from perilune.learn.optimizer import AdamW
from perilune.learn.trainer import Learner
from perilune.tasks.canary import LONG, solve_bandit
from perilune.tasks.rl import RLSpec

ALGORITHMS = ["grpo", "cispo", "dgpo", "gspo", "pkpo", "ppo", "reinforce_pp", "toggle"]


def spec(**options: Any) -> RLSpec:
    return RLSpec.model_validate({"checkpoint": "model", **options})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_kind_of_algorithm_solves_it(algorithm: str) -> None:
    told = solve_bandit(
        spec(algorithm=algorithm, kl=0.05, temperature=0.7, updates_per_batch=2), torch.device("cpu")
    )
    assert f"{algorithm} solved a bandit in" in told


def test_it_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    solve_bandit(spec(algorithm="ppo"), torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


def gradients_scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """Weights have the denominator of the step, and the sum is divided by the micro-batches once more."""
    right = Learner.forward_backward

    def twice(self: Learner, batches: Any) -> dict[str, float]:
        figures = right(self, batches)
        for parameter in self.decoder.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(batches)
        return figures

    patch.setattr(Learner, "forward_backward", twice)


def micro_batch_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the last micro-batch replaces those of the others."""
    right = Learner._loss

    def alone(self: Learner, *args: Any) -> torch.Tensor:
        for parameter in self.decoder.parameters():
            parameter.grad = None
        return right(self, *args)

    patch.setattr(Learner, "_loss", alone)


def losses_have_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    right = losses.policy_gradient
    patch.setattr(losses, "policy_gradient", lambda *args: (-(found := right(*args))[0], found[1]))


@pytest.mark.parametrize("plant", [gradients_scaled_twice, micro_batch_forgotten, losses_have_the_wrong_sign])
def test_a_wrong_gradient_stops_a_long_run(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(WorkFailedError, match="gradient is not that of the weights") as caught:
        run_task(tmp_path / "rl", "rl", steps=LONG)
    assert caught.value.where == "canary"
    assert metrics(tmp_path / "rl") == []


def optimizer_climbs_the_loss(patch: pytest.MonkeyPatch) -> None:
    right = AdamW.update
    patch.setattr(AdamW, "update", lambda self, lr: right(self, -lr))


def rewards_count_the_other_way(patch: pytest.MonkeyPatch) -> None:
    """Nothing but the canary can know: all that follows is consistent."""
    right = GRPO.weigh_group

    def turned(self: GRPO, group: Any, context: Any) -> Any:
        return right(self, [replace(one, reward=-one.reward) for one in group], context)

    patch.setattr(GRPO, "weigh_group", turned)


@pytest.mark.parametrize("plant", [optimizer_climbs_the_loss, rewards_count_the_other_way])
def test_an_algorithm_that_unlearns_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(WorkFailedError, match="grpo does not learn: in 40 steps"):
        solve_bandit(spec(), torch.device("cpu"))
