"""Every family of the installed reasoning-gym, through the adapter, with the original prompts."""

import json
import os
import subprocess
import sys
import time
from itertools import islice

import pytest
from environment_cases import gym

from perilune.environments import Failure, Transcript, make_environment
from perilune.environments.adapters.reasoning_gym import HASH_SEEDED_FAMILIES, ReasoningGymEnvironment

TASKS = 3
SMALL = {  # settings that make slow generators fast
    "futoshiki": {"min_board_size": 4, "max_board_size": 4},
    "sokoban": {"min_w": 6, "max_w": 6, "min_h": 6, "max_h": 6, "min_boxes": 1, "max_boxes": 2},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
}
SLOW = {"knight_swap"}  # searches for seconds before it finds a solvable board
NO_STATED_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
WORTHLESS = ("", " ", "xyzzy", "I do not know.", ";", "()", "[]", "{}", "None", "a" * 10_000)


@pytest.fixture(autouse=True)
def fixed_hash_seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # some families draw tasks that depend on the hash seed


def test_families_has_more_than_100_names():
    assert len(ReasoningGymEnvironment.families()) > 100


@pytest.mark.parametrize("family", [name for name in ReasoningGymEnvironment.families() if name not in SLOW])
def test_family_tasks_are_reproducible_and_scored_correctly(family):
    environment = make_environment(gym(family, config=SMALL.get(family, {})))
    tasks = list(islice(environment.tasks("train", 0), TASKS))
    assert len({task.task_id for task in tasks}) == TASKS

    assert list(islice(environment.tasks("train", 0), TASKS)) == tasks

    for task in tasks:
        assert json.loads(json.dumps(task.data)) == task.data
        gold = environment.gold(task)
        assert (gold is None) == (family in NO_STATED_ANSWER)
        if gold is not None and "Integral(" not in gold.text:  # an unsolved integral is no answer
            first, second = environment.score(task, gold), environment.score(task, gold)
            assert first == second
            assert not isinstance(first, Failure), first
            assert first.reward == 1.0
        for text in WORTHLESS:
            outcome = environment.score(task, Transcript(text))
            assert not isinstance(outcome, Failure), (text, outcome)
            assert outcome.reward == 0.0, text


def test_scoring_2000_answers_takes_less_than_half_a_second():
    environment = make_environment(gym("chain_sum"))
    pairs = [(task, environment.gold(task)) for task in islice(environment.tasks("train", 0), 2000)]
    begun = time.process_time()
    for task, gold in pairs:
        environment.score(task, gold)
    assert time.process_time() - begun < 0.5


DRAW = """
import json, sys
from itertools import islice
from perilune.environments import make_environment
drawn = {}
for family, config in json.loads(sys.argv[1]).items():
    environment = make_environment({"id": "reasoning_gym", "task": family, "config": config})
    drawn[family] = [[task.task_id, task.data["answer"]] for task in islice(environment.tasks("train", 5), 2)]
print(json.dumps(drawn))
"""


def draw(families, hash_seed):
    """Tasks of `families`, drawn in a new process."""
    command = [sys.executable, "-c", DRAW, json.dumps({family: SMALL.get(family, {}) for family in families})]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


@pytest.mark.thorough
@pytest.mark.slow
def test_tasks_are_equal_in_other_processes():
    every = set(ReasoningGymEnvironment.families()) - SLOW
    first, second = draw(sorted(every), 1), draw(sorted(every), 2)
    assert {family for family in every if first[family] != second[family]} <= HASH_SEEDED_FAMILIES
    fixed = HASH_SEEDED_FAMILIES - SLOW - {"codeio"}  # codeio runs programs that look at their process
    assert draw(sorted(fixed), 1) == {family: first[family] for family in fixed}
