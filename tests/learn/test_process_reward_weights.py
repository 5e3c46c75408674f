"""Effect of process rewards on the token weights of a group."""

from dataclasses import replace

import numpy as np
import pytest
from learning_cases import episode

from perilune.data.episode import Episode
from perilune.learn.advantages import token_rewards
from perilune.learn.algorithms import RL_ALGORITHMS, StepContext, algorithm
from perilune.learn.process_rewards import (
    AnswerValues,
    MonteCarloValues,
    apply_process_rewards,
    reward_segments,
)
from perilune.learn.weights import WeightedGroup, step_figures

CONTEXT = StepContext(max_tokens=8)


def with_steps(one: Episode, ends: dict[int, float]) -> Episode:
    """The episode with step rewards; `ends` maps the end of a segment to its reward."""
    rewards = np.full(len(one.token_ids), np.nan, np.float32)
    for end, earned in ends.items():
        rewards[end - 1] = earned
    return replace(one, step_rewards=rewards)


def pair() -> list[Episode]:
    """A right and a wrong answer, with prefix values 0.5, 0.75 and 0.5, 0.25 before the last segment."""
    right = with_steps(episode(1.0, tokens=(4, 5, 6), name="0/0/0"), {2: 0.25, 3: -0.75})
    wrong = with_steps(episode(0.0, tokens=(4, 7, 7, 6), name="0/0/1"), {1: -0.25, 4: -0.25})
    return [right, wrong]


def weighted(group: list[Episode], settings, name: str = "dr_grpo", **options) -> WeightedGroup:
    chosen = algorithm(name, **{"aggregation": "token-mean", **options})
    (result,) = apply_process_rewards(chosen.weight_groups([group], CONTEXT), chosen, CONTEXT, settings)
    return result


def weights(group: WeightedGroup) -> list[list[float]]:
    assert group.policy_gradient is not None
    return [of.tolist() for of in group.policy_gradient.weights]


def test_monte_carlo_values_worked_example() -> None:
    group = weighted(pair(), MonteCarloValues())
    assert weights(group) == [
        [0.25, 0.25, 0.25],
        [-0.25, -0.25, -0.25, -0.25],
    ]  # r + V' - V, V = 0 at the end


def test_answer_values_as_bonus_worked_example() -> None:
    group = weighted(pair(), AnswerValues())
    z = 0.2 * 0.25 / (np.std([0.25, -0.25], ddof=1) + 1e-4)
    expected = [
        [0.5 + z, 0.5 + z, 0.5],
        [-0.5 - z, -0.5, -0.5, -0.5],
    ]  # the last segment gets only the outcome
    for actual, target in zip(weights(group), expected, strict=True):
        assert actual == pytest.approx(target, abs=1e-6)
    assert group.advantages is not None and group.advantages.tolist() == [0.5, -0.5]  # of the outcome alone


def test_answer_values_as_trace_worked_example() -> None:
    group = weighted(pair(), AnswerValues(role="trace"))
    # returns: 0.25 + 0.25, 0.25 and -0.25 - 0.25, -0.25
    assert weights(group) == [[0.125, 0.125, -0.125], [-0.125, 0.125, 0.125, 0.125]]


def test_negligible_spread_of_process_rewards_adds_no_bonus() -> None:
    alike = [
        with_steps(episode(r, tokens=(4, 5), name=f"0/0/{i}"), {1: 0.2 + 1e-5 * i, 2: -0.2})
        for i, r in enumerate((1.0, 0.0))
    ]
    assert weights(weighted(alike, AnswerValues())) == [[0.5, 0.5], [-0.5, -0.5]]


def test_process_rewards_give_weights_to_dead_groups() -> None:
    dead = [replace(answer, reward=0.0) for answer in pair()]
    assert weighted(dead, None).dead
    for settings in (AnswerValues(), AnswerValues(dead_only=True)):
        group = weighted(dead, settings)
        assert not group.dead
        assert weights(group)[0][0] > 0 > weights(group)[1][0]
    assert weights(weighted(pair(), AnswerValues(dead_only=True))) == weights(weighted(pair(), None))
    still = [
        with_steps(answer, {len(answer.token_ids): -0.5}) for answer in dead
    ]  # only final answers, no reasoning segments
    assert weighted(still, AnswerValues()).dead


