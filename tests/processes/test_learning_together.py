"""Training in several processes equals training in one: bitwise with replicated weights, else to rounding."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from learning_cases import random_groups, small_critic, small_decoder, weighted_groups
from process_cases import together

from perilune.errors import ProcessLostError, WorkFailedError
from perilune.learn.adaptation import adapt
from perilune.learn.batch import PackedBatch, pack
from perilune.learn.checkpoints import read
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.trainer import Learner, add_reference_logprobs
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.learn.weights import Aggregation, aggregate

pytestmark = pytest.mark.slow

SETTINGS = OptimizerSettings(lr=1e-2, weight_decay=0.1, grad_clip=0.5)
SETTINGS_OF_A_LEARNER = {
    "lora": {"lora": {"rank": 2}},
    "bfloat16": {"precision": "bfloat16"},
    "recomputing": {"activation_checkpointing": True},
}
KINDS = ("weights", "first_moments", "second_moments")
TOLERANCE = 5e-6  # of sharded training, relative to the largest element of a tensor

Found = dict[str, Any]
Learned = tuple[list[dict[str, float]], dict[str, np.ndarray]]


def steps_of(mode: Aggregation) -> list[list[PackedBatch]]:
    """Three steps: eleven micro-batches, one (fewer than processes), and none."""
    made = []
    for seed, (groups, budget) in enumerate([(6, 14), (1, 1000), (0, 10)]):
        some = weighted_groups("grpo", random_groups(seed, groups), kl=0.1)
        constant = 8 if mode == "seq-mean-token-sum-norm" else None
        some = [
            replace(
                batch,
                policy_gradient=aggregate(
                    batch.episodes, batch.advantages.astype(float), mode, constant=constant
                ),
            )
            for batch in some
        ]
        made.append(pack(some, budget))
    return made


def learn(ranks: Ranks, mode: Aggregation) -> Learned:
    """Metrics of every step, and the final weights and moments."""
    learner = Learner(small_decoder(), SETTINGS, ranks=ranks)
    reference = small_decoder(1)
    figures = []
    for batches in steps_of(mode):
        metrics = learner.forward_backward(add_reference_logprobs(batches, reference, ranks))
        figures.append(metrics | learner.optim_step(1e-2))
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
            for name, tensor in learner._sharded.gather(moments).items()
        }
    state |= {name: p.detach() for name, p in learner.decoder.named_parameters()}
    return {name: tensor.numpy() for name, tensor in state.items()}


def every_mode(ranks: Ranks) -> dict[str, Learned]:
    return {mode: learn(ranks, mode) for mode in get_args(Aggregation)}


def test_number_of_processes_changes_no_bit(three: list[Found]) -> None:
    for mode, (figures, state) in every_mode(SINGLE_RANK).items():
        for result in three:
            assert result["modes"][mode][0] == figures, mode
            for name, tensor in state.items():
                assert np.array_equal(result["modes"][mode][1][name], tensor), (mode, name)


def every_setting(ranks: Ranks) -> dict[str, dict[str, np.ndarray]]:
    """The state after one step with each learner setting."""
    states = {}
    for name, section in SETTINGS_OF_A_LEARNER.items():
        decoder = small_decoder()
        adapt(decoder, LearnerSettings.model_validate(section), seed=0)
        learner = Learner(decoder, SETTINGS, ranks=ranks)
        learner.forward_backward(pack(weighted_groups("grpo", random_groups(0, 6)), 14))
        learner.optim_step(1e-2)
        states[name] = state_of(learner)
    return states


def test_lora_bfloat16_and_recomputing_are_bitwise_equal_to_one_process(three: list[Found]) -> None:
    for name, state in every_setting(SINGLE_RANK).items():
        for result in three:
            learned = result["settings"][name]
            assert all(np.array_equal(learned[key], tensor) for key, tensor in state.items()), name


def test_sharded_training_matches_one_process_to_rounding(cut: list[Found]) -> None:
    figures, state = learn(SINGLE_RANK, "token-mean")
    for result in cut:
        others, learned = result["modes"]["token-mean"]
        for row, other in zip(figures, others, strict=True):
            assert row.keys() == other.keys()
            for name, value in row.items():
                assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        for name, tensor in state.items():
            assert np.abs(learned[name] - tensor).max() <= TOLERANCE * np.abs(tensor).max(), name


def save_and_load(ranks: Ranks, folder: Path) -> tuple[list[str], bool, dict[str, np.ndarray]]:
    """Train a learner with a critic, save it, load it into a new learner, and continue training."""
    batches = pack(weighted_groups("ppo", random_groups(3, 5)), 14)
    learner = Learner(small_decoder(), SETTINGS, critic=small_critic(small_decoder()), ranks=ranks)
    learner.forward_backward(batches)
    learner.optim_step(1e-2)
    directory = folder / "checkpoint"
    learner.save_state(directory, {"step": 1})
    ranks.check_same("save", "done")
    again = Learner(small_decoder(3), SETTINGS, critic=small_critic(small_decoder()), ranks=ranks)
    elsewhere = ranks.sharded and not ranks.leads  # another machine has no checkpoint
    again.load_state(folder / "missing" if elsewhere else directory)
    same = all(np.array_equal(tensor, state_of(again)[name]) for name, tensor in state_of(learner).items())
    again.forward_backward(batches)
    again.optim_step(1e-2)
    return (
        [name for kind in read(directory, KINDS)[0].values() for name in sorted(kind)],
        same,
        state_of(again),
    )


def test_checkpoint_equals_that_of_one_process(three: list[Found], cut: list[Found], tmp_path: Path) -> None:
    names, same, state = save_and_load(SINGLE_RANK, tmp_path)
    assert same
    for number, result in enumerate((*three, *cut)):
        others, equal, learned = result["saved"]
        assert equal
        assert others == names
        for key, tensor in state.items():
            limit = TOLERANCE * np.abs(tensor).max() if number >= len(three) else 0
            assert np.abs(learned[key] - tensor).max() <= limit, key


def learn_non_finite(ranks: Ranks) -> None:
    """The last micro-batch has NaN weights; only one process computes it."""
    *good, last = steps_of("token-mean")[0]
    assert last.policy_gradient is not None
    broken = replace(last, policy_gradient=last.policy_gradient * float("nan"))
    learner = Learner(small_decoder(), SETTINGS, ranks=ranks)
    learner.forward_backward(add_reference_logprobs([*good, broken], small_decoder(1), ranks))
    learner.optim_step(1e-2)


def test_non_finite_gradient_in_one_process_stops_all_with_same_error(
    three: list[Found], cut: list[Found]
) -> None:
    with pytest.raises(WorkFailedError) as alone:
        learn_non_finite(SINGLE_RANK)
    assert {result["said"] for result in (*three, *cut)} == {str(alone.value)}


def shard(ranks: Ranks) -> tuple[bool, int]:
    """Whether sharding and publishing change no bit, and the elements of this process's shards."""
    learner = Learner(small_decoder(), SETTINGS, ranks=ranks)
    assert learner._sharded is not None
    for parameter in learner.decoder.parameters():
        parameter.data.zero_()
    learner._sharded.publish(learner.decoder)
    expected = dict(small_decoder().named_parameters())
    same = all(torch.equal(tensor, expected[name]) for name, tensor in learner.decoder.named_parameters())
    return same, sum(tensor.numel() for tensor in learner._sharded.parameters.values())


