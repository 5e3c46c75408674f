"""User code, named as file.py:name in a recipe: frozen as text, and a single error if it is broken."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from perilune.bundle.plugin import load_plugin
from perilune.cli.train.plan import derive_plans
from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job

ENVIRONMENT = """
from pydantic import BaseModel
from perilune.environments import Score, SingleTurn, Task

class Spec(BaseModel, extra="forbid", frozen=True):
    id: str = "echo"
    words: int = 3

class Echo(SingleTurn):
    Spec = Spec
    def __init__(self, spec):
        self.spec, self.id = spec, "echo"
    def tasks(self, split, seed):
        for n in range(self.spec.words):
            yield Task(f"{split}{n}", ({"role": "user", "content": str(n)},), {"answer": str(n)})
    def score(self, task, transcript):
        return Score(float(transcript.text == task.data["answer"]))

class Idle:
    id = "idle"
    def __init__(self, section): pass

class Hungry(Echo):
    def __init__(self, spec, more): pass

class Scoreless(SingleTurn):
    def tasks(self, split, seed): ...

class Wordy(Echo):
    max_turns = "4"

class NoTasks(Echo):
    def tasks(self, split, seed): return None

class Seedless(Echo):
    def tasks(self, split): return iter(())

class Loose(Echo):
    def tasks(self, split, seed):
        yield {"prompt": "1?"}

class Unwritable(Echo):
    def tasks(self, split, seed):
        yield Task("1", ({"role": "user", "content": "1?"},), {"answer": object()})
"""
ALGORITHM = """
from typing import Literal
import numpy as np
from perilune.learn.algorithms.base import ClippedPolicyGradient

class Plain(ClippedPolicyGradient):
    name: Literal["plain"] = "plain"
    margin: float = 0.0
    def weight_group(self, group, context):
        scores = np.array([one.reward for one in group], float)
        return self.weight_tokens(group, scores, scores - scores.mean(), context)

class Narrow(Plain):
    def weight_group(self, group): ...

class Other: ...
"""
TEACHER = """
from perilune.data.generators import ScriptedTeacher

class Parrot(ScriptedTeacher):
    name = "parrot"
    strategies = {"once": 1.0}
    def script(self, task, strategy, chance):
        return [task.data["answer"]]

class Mute: ...
"""
METRIC = """
def mean_length(episodes):
    return sum(len(one.token_ids) for one in episodes) / len(episodes)

def two(episodes, more): ...
"""
REWARD = """
def half(completions, **columns):
    return [0.5]

def wants(nothing_that_exists): ...

made = (lambda worth: lambda completions, **columns: [worth])(0.5)

def a_number(completions):
    return 1.0

def argues(completions):
    raise ValueError("the argument is not JSON")
