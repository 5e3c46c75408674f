"""Potential-based shaping of step rewards, and data rows that claim success."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.environments.core.protocol import Score, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.verifiers.step_rewards import compute_centered_returns, compute_shaping

ANY = (-np.inf, np.inf)
figures = st.floats(-10, 10, allow_nan=False)


def test_shaping_clips_potentials_before_difference() -> None:
    quick, slow = np.array([-5, -1, -1.5, 7.0]), np.array([-5, -4, -3, 7.0])
    raw = [compute_shaping(path, ANY) for path in (quick, slow)]
    np.testing.assert_allclose(raw, [[4, -0.5, 1.5], [1, 1, 3]])
    assert [path.sum() for path in raw] == [5, 5]
    assert [np.clip(path, -2, 2).sum() for path in raw] == [
        3,
        4,
    ]  # clipping differences is wrong: the sum then depends on the path
    assert [compute_shaping(path, (-2.0, 0.0)).sum() for path in (quick, slow)] == [2, 2]


@given(st.lists(figures, min_size=2, max_size=8), st.floats(0.1, 1), st.data())
def test_shaping_adds_constant_of_first_state_to_every_return(
    potentials: list[float], gamma: float, data: st.DataObject
) -> None:
    steps = len(potentials) - 1
    rewards = np.array(data.draw(st.lists(figures, min_size=steps, max_size=steps)))
    shaped = rewards + compute_shaping(np.array(potentials), (-3.0, 3.0), gamma)
    discounts = gamma ** np.arange(steps)
    difference = float(discounts @ shaped - discounts @ rewards)
    assert difference == pytest.approx(-np.clip(potentials[0], -3, 3), abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.floats(0.5, 1))
def test_shaping_preserves_order_of_actions(seed: int, depth: int, gamma: float) -> None:
    """The states form a tree with two actions each. The potentials are random."""
    rng = np.random.default_rng(seed)
    states = [path for length in range(depth + 1) for path in product((0, 1), repeat=length)]
    potential = {path: rng.normal() for path in states}
    reward = {path: rng.normal() for path in states[1:]}

    def best(path: tuple[int, ...], shaped: bool) -> float:
        """The best return from this state, by trying all action sequences."""
        returns = []
        for rest in product((0, 1), repeat=depth - len(path)):
            visited = [(*path, *rest[:count]) for count in range(len(rest) + 1)]
            earned = np.array([reward[state] for state in visited[1:]])
            if shaped and len(visited) > 1:
                earned = earned + compute_shaping(
                    np.array([potential[state] for state in visited]), ANY, gamma
                )
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


def test_centered_returns_clip_and_do_not_center_single_step() -> None:
    np.testing.assert_allclose(compute_centered_returns(np.array([0.0, 20.0]), clip=4.0), [0, 0])
    np.testing.assert_allclose(compute_centered_returns(np.array([30.0, -10.0]), clip=4.0), [4, -4])
    np.testing.assert_allclose(compute_centered_returns(np.array([3.0]), scale=2.0), [1.5])


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
def test_score_ignores_success_fields_of_task_data(claim: list[str]) -> None:
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
        assert isinstance(outcome, Score)
        assert outcome.reward == float(right)
