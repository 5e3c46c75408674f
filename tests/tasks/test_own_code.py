"""Stages with user code in the bundle: an environment, an algorithm, a teacher and metrics."""

import json
from pathlib import Path

import pytest
from task_cases import DIGITS, metrics, run_task, summary

ENVIRONMENT = """
from perilune.environments import Score, SingleTurn, Task

class Letters(SingleTurn):
    id = "letters"
    def __init__(self, section):
        self.count = section["count"]
    def tasks(self, split, seed):
        for n in range(self.count):
            yield Task(f"{split}{n}", ({"role": "user", "content": str(n)},), {"answer": str(n)})
    def score(self, task, transcript):
        return Score(float(any(one.isdigit() for one in transcript.text)))
"""
ALGORITHM = """
from typing import Literal
import numpy as np
from perilune.learn.algorithms.base import ClippedPolicyGradient

class Plain(ClippedPolicyGradient):
    name: Literal["plain"] = "plain"
    def weight_group(self, group, context):
        scores = np.array([one.reward for one in group], float)
        return self.weight_tokens(group, scores, scores - scores.mean(), context)
"""
TEACHER = """
from perilune.data.generators import ScriptedTeacher

class Nines(ScriptedTeacher):
    name = "nines"
    strategies = {"few": 1.0}
    def script(self, task, strategy, chance):
        return ["9" * (1 + chance.integer(3, "length"))]
"""
METRICS = """
def episodes(episodes):
    return len(episodes)

def silent(episodes):
    return None

def broken(episodes):
    return episodes["no such key"]
"""
LETTERS = {"id": "letters.py:Letters", "source": ENVIRONMENT, "count": 30}
OWN = {name: {"name": f"own.py:{name}", "source": METRICS} for name in ("episodes", "silent", "broken")}
TALK = {"id": "factory", "factory": "task_environments:Talk"}


def test_rl_runs_user_environment_algorithm_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = {"name": "plain.py:Plain", "source": ALGORITHM}
    bundle = run_task(
        tmp_path, "rl", environment=LETTERS, algorithm=algorithm, metrics=OWN, steps=3, temperature=1.0
    )
    assert summary(bundle)["algorithm"] == "plain"
    for line in metrics(bundle):
        assert line["own/episodes"] == 16.0
        assert not {"own/silent", "own/broken"} & line.keys()
    assert capsys.readouterr().out.count("metric 'broken' failed: TypeError") == 1


def test_collect_runs_a_user_teacher(tmp_path: Path) -> None:
    teacher = {"name": "nines.py:Nines", "source": TEACHER}
    bundle = run_task(tmp_path, "collect", environment=LETTERS, teacher=teacher, traces=10)
    assert summary(bundle)["sources"] == {"nines/few": 10}


def test_evaluate_reports_figures_of_each_mixture_part(tmp_path: Path) -> None:
    ends = {**DIGITS, "factory": "task_environments:Ends", "weight": 0}
    parts = {"letters": {**LETTERS, "reward_scale": 2.0}, "ends": ends, "talk": TALK}
    bundle = run_task(
        tmp_path, "evaluate", environment={"id": "mixture", "parts": parts}, tasks=9, metrics=OWN
    )
    report = summary(bundle)
    by_part = report["by_environment"]
    assert {part: figures["tasks"] for part, figures in by_part.items()} == {
        "letters": 3,
        "ends": 3,
        "talk": 3,
    }
    passes = {part: figures["pass@1"]["mean"] for part, figures in by_part.items()}
    assert report["pass@1"]["mean"] == pytest.approx(sum(passes.values()) / 3)
    assert report["own"] == {"episodes": 36.0}
    line = metrics(bundle)[0]
    assert {part: line[f"environment/{part}/pass@1"]["mean"] for part in parts} == passes
    rates: dict[str, list[float]] = {part: [] for part in parts}
    for task_id, samples, correct in report["correct_per_task"]:
        rates[task_id.partition("/")[0]].append(correct / samples)
    assert {part: sum(own) / len(own) for part, own in rates.items()} == pytest.approx(passes)


def test_evaluation_during_training_reports_each_mixture_part(tmp_path: Path) -> None:
    parts = {"letters": LETTERS, "talk": TALK}
    bundle = run_task(
        tmp_path,
        "rl",
        environment={"id": "mixture", "parts": parts},
        eval={"tasks": 4, "samples": 2},
        steps=1,
        temperature=1.0,
    )
    lines = (bundle / "artifacts" / "evaluations.jsonl").read_text().splitlines()
    by_task = json.loads(lines[-1])["pass@1"]
    assert len(by_task) == 4
    for part in parts:
        own = [rate for task, rate in by_task.items() if task.partition("/")[0] == part]
        figure = f"eval/heldout/environment/{part}/pass@1"
        line = metrics(bundle)[-1]
        assert line[figure] == pytest.approx(sum(own) / len(own))
        assert line[f"{figure}/low"] <= line[figure] <= line[f"{figure}/high"]
