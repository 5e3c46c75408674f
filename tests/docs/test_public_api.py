"""The public API: every name resolves, the import is light, and reference and example use public names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doc_blocks import ROOT

import perilune
from perilune.control.runs.progress import StageFailed, explain_failure
from perilune.environments import Failure, Score
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.verdict import Cause

SUMS = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "prompt": "compact",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
RECIPE = """
name: small
seed: 3
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic, prompt: compact}
resources: {device: cpu, threads: 1}
stages:
  - {name: start, task: new_model, preset: tiny}
"""
HEAVY = ("torch", "pyarrow", "sqlalchemy", "numpy", "pydantic", "typer")


def type_checked() -> dict[str, str]:
    """Public names and their modules for type checkers and editors."""
    tree = ast.parse(Path(perilune.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
    return {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("name", perilune.__all__)
def test_public_name_resolves_like_for_type_checkers(name: str) -> None:
    value = getattr(perilune, name)
    assert value.__module__ == type_checked()[name]
    assert value.__doc__


def test_all_lists_exactly_the_public_names() -> None:
    assert list(type_checked()) and set(type_checked()) == set(perilune.__all__)
    assert sorted(perilune.__all__) == list(perilune.__all__)
    assert set(perilune.__all__) <= set(dir(perilune))
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = perilune.Enigne  # type: ignore[attr-defined]


def test_import_perilune_loads_no_heavy_packages() -> None:
    code = f"import sys, perilune; dir(perilune); print([name for name in {HEAVY} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout.strip() == "[]"


def test_python_reference_lists_public_names() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n::: (\S+)$", page, re.MULTILINE)
    assert sections == [(name, f"{type_checked()[name]}.{name}") for name in perilune.__all__]
    assert page.count("\n## ") == page.count("\n::: ") == len(sections)


def perilune_names(tree: ast.AST) -> Iterator[str]:
    """Names of Perilune that a program uses, dotted if imported from a submodule."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("perilune."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "perilune":
            prefix = (node.module or "").removeprefix("perilune").lstrip(".")
            yield from (f"{prefix}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "perilune":
            yield node.attr


def test_example_uses_public_names_only() -> None:
    text = (ROOT / "examples" / "rl_loop.py").read_text()
    names = set(perilune_names(ast.parse(text)))
    assert len(names) > 8 and names <= set(perilune.__all__)
    assert set(perilune_names(ast.parse("from perilune.engine import engine"))) == {"engine.engine"}


def test_episode_from_completion() -> None:
    task = next(iter(perilune.make_environment(SUMS).tasks("train", seed=0)))
    policy, tokenizer = perilune.load_model("tiny", seed=0)
    prompt = perilune.Prompt(tokenizer.encode_prompt(task.prompt), key=(0, 0, 0))
    params = perilune.SamplingParams(max_tokens=6, stop_token_ids=(tokenizer.eos_token_id,))
    engine = perilune.Engine(policy)
    engine.update_weights(None, version=7)
    ((completion,),) = engine.sample([prompt], 1, params)

    score = Score(0.5, {"verifier": 0.5}, {"strategy/direct": 1.0})
    episode = perilune.Episode.from_completion(task, completion, tokenizer, score, group_id="4/2", sample=3)
    assert (episode.episode_id, episode.group_id, episode.task_id) == ("4/2/3", "4/2", task.task_id)
    assert (episode.reward, episode.reward_terms, episode.failure) == (0.5, {"verifier": 0.5}, "")
    assert episode.metrics["strategy/direct"] == 1.0
    assert episode.prompt_ids.tolist() == tokenizer.encode_prompt(task.prompt)
    assert episode.token_ids is completion.token_ids and episode.logprobs is completion.logprobs
    assert set(episode.policy_version) == {7} and episode.loss_mask.all()
    assert episode.text == tokenizer.decode(completion.token_ids) and episode.opening == task.prompt

    failed = perilune.Episode.from_completion(task, completion, tokenizer, Failure("verifier", "died"))
    assert (failed.reward, failed.failure, failed.group_id) == (None, "verifier: died", task.task_id)

    imitated = perilune.Episode.from_completion(task, ";7", tokenizer)
    assert imitated.token_ids.tolist() == tokenizer.encode_completion(";7")
    assert imitated.reward is None and imitated.finish_reason == "stop" and imitated.text == ";7"
    assert not imitated.logprobs.any() and set(imitated.policy_version) == {-1}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def test_run_and_evaluate(recipe: Path) -> None:
    kinds = []
    results = perilune.run(recipe, on_event=lambda event: kinds.append(type(event).__name__))
    assert list(results) == ["start"] and results["start"].summary["preset"] == "tiny"
    assert kinds[0] == "StageStarted" and kinds[-1] == "StageFinished"

    decoder, _ = perilune.load_model(results["start"].output)
    fresh, _ = perilune.load_model("tiny", seed=3)
    for actual, expected in zip(decoder.parameters(), fresh.parameters(), strict=True):
        assert np.array_equal(actual.detach().numpy(), expected.detach().numpy())

    again = perilune.run(perilune.load_recipe(recipe))
    assert again["start"].run_id == results["start"].run_id  # reused

    result = perilune.evaluate(results["start"].output, SUMS, tasks=3, samples=2, max_tokens=4)
    assert result["tasks"] == 3 and result["samples"] == 2 and 0 <= result["pass@1"]["mean"] <= 1
    with pytest.raises(RequestError, match="stage evaluation"):  # the stage itself raises this
        perilune.evaluate(results["start"].output, SUMS, max_tokens=100_000)


def test_public_functions_refuse_invalid_requests(recipe: Path) -> None:
    with pytest.raises(RequestError, match="no such recipe"):
        perilune.run("quickstrat")
    with pytest.raises(RequestError, match="tasks"):
        perilune.evaluate("tiny", SUMS, tasks=0)
    with pytest.raises(RequestError, match=r"config\.json"):
        perilune.evaluate(recipe.parent, SUMS)
    with pytest.raises(RequestError):
        perilune.load_model(recipe.parent)


@pytest.mark.parametrize(
    ("cause", "kind"), [(Cause.REQUEST, RequestError), (Cause.WORK, WorkFailedError)], ids=str
)
def test_failed_stage_becomes_an_error(cause: Cause, kind: type[Exception]) -> None:
    error = explain_failure(StageFailed("rl", "01RUN", cause, "no reward", "", False))
    assert type(error) is kind and "stage rl, run 01RUN: no reward" in str(error)


def test_full_disk_error_suggests_gc() -> None:
    full = StageFailed("rl", "01RUN", Cause.DISK_FULL, "the disk is full (files.py:120)", "", False)
    assert "`perilune gc` lists files" in str(explain_failure(full))
