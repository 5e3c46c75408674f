"""TRL-style reward functions in the scorer process: weighted terms, confinement, and failures."""

import re
from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, episodes, figures_of, metrics, run_task, summary
from task_environments import Digits

from perilune.environments.core.protocol import Failure, Score, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.environments.core.rewards import WeightedRewards
from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job
from perilune.verifiers import Scorer

FUNCTIONS = """
import asyncio, math, os, socket

def brevity(completions, **kwargs):
    return [-len(completion[0]["content"]) / 10 for completion in completions]

def plain(prompts, completions, answer, **kwargs):
    assert isinstance(prompts[0], str) and isinstance(completions[0], str)
    return [1.0 if right == completion else 0.5 for right, completion in zip(answer, completions)]

async def slowly(completions):
    await asyncio.sleep(0.001)
    return [2 for _ in completions]

def sometimes(completions, **kwargs):
    return [None if completion[0]["content"].startswith("n") else 4.0 for completion in completions]

def raises(completions, **kwargs):
    raise ZeroDivisionError("of course")

def nan(completions, **kwargs):
    return [math.nan]

def leaves(completions, **kwargs):
    raise SystemExit(0)

def a_number(completions, **kwargs):
    return 1.0

def two(completions, **kwargs):
    return [1.0, 1.0]

def calls_home(completions, **kwargs):
    socket.socket()
    return [1.0]

def reads(completions, **kwargs):
    return [float(open("/etc/hostname").read() != "")]

def tells_secrets(completions, **kwargs):
    return [float(len(os.environ.get("A_SECRET", "")))]
"""
TASK = Task("0a", ({"role": "user", "content": "17="},), {"answer": "71"})


def section(**rewards: Any) -> dict[str, Any]:
    def term(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        return {"weight": 1.0, "format": "messages", "source": FUNCTIONS} | one

    return {**DIGITS, "rewards": {name: term(value) for name, value in rewards.items()}}


def function(name: str, **rest: Any) -> dict[str, Any]:
    return {"function": f"rewards.py:{name}", **rest}


def score_texts(environment: dict[str, Any], *texts: str) -> list[Score | Failure]:
    with Scorer(environment) as scorer:
        return scorer.score([(TASK, Transcript(text)) for text in texts])


def test_reward_is_the_weighted_sum_and_gold_the_verdict() -> None:
    environment = section(
        verifier=1.0,
        digits=0.5,
        brevity=function("brevity", weight=0.1),
        plain=function("plain", format="text"),
        slowly=function("slowly", weight=-1.0),
    )
    right, wrong = score_texts(environment, "71", "no")
    assert isinstance(right, Score)
    assert isinstance(wrong, Score)
    assert right.terms == {"digits": 1.0, "verifier": 1.0, "brevity": -0.2, "plain": 1.0, "slowly": 2.0}
    assert right.reward == pytest.approx(1.0 + 0.5 - 0.02 + 1.0 - 2.0)
    assert wrong.reward == pytest.approx(0.0 + 0.0 - 0.02 + 0.5 - 2.0)
    assert right.metrics["gold"] == 1.0
    assert wrong.metrics["gold"] == 0.0


class Closable(Digits):
    def close(self) -> None:
        """Have nothing to close."""


def test_close_closes_the_event_loop_of_asynchronous_functions() -> None:
    environment = WeightedRewards(Closable(DIGITS), section(slowly=function("slowly"))["rewards"])
    environment.load_confined()
    assert isinstance(environment.score(TASK, Transcript("71")), Score)
    loop = environment._loop
    environment.close()
    assert loop is not None and loop.is_closed()


def test_unlisted_terms_do_not_count() -> None:
    (score,) = score_texts(section(brevity=function("brevity")), "71")
    assert isinstance(score, Score)
    assert score.reward == -0.2
    assert score.terms["verifier"] == 1.0
    (alone,) = score_texts(section(verifier=1.0), "71")
    assert isinstance(alone, Score)
    assert "gold" not in alone.metrics  # the reward is the verdict


def test_reward_function_that_returns_none_is_skipped() -> None:
    here, away = score_texts(section(verifier=1.0, sometimes=function("sometimes")), "71", "no")
    assert isinstance(here, Score)
    assert here.reward == 5.0
    assert isinstance(away, Score)
    assert away.reward == 0.0
    assert "sometimes" not in away.terms
    (nothing,) = score_texts(section(sometimes=function("sometimes")), "no")
    assert nothing == Failure("verifier", "no reward function applies to this task")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "reward function 'it' raised ZeroDivisionError: of course"),
        ("nan", "reward function 'it' returned nan"),
        ("leaves", "reward function 'it' raised SystemExit"),
        ("a_number", "reward function 'it' returned float 1.0, not a list of one reward"),
        ("two", "not a list of one reward"),
        ("calls_home", "raised PermissionError"),
        ("reads", "raised PermissionError"),
    ],
)  # fmt: skip
def test_broken_reward_function_is_a_failure_and_not_zero(name: str, said: str) -> None:
    (failure,) = score_texts(section(verifier=1.0, it=function(name)), "71")
    assert isinstance(failure, Failure)
    assert said in failure.reason