"""
RL = {
    "name": "rl",
    "task": "rl",
    "checkpoint": "model",
    "steps": 2,
    "prompts": 2,
    "samples": 4,
    "max_tokens": 4,
}
COLLECT = {"name": "traces", "task": "collect", "teacher": "teacher.py:Parrot", "traces": 2}
SUMS = {"id": "reasoning_gym", "task": "chain_sum", "prompt": "compact"}


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    texts = {
        "world": ENVIRONMENT, "method": ALGORITHM, "teacher": TEACHER, "figure": METRIC, "pay": REWARD,
        "torn": "def torn(:\n    pass\n", "lost": "import a_package_that_nobody_has\ndef lost(): ...\n",
        "quits": "raise SystemExit(3)\ndef quits(): ...\n", "fails": "\n\n1 / 0\ndef fails(): ...\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)


def recipe(folder: Path, stage: dict[str, Any] | None = None, **keys: Any) -> Path:
    document = {
        "name": "own",
        "model": {"preset": "tiny"},
        "environment": SUMS,
        "stages": [stage or RL],
        **keys,
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_environment_file_is_frozen_as_text(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, environment={"id": "world.py:Echo", "words": 5}))
    assert loaded.environment["source"] == ENVIRONMENT and loaded.environment["words"] == 5
    (tmp_path / "world.py").unlink()  # the frozen text must be enough from here on
    assert derive_plans(loaded)[0]["name"] == "rl"
    job = build_job(loaded, loaded.stages[0])
    assert job.environment["id"] == "world.py:Echo" and str(tmp_path) not in job.model_dump_json()


def test_environment_file_can_be_part_of_a_mixture(tmp_path: Path) -> None:
    parts = {"own": {"id": "world.py:Echo"}, "sums": SUMS}
    loaded = load_recipe(recipe(tmp_path, environment={"id": "mixture", "parts": parts}))
    assert loaded.environment["parts"]["own"]["source"] == ENVIRONMENT
    derive_plans(loaded)


@pytest.mark.parametrize("written", ["method.py:Plain", {"name": "method.py:Plain", "margin": 0.25}])
def test_algorithm_file_is_frozen_as_text(tmp_path: Path, written: Any) -> None:
    loaded = load_recipe(recipe(tmp_path, {**RL, "algorithm": written}))
    (tmp_path / "method.py").unlink()
    derive_plans(loaded)
    spec = load_plugin("rl").spec.model_validate(build_job(loaded, loaded.stages[0]).spec)
    assert spec.algorithm.name == "plain"  # type: ignore[attr-defined]
    section = spec.model_dump(mode="json")["algorithm"]
    assert section["name"] == "method.py:Plain" and section["source"] == ALGORITHM
    assert section["margin"] == (0.25 if isinstance(written, dict) else 0.0)
    assert load_plugin("rl").spec.model_validate(spec.model_dump(mode="json")) == spec


def test_teacher_and_metric_files_are_frozen_as_text(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, COLLECT, environment={"id": "world.py:Echo"}))
    assert loaded.stages[0].spec["teacher"] == {"name": "teacher.py:Parrot", "source": TEACHER}
    assert derive_plans(loaded)[0]["derived"]["teacher"] == "parrot (100% once)"
    loaded = load_recipe(recipe(tmp_path, {**RL, "metrics": {"length": "figure.py:mean_length"}}))
    assert loaded.stages[0].spec["metrics"] == {"length": {"name": "figure.py:mean_length", "source": METRIC}}
    derive_plans(loaded)


def test_plan_accepts_a_working_reward_function(tmp_path: Path) -> None:
    derive_plans(load_recipe(recipe(tmp_path, rewards={"half": {"function": "pay.py:half"}})))


def test_reward_function_may_be_a_variable_in_a_file_with_bom(tmp_path: Path) -> None:
    (tmp_path / "pay.py").write_text("\ufeff" + REWARD, encoding="utf-8")
    derive_plans(load_recipe(recipe(tmp_path, rewards={"made": {"function": "pay.py:made"}})))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a_number", "reward function 'r' returned float 1.0, not a list of one reward"),
        ("argues", "reward function 'r' raised ValueError: the argument is not JSON"),
    ],
)
def test_plan_warns_when_a_reward_function_fails_on_an_answer(tmp_path: Path, name: str, reason: str) -> None:
    loaded = load_recipe(recipe(tmp_path, rewards={"r": {"function": f"pay.py:{name}"}}))
    (stage,) = derive_plans(loaded, check=True)
    assert stage["derived"]["warning 1"].endswith(
        f"fails to score the answer '0' to its first task: {reason}"
    )
    (stage,) = derive_plans(
        load_recipe(recipe(tmp_path, rewards={"r": {"function": "pay.py:half"}})), check=True
    )
    assert "warning 1" not in stage["derived"]


KEYS = {
    "environment": lambda file: {"environment": {"id": file}},
    "algorithm": lambda file: {"stage": {**RL, "algorithm": file}},
    "teacher": lambda file: {"stage": {**COLLECT, "teacher": file}},
    "metric": lambda file: {"stage": {**RL, "metrics": {"m": file}}},
    "reward": lambda file: {"rewards": {"r": {"function": file}}},
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("torn.py:torn", "torn.py:1 is not valid Python"),
        ("gone.py:gone", "cannot be read"),
        ("pay.py:hlaf", "does not define 'hlaf'"),
        ("lost.py:lost", "No module named 'a_package_that_nobody_has'"),
        ("quits.py:quits", "SystemExit"),
        ("fails.py:fails", "division by zero"),
    ],
)
def test_broken_code_file_gives_one_error_without_traceback(
    tmp_path: Path, key: str, file: str, what: str
) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        derive_plans(load_recipe(recipe(tmp_path, **KEYS[key](file))))
    assert file.partition(".")[0] in str(caught.value) and "Traceback" not in str(caught.value)
    if file.startswith("lost"):
        assert "install that package" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "file", "what"),
    [
        ("environment", "world.py:Idle", "not an environment: it has no tasks, score"),
        ("environment", "world.py:Wordy", "max_turns of world.py:Wordy is '4'"),
        ("environment", "world.py:Hungry", "cannot make world.py:Hungry: TypeError"),
        ("environment", "world.py:Scoreless", "not an environment: it has no score"),
        ("environment", "world.py:NoTasks", "NoTasks cannot make tasks: TypeError: 'NoneType'"),
        ("environment", "world.py:Seedless", "Seedless cannot make tasks: TypeError"),
        ("environment", "world.py:Loose", "Loose cannot make tasks: TypeError: tasks yields dict, not Task"),
        ("environment", "world.py:Unwritable", "cannot make tasks: TypeError: Object of type object"),
        ("algorithm", "method.py:Other", "not a subclass of"),
        ("algorithm", "method.py:Narrow", "weight_group that does not take the episodes and the context"),
        ("teacher", "teacher.py:Mute", "not a teacher"),
        ("metric", "figure.py:two", "must be a function of the episodes: missing a required argument"),
        (
            "reward",
            "pay.py:wants",
            "missing a required argument: 'nothing_that_exists'.*columns: .*completions",
        ),
    ],
)
def test_wrong_signature_is_refused(tmp_path: Path, key: str, file: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        derive_plans(load_recipe(recipe(tmp_path, **KEYS[key](file))), check=True)


def test_unknown_algorithm_option_error_lists_the_options(tmp_path: Path) -> None:
    stage = {**RL, "algorithm": {"name": "method.py:Plain", "marginn": 1}}
    with pytest.raises(RequestError, match=r"marginn.*its options are .*margin"):
        load_recipe(recipe(tmp_path, stage))


def test_unknown_environment_field_error_names_the_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, environment={"id": "world.py:Echo", "wrods": 5})
    with pytest.raises(RequestError, match="wrods is not a known key") as caught:
        load_recipe(path)
    assert "own.yaml:" in caught.value.where and "words" in caught.value.remedy
