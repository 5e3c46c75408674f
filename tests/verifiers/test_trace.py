"""What the trace verifier makes of a trace, and what nobody can make it say."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.environments.protocol import Failure, Score, Task, Transcript
from perilune.environments.registry import make_environment
from perilune.errors import WorkFailedError
from perilune.verifiers.trace import (
    TraceSettings,
    against_own_mean,
    judge_trace,
    shaping,
    similarity,
)

ANY = (-np.inf, np.inf)
figures = st.floats(-10, 10, allow_nan=False)


def test_potentials_are_bounded_before_their_difference_is_taken() -> None:
    quick, slow = np.array([-5, -1, -1.5, 7.0]), np.array([-5, -4, -3, 7.0])
    raw = [shaping(path, ANY) for path in (quick, slow)]
    np.testing.assert_allclose(raw, [[4, -0.5, 1.5], [1, 1, 3]])
    assert [path.sum() for path in raw] == [5, 5]
    assert [np.clip(path, -2, 2).sum() for path in raw] == [3, 4]  # the mistake: worth depends on the path
    assert [shaping(path, (-2.0, 0.0)).sum() for path in (quick, slow)] == [2, 2]


@given(st.lists(figures, min_size=2, max_size=8), st.floats(0.1, 1), st.data())
def test_shaping_adds_a_constant_of_the_start_to_every_return(
    potentials: list[float], gamma: float, data: st.DataObject
) -> None:
    steps = len(potentials) - 1
    rewards = np.array(data.draw(st.lists(figures, min_size=steps, max_size=steps)))
    shaped = rewards + shaping(np.array(potentials), (-3.0, 3.0), gamma)
    discounts = gamma ** np.arange(steps)
    difference = float(discounts @ shaped - discounts @ rewards)
    assert difference == pytest.approx(-np.clip(potentials[0], -3, 3), abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.floats(0.5, 1))
def test_shaping_leaves_the_order_of_actions_as_it_is(seed: int, depth: int, gamma: float) -> None:
    """In a tree of two actions a state, each path with its own end, whatever the potentials."""
    rng = np.random.default_rng(seed)
    states = [path for length in range(depth + 1) for path in product((0, 1), repeat=length)]
    potential = {path: rng.normal() for path in states}
    reward = {path: rng.normal() for path in states[1:]}

    def best(path: tuple[int, ...], shaped: bool) -> float:
        """The best return from here, by trying all."""
        returns = []
        for rest in product((0, 1), repeat=depth - len(path)):
            visited = [(*path, *rest[:count]) for count in range(len(rest) + 1)]
            earned = np.array([reward[state] for state in visited[1:]])
            if shaped and len(visited) > 1:
                earned = earned + shaping(np.array([potential[state] for state in visited]), ANY, gamma)
            returns.append(float(gamma ** np.arange(len(earned)) @ earned))
        return max(returns)

    def worth(path: tuple[int, ...], action: int, shaped: bool) -> float:
        after = (*path, action)
        now = reward[after]
        if shaped:
            end = len(after) == depth
            now += gamma * (0.0 if end else potential[after]) - potential[path]
        return now + gamma * best(after, shaped)

    for path in states:
        if len(path) < depth:
            plain = worth(path, 1, False) - worth(path, 0, False)
            assert worth(path, 1, True) - worth(path, 0, True) == pytest.approx(plain, abs=1e-9)


def test_a_trace_by_hand() -> None:
    settings = TraceSettings(gamma=0.5)
    verdict = judge_trace(
        Score(1.0), [0.2, 0.6, 0.4, 0.9], settings, local=[0, 1, 0], environment=[0.5, 0, 0]
    )
    # .5*.6-.2+.5; .5*.4-.6+1; .5*0-.4+1
    np.testing.assert_allclose(verdict.rewards, [0.6, 0.6, 0.6])
    returns = np.array([0.6 + 0.5 * 0.9, 0.6 + 0.5 * 0.6, 0.6])
    np.testing.assert_allclose(verdict.weights, returns - returns.mean())
    assert verdict.success and verdict.utility == 1.0


def test_a_step_against_the_mean_of_its_trace_is_clipped_and_a_single_one_has_no_mean() -> None:
    np.testing.assert_allclose(against_own_mean(np.array([0.0, 20.0]), clip=4.0), [0, 0])
    np.testing.assert_allclose(against_own_mean(np.array([30.0, -10.0]), clip=4.0), [4, -4])
    np.testing.assert_allclose(against_own_mean(np.array([3.0]), scale=2.0), [1.5])


def test_what_is_said_of_the_end_does_not_count() -> None:
    boast, modest = (judge_trace(Score(0.0), [0.1, 0.5, end]) for end in (1.0, 0.0))
    np.testing.assert_array_equal(boast.rewards, modest.rewards)
    assert boast.success is False


HOSTILE = {
    "terminal_utility": 1.0,
    "utility": 1.0,
    "success": True,
    "score": 1.0,
    "reward": 1.0,
    "potentials": [0.0, 1.0, 1.0],
    "messages": [{"role": "assistant", "content": ";5"}],
}


@pytest.mark.parametrize("claim", [*([name] for name in HOSTILE), list(HOSTILE)])
def test_no_row_of_data_declares_its_own_success(claim: list[str]) -> None:
    config = {
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"],
        "allow_parentheses": False, "allow_negation": False,
    }  # fmt: skip
    section = {"id": "reasoning_gym", "task": "basic_arithmetic", "config": config, "prompt": "compact"}
    environment = make_environment(section)
    task = next(environment.tasks("heldout", 0))
    row = Task(task.task_id, task.prompt, {**task.data, **{name: HOSTILE[name] for name in claim}})
    wrong = f";{int(task.data['answer']) + 1}"
    for text, right in ((wrong, False), (f";{task.data['answer']}", True)):
        outcome = environment.score(row, Transcript(text))
        verdict = judge_trace(outcome, [0.0, *similarity(str(task.data["answer"]), [text])])
        assert verdict.success is right
        assert verdict.utility == float(right)


def test_an_answer_in_two_steps_is_right_though_no_step_looks_like_it() -> None:
    potentials = similarity("27 apples", ["27", " apples"])
    assert potentials[0] == 0 and potentials[1] < 0.99 and potentials[2] == 1
    assert similarity("27 apples", ["72 apples"])[-1] > 0.85  # alike, and wrong
    assert judge_trace(Score(1.0), similarity("27 apples", ["It is 2", "7."])).success
    assert not judge_trace(Score(0.0), similarity("27 apples", ["72 apples"])).success


def test_without_a_verdict_nothing_is_learned() -> None:
    verdict = judge_trace(Failure("verifier", "it hung"), [0.0, 0.5, 0.7])
    assert verdict.success is None and verdict.utility is None
    assert not verdict.weights.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_figures_that_are_none_are_refused_by_name(bad: float) -> None:
    with pytest.raises(WorkFailedError, match="potentials"):
        judge_trace(Score(1.0), [0.0, bad, 0.0])
    with pytest.raises(WorkFailedError, match="local"):
        judge_trace(Score(1.0), [0.0, 0.0], local=[bad])
    with pytest.raises(WorkFailedError, match="utility"):
        judge_trace(Score(bad), [0.0, 0.0])


def test_a_trace_has_steps_and_a_figure_for_each() -> None:
    with pytest.raises(ValueError, match="no step"):
        judge_trace(Score(1.0), [0.0])
    with pytest.raises(ValueError, match="local"):
        judge_trace(Score(1.0), [0.0, 1.0], local=[1.0, 2.0])