def test_sharding_and_publishing_change_no_bit(cut: list[Found]) -> None:
    whole = sum(parameter.numel() for parameter in small_decoder().parameters())
    assert [result["sharded"][0] for result in cut] == [True, True]
    assert sum(result["sharded"][1] for result in cut) == whole


def all_results(ranks: Ranks, folder: Path) -> Found:
    """All results of one process; a single call, because processes are slow to start."""
    result: Found = {"saved": save_and_load(ranks, folder)}
    if ranks.sharded:
        result["modes"] = {"token-mean": learn(ranks, "token-mean")}
        result["sharded"] = shard(ranks)
    else:
        result |= {"modes": every_mode(ranks), "settings": every_setting(ranks)}
    try:
        learn_non_finite(ranks)
    except WorkFailedError as error:
        result["said"] = str(error)
    return result


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return together(all_results, tmp_path_factory.mktemp("three"), count=3)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return together(all_results, tmp_path_factory.mktemp("cut"), sharded=True)


def die_while_learning(ranks: Ranks) -> None:
    """Kill the second process before it sends its gradient, for which the first process waits."""
    learner = Learner(small_decoder(), SETTINGS, ranks=ranks)
    for _ in learner._rank_batches(steps_of("token-mean")[0]):
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_waiting_process_reports_killed_process_at_once() -> None:
    waited, killed = together(die_while_learning)
    assert isinstance(killed, EOFError)
    assert isinstance(waited, ProcessLostError)
    # The first process may already notice while it sends its own gradient to the second.
    assert re.search(
        r"another process ended while process \d waited for the gradient of micro-batch [12]", str(waited)
    )


def check_what_differs(ranks: Ranks) -> None:
    ranks.check_same("weights", f"sum {ranks.rank}")


def test_diverging_processes_are_stopped() -> None:
    for error in together(check_what_differs):
        assert isinstance(error, WorkFailedError)
        assert "no longer agree on the weights: process 0 has sum 0, process 1 has sum 1" in str(error)
