"""AdamW and schedules against torch's own and by hand."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from perilune.errors import WorkFailedError
from perilune.learn.optimizer import AdamW
from perilune.learn.schedules import learning_rate
from perilune.learn.settings import OptimizerSettings


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_clip", [1e9, 0.5])
def test_equals_torch(weight_decay: float, grad_clip: float) -> None:
    torch.manual_seed(0)
    ours = {"matrix": nn.Parameter(torch.randn(5, 3)), "norm": nn.Parameter(torch.randn(4))}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    mine = AdamW(ours, beta2=0.98, weight_decay=weight_decay, grad_clip=grad_clip)
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
        assert mine.update(lr) == pytest.approx(norm.item(), rel=1e-5)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-7)
            assert parameter.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(bad: float) -> None:
    parameters = {"fine": nn.Parameter(torch.ones(2)), "broken": nn.Parameter(torch.ones(2))}
    optimizer = AdamW(parameters, beta2=0.99, weight_decay=0.0, grad_clip=1.0)
    parameters["fine"].grad = torch.ones(2)
    parameters["broken"].grad = torch.tensor([0.0, bad])
    with pytest.raises(WorkFailedError, match="gradient of broken is not finite"):
        optimizer.update(0.1)
    assert parameters["fine"].tolist() == [1.0, 1.0]
    assert optimizer.step == 0


def test_warm_up_then_cosine() -> None:
    settings = OptimizerSettings(lr=1.0, warmup=4, final_lr=0.1)
    rates = [learning_rate(settings, step, 14) for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))


def test_constant_by_default_and_short_runs_do_not_divide_by_zero() -> None:
    settings = OptimizerSettings(lr=2.0, warmup=0)
    assert [learning_rate(settings, step, 3) for step in range(3)] == [2.0] * 3
    assert learning_rate(OptimizerSettings(warmup=5), 0, 1) > 0
