"""Several processes learn what one learns: to the bit where each keeps the weights, else to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
from learning_cases import random_groups, small_decoder, weighed
from process_cases import together

from perilune.learn.batch import PackedBatch, pack
from perilune.learn.processes import ALONE, Processes
from perilune.learn.settings import OptimizerSettings
from perilune.learn.trainer import Learner, with_reference
from perilune.learn.weights import Aggregation, aggregate

SETTINGS = OptimizerSettings(lr=1e-2, weight_decay=0.1, grad_clip=0.5)
TOLERANCE = 1e-6  # of sharded training, relative to the largest number of a tensor

Steps = list[list[PackedBatch]]
Learned = tuple[list[dict[str, float]], dict[str, np.ndarray]]


def steps_of(mode: Aggregation) -> Steps:
    """Three steps: eleven micro-batches, one (fewer than processes), and none."""
    made = []
    for seed, (groups, budget) in enumerate([(6, 14), (1, 1000), (0, 10)]):
        some = weighed("grpo", random_groups(seed, groups), kl=0.1)
        constant = 8 if mode == "seq-mean-token-sum-norm" else None
        some = [
            replace(
                one,
                policy_gradient=aggregate(
                    one.episodes, one.advantages.astype(float), mode, constant=constant
                ),
            )
            for one in some
        ]
        made.append(pack(some, budget))
    return made


def learn(processes: Processes, steps: Steps) -> Learned:
    """Figures of every step, and weights and moments at the end."""
    learner = Learner(small_decoder(), SETTINGS, processes=processes)
    reference = small_decoder(1)
    figures = []
    for batches in steps:
        found = learner.forward_backward(with_reference(batches, reference, processes))
        figures.append(found | learner.optim_step(1e-2))
    return figures, state_of(learner)


def state_of(learner: Learner) -> dict[str, np.ndarray]:
    own = learner.optimizer
    state = {f"first/{n}": t for n, t in own.first.items()} | {
        f"second/{n}": t for n, t in own.second.items()
    }
    if learner._sharded is not None:
        state = {
            f"{kind}/{name}": tensor
            for kind, moments in (("first", own.first), ("second", own.second))
            for name, tensor in learner._sharded.whole(moments).items()
        }
    state |= {name: p.detach() for name, p in learner.decoder.named_parameters()}
    return {name: tensor.numpy() for name, tensor in state.items()}


def every_mode(processes: Processes) -> dict[str, Learned]:
    return {mode: learn(processes, steps_of(mode)) for mode in get_args(Aggregation)}


def test_the_number_of_processes_changes_no_bit() -> None:
    alone = every_mode(ALONE)
    for learned in together(every_mode) + together(every_mode, count=3)[2:]:
        for mode, (figures, state) in alone.items():
            assert learned[mode][0] == figures, mode
            for name, tensor in state.items():
                assert np.array_equal(learned[mode][1][name], tensor), (mode, name)