def test_reward_function_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "12345")
    (score,) = score_texts(section(it=function("tells_secrets")), "71")
    assert isinstance(score, Score)
    assert score.reward == 0.0


def test_unknown_reward_term_error_lists_the_terms() -> None:
    (failure,) = score_texts(section(raw=1.0), "71")
    assert failure == Failure("verifier", "no reward term 'raw'; there are digits, verifier")


def test_unloadable_reward_function_is_named() -> None:
    with pytest.raises(RequestError, match=r"rewards\.it\.function: cannot load 'no_such_module:f'"):
        score_texts(section(it={"function": "no_such_module:f", "source": None}), "71")


class Long(Digits):
    """Declares several turns."""

    max_turns = 3


class Reaching(Digits):
    """Declares that it cannot run in a confined process."""

    confined = False


@pytest.mark.parametrize(("kind", "said"), [("Long", "single-turn"), ("Reaching", "cannot run there")])
def test_reward_functions_are_refused_for_unsuitable_environments(
    kind: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    other = f"environment: {{id: factory, factory: '{__name__}:{kind}'}}"
    (tmp_path / "paid.yaml").write_text(re.sub("environment: .*", other, RECIPE))
    with pytest.raises(RequestError, match=rf"paid.yaml:4(.|\n)*rewards: .*{said}"):
        load_recipe(tmp_path / "paid.yaml")


def test_make_environment_does_not_run_reward_functions(tmp_path: Path) -> None:
    source = f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef f(completions): return [1.0]"
    environment = make_environment(section(it=function("f", source=source)))
    next(iter(environment.tasks("train", 0)))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(RequestError, match="PermissionError"):  # the confined scorer may not do that either
        score_texts(section(it=function("f", source=source)), "71")
    assert not (tmp_path / "ran").exists()


def test_rl_trains_on_the_weighted_reward(tmp_path: Path) -> None:
    environment = section(verifier=1.0, brevity=function("brevity", weight=0.1))
    bundle = run_task(tmp_path / "rl", "rl", steps=2, environment=environment)
    line = metrics(bundle)[-1]
    assert line["reward"] == pytest.approx(line["term/verifier"] + 0.1 * line["term/brevity"])
    assert line["gold"] == pytest.approx(line["term/verifier"])
    for _, row in episodes(bundle).iterrows():
        terms = figures_of(row["reward_terms"])
        assert row["reward"] == pytest.approx(terms["verifier"] + 0.1 * terms["brevity"])


def test_collect_and_evaluate_use_the_verifier_verdict(tmp_path: Path) -> None:
    """The verdict alone decides which traces are kept and which answers count as right."""
    environment = section(verifier=1.0, digits=5.0, brevity=function("brevity", weight=-1.0))
    bundle = run_task(tmp_path / "collect", "collect", environment=environment)
    (traces,) = (bundle / "artifacts").rglob("records.jsonl")
    assert '"score":1.0' in traces.read_text()
    judgement = run_task(tmp_path / "evaluate", "evaluate", environment=environment)
    plain = run_task(tmp_path / "plain", "evaluate")
    assert summary(judgement)["correct_per_task"] == summary(plain)["correct_per_task"]


RECIPE = """\
name: paid
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic, prompt: compact}
rewards:
  verifier: 1.0
  well_formed: 0.1
  brevity: {function: "mine.py:brevity", weight: 0.2}
stages:
  - {name: rl, task: rl, checkpoint: model}
"""


def test_recipe_freezes_the_source_of_reward_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "paid.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "paid.yaml")
    job = build_job(recipe, recipe.stage("rl"))
    assert job.environment["rewards"]["brevity"]["source"] == FUNCTIONS  # the bundle needs no other file
    assert job.environment["rewards"]["well_formed"] == 0.1
    for old, new, said in (
        ("mine.py:brevity", "mine.py:brevty", "does not define 'brevty'(.|\\n)*brevity"),
        ("mine.py", "yours.py", "yours.py cannot be read: no file yours.py"),
        ("brevity: {", "verifier: {", "verifier"),
        ("0.2", ".nan", "finite"),
    ):
        (tmp_path / "paid.yaml").write_text(RECIPE.replace(old, new))
        with pytest.raises(RequestError, match=f"paid.yaml:[0-9]+(.|\\n)*{said}"):
            load_recipe(tmp_path / "paid.yaml")
    (tmp_path / "mine.py").write_text("def brevity(:")
    (tmp_path / "paid.yaml").write_text(RECIPE)
    with pytest.raises(RequestError, match=r"mine\.py:1 is not valid Python"):
        load_recipe(tmp_path / "paid.yaml")


def test_reward_audit_judges_the_combined_reward(tmp_path: Path) -> None:
    """`environments audit` and the preflight judge the reward that training uses."""
    from perilune.verifiers.audit import audit_reward

    audit = audit_reward(section(slowly=function("slowly")), tasks=2, search_budget=0, seed=0)
    assert audit.findings, "the audit missed a constant reward"
