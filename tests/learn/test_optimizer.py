"""AdamW and learning-rate schedules against torch and worked examples."""

from itertools import pairwise

import pytest
import torch
from learning_cases import random_groups, small_critic, small_decoder, weighted_groups
from torch import nn

from perilune.errors import WorkFailedError
from perilune.learn.batch import pack
from perilune.learn.optimizer import AdamW
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import OptimizerSettings


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_clip", [1e9, 0.5])
def test_adamw_equals_torch_adamw(weight_decay: float, grad_clip: float) -> None:
    torch.manual_seed(0)
    ours = {"matrix": nn.Parameter(torch.randn(5, 3)), "norm": nn.Parameter(torch.randn(4))}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = AdamW(ours, beta2=0.98, weight_decay=weight_decay, grad_clip=grad_clip)
    other = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"]], "weight_decay": weight_decay},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    for step in range(1, 20):
        lr = 1e-2 / step
        for name, parameter in ours.items():
            parameter.grad = torch.randn(parameter.shape)
            theirs[name].grad = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), grad_clip)
        for group in other.param_groups:
            group["lr"] = lr
        other.step()
        assert optimizer.update(lr) == pytest.approx(norm.item(), rel=1e-5)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-7)
            assert parameter.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_names_parameter_and_skips_update(bad: float) -> None:
    parameters = {"fine": nn.Parameter(torch.ones(2)), "broken": nn.Parameter(torch.ones(2))}
    optimizer = AdamW(parameters, beta2=0.99, weight_decay=0.0, grad_clip=1.0)
    parameters["fine"].grad = torch.ones(2)
    parameters["broken"].grad = torch.tensor([0.0, bad])
    with pytest.raises(WorkFailedError, match="gradient of broken is not finite"):
        optimizer.update(0.1)
    assert parameters["fine"].tolist() == [1.0, 1.0]
    assert optimizer.step == 0


def test_default_schedule_is_warmup_then_cosine() -> None:
    settings = OptimizerSettings(lr=1.0, warmup=4, final_lr=0.1)
    rates = [learning_rate(settings, step, 14) for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))


@pytest.mark.parametrize("final_lr", [0.0, 0.1, 1.0])
def test_schedules_equal_torch_schedulers(final_lr: float) -> None:
    """A LinearLR warm-up, then LinearLR, CosineAnnealingLR or a constant rate."""
    warmup, total = 4, 20
    for schedule in ("linear", "cosine", "constant"):
        settings = OptimizerSettings(lr=0.5, warmup=warmup, final_lr=final_lr, schedule=schedule)
        found = [learning_rate(settings, step, total) for step in range(total)]
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        after = {
            "linear": torch.optim.lr_scheduler.LinearLR(
                optimizer, 1.0, max(final_lr, 1e-9), total - 1 - warmup
            ),
            "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, total - 1 - warmup, eta_min=0.5 * final_lr
            ),
            "constant": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        }[schedule]
        optimizer.param_groups[0]["lr"] = 0.5
        expected = [0.5 * (step + 1) / warmup for step in range(warmup)]
        for _ in range(warmup, total):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            after.step()
        assert found == pytest.approx(expected, abs=1e-8), schedule


def test_lr_factors_scale_the_rate_of_one_parameter() -> None:
    parameters = {name: nn.Parameter(torch.ones(3, 2)) for name in ("decoder", "critic")}
    optimizer = AdamW(parameters, beta2=0.99, weight_decay=0.1, grad_clip=1e9, lr_factors={"critic": 5.0})
    theirs = {name: nn.Parameter(torch.ones(3, 2)) for name in parameters}
    groups = [{"params": [theirs["decoder"]], "lr": 1e-2}, {"params": [theirs["critic"]], "lr": 5e-2}]
    other = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(5):
        for parameter in (*parameters.values(), *theirs.values()):
            parameter.grad = torch.full((3, 2), float(step + 1))
        optimizer.update(1e-2)
        other.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-7)


def test_critic_lr_sets_the_rate_of_the_critic() -> None:
    decoder = small_decoder()
    critic = small_critic(decoder)
    before = [p.detach().clone() for p in (critic.head.weight, *decoder.parameters())]
    learner = Learner(decoder, OptimizerSettings(lr=1e-3), critic=critic, critic_lr=1e-2)
    learner.forward_backward(pack(weighted_groups("ppo", random_groups(0)), 50))
    learner.optim_step(5e-4)  # the schedule is at half of the peak
    after = (critic.head.weight, *decoder.parameters())
    moved = [float((a - b).detach().abs().max()) for a, b in zip(after, before, strict=True)]
    assert moved[0] == pytest.approx(
        5e-3, rel=1e-2
    )  # the first step of AdamW moves a weight by the learning rate
    assert max(moved[1:]) == pytest.approx(5e-4, rel=1e-2)


def test_schedule_is_constant_by_default_and_works_for_short_runs() -> None:
    settings = OptimizerSettings(lr=2.0, warmup=0)
    assert [learning_rate(settings, step, 3) for step in range(3)] == [2.0] * 3
    assert learning_rate(OptimizerSettings(lr=1.0, warmup=5), 0, 1) > 0


def test_stacked_biases_do_not_decay() -> None:
    """The biases of all experts of gpt-oss are one tensor with two axes."""
    parameters = {name: nn.Parameter(torch.ones(2, 3)) for name in ("down_proj", "down_proj_bias")}
    AdamW(parameters, beta2=0.99, weight_decay=0.5, grad_clip=1.0).update(0.1)
    assert parameters["down_proj"].max() < 1 and (parameters["down_proj_bias"] == 1).all()