def test_episodes_without_process_rewards_keep_their_weights() -> None:
    plain = replace(pair()[0], step_rewards=None, episode_id="0/0/2", reward=0.0)
    failed = replace(pair()[1], reward=None, failure="verifier: hung", episode_id="0/0/3")
    group = [*pair(), plain, failed]
    before, after = weighted(group, None), weighted(group, MonteCarloValues())
    assert weights(after)[2:] == weights(before)[2:]
    assert not np.any(weights(after)[3])
    assert after.figures["process/without"] == pytest.approx(1 / 3)
    nobody = weighted([replace(answer, step_rewards=None) for answer in pair()], AnswerValues())
    assert weights(nobody) == weights(weighted(pair(), None))
    assert nobody.figures == {"process/without": 1.0}


def test_masked_tokens_get_no_process_reward_weight() -> None:
    group = [
        with_steps(episode(r, tokens=(4, 5, 6), mask=(True, False, True), name=f"0/0/{i}"), {1: m, 3: -m})
        for i, (r, m) in enumerate([(1.0, 0.5), (0.0, 0.1)])
    ]
    for settings in (AnswerValues(), MonteCarloValues(), AnswerValues(role="trace")):
        assert [row[1] for row in weights(weighted(group, settings))] == [0.0, 0.0]


def test_process_rewards_leave_masked_truncated_answers_at_zero() -> None:
    cut = replace(pair()[1], finish_reason="length")
    for settings in (AnswerValues(), MonteCarloValues()):
        assert not np.any(weights(weighted([pair()[0], cut], settings, mask_truncated=True))[1])


@pytest.mark.parametrize(
    "name", [name for name, kind in RL_ALGORITHMS.items() if not kind.takes_step_rewards]
)
def test_answer_values_add_a_bonus_to_every_group_algorithm(name: str) -> None:
    if name in ("dgpo",):
        signals = {
            signal: {answer.episode_id: np.ones(len(answer.token_ids), np.float32) for answer in pair()}
            for signal in ("deviation", "uncertainty")
        }
        context = replace(CONTEXT, signals=signals)
    else:
        context = CONTEXT
    chosen = algorithm(name)
    group = pair()
    before = chosen.weight_groups([group], replace(context, memory={}))
    (after,) = apply_process_rewards(before, chosen, replace(context, memory={}), AnswerValues())
    assert after.policy_gradient is not None and before[0].policy_gradient is not None
    assert after.policy_gradient.counts == before[0].policy_gradient.counts
    assert after.surrogate == before[0].surrogate
    assert after.policy_gradient.weights[0][0] > before[0].policy_gradient.weights[0][0]
    assert after.policy_gradient.weights[0][2] == before[0].policy_gradient.weights[0][2]


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "reinforce_pp_baseline"])
def test_token_rewards_include_step_rewards(name: str) -> None:
    assert RL_ALGORITHMS[name].takes_step_rewards
    np.testing.assert_allclose(token_rewards(pair()[0], 1.0), [0.0, 0.25, 0.25])


def test_process_reward_metrics() -> None:
    figures = weighted([*pair(), replace(pair()[0], episode_id="0/0/2")], AnswerValues()).figures
    assert figures["process/without"] == 0
    assert figures["process/segments"] == 2
    assert figures["process/agreement"] == 1.0  # last values: 0.75 of the right, 0.25 of the wrong one
    assert figures["process/setbacks"] == 0.0
    assert figures["process/std"] == pytest.approx(np.std([0.25, -0.25, 0.25], ddof=1))
    scaled = [replace(one, reward=0.5 * one.reward, metrics={"gold": one.reward}) for one in pair()]
    assert weighted(scaled, AnswerValues()).figures["process/agreement"] == 1.0
    explored = [with_steps(pair()[0], {1: -0.3, 2: 0.5, 3: -0.7}), pair()[1]]
    lost = weighted(explored, AnswerValues())
    assert lost.figures["process/setbacks"] == 0.5  # the right answer has one segment with a negative reward
    assert step_figures([lost, weighted(pair(), AnswerValues())])["process/setbacks"] == 0.25


def test_segments_of_an_episode() -> None:
    assert reward_segments(episode()) is None
    segments = reward_segments(with_steps(episode(tokens=(1, 2, 3, 4)), {1: 0.0, 3: -0.5}))
    assert segments is not None
    assert segments[0] == [1, 4]  # trailing tool tokens belong to the last segment
    assert segments[1].tolist() == [0.0, -0.5]
