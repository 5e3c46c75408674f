"""Everything that can go wrong in an episode, each kind in a whole climb: contained, counted, shown, and by
the recipe's policy a reason to stop."""

import json
from pathlib import Path

import pandas as pd
import pytest
from mischief import CODE, KINDS
from task_cases import episodes, figures_of, metrics, run_task, summary

from perilune.errors import RequestError, WorkFailedError
from perilune.recipe.load import bundled_recipe, load_recipe

pytestmark = pytest.mark.usefixtures("walls")
MISCHIEF = {
    "id": "factory",
    "factory": "mischief:Mischief",
    "episodes": {"seconds": 3, "max_failures": 0.7},
}
FAILS = {
    "raises": "environment: ValueError: no idea",
    "leaves": "environment: SystemExit: 3",
    "hangs": "environment: no answer within 3 s",
    "answers garbage": "environment: the scorer's process sent a malformed answer",
    "not a number": "environment: a number is not finite",
    "no legal move": "environment: the player to move has no legal action",
    "broken sandbox": "sandbox: the sandbox's process",
}
CONTAINED = {
    "fork bomb": "contained/timeout",
    "full disk": "refused",
    "deaf": "contained/timeout",
    "ten million lines": "contained/output",
    "all memory": "contained/memory",
}


@pytest.fixture(scope="module")
def climb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step over a task of each kind."""
    root = tmp_path_factory.mktemp("climb")
    options = {"steps": 1, "prompts": len(KINDS), "samples": 2, "max_tokens": 6}
    return run_task(root / "rl", "rl", environment=MISCHIEF, seed=5, **options)


def rows_of(climb: Path, kind: str) -> pd.DataFrame:
    rows = episodes(climb)
    numbers = [int(messages[0]["content"].rstrip("=")) for messages in rows["messages"]]
    return rows[[KINDS[number % len(KINDS)] == kind for number in numbers]]


@pytest.mark.parametrize("kind", FAILS)
def test_what_fails_is_recorded_with_its_boundary_and_has_no_reward(climb: Path, kind: str) -> None:
    rows = rows_of(climb, kind)
    assert len(rows) == 2
    assert rows["failure"].str.startswith(FAILS[kind]).all(), list(rows["failure"])
    assert rows["reward"].isna().all()
    assert not any("advantage" in figures_of(pairs) for pairs in rows["metrics"])


@pytest.mark.parametrize("kind", ["well", "prints garbage", *CODE])
def test_what_is_contained_is_an_episode_like_others(climb: Path, kind: str) -> None:
    rows = rows_of(climb, kind)
    assert len(rows) == 2 and (rows["failure"] == "").all() and rows["reward"].notna().all()
    figures = [figures_of(pairs) for pairs in rows["metrics"]]
    if kind in CONTAINED:
        assert all(one[CONTAINED[kind]] == 1.0 for one in figures)


def test_all_of_it_is_counted_and_the_run_goes_on(climb: Path) -> None:
    (line,) = metrics(climb)
    assert line["failures"] == summary(climb)["failures"] == 2 * len(FAILS)
    assert line["failures/sandbox"] == 2 and line["failures/environment"] == 2 * len(FAILS) - 2
    counted = {name: count for name, count in line.items() if name.startswith("contained/")}
    assert counted == {"contained/memory": 2, "contained/output": 2, "contained/timeout": 4}


@pytest.mark.parametrize(
    ("kinds", "policy", "said"),
    [
        (
            ["well", "raises"],
            {"on_failure": "stop"},
            "2 of 4 episodes failed, and none are allowed; .*no idea",
        ),
        (["well", "raises"], {"max_failures": 0.4}, "2 of 4 episodes failed, and 40% are allowed"),
        (["raises"], {}, "scored no episode; the first failure: environment: ValueError: no idea"),
    ],
)
def test_or_the_recipe_says_that_it_stops(tmp_path: Path, kinds: list[str], policy: dict, said: str) -> None:
    environment = {**MISCHIEF, "kinds": kinds, "episodes": policy}
    with pytest.raises(WorkFailedError, match=said):
        run_task(tmp_path / "rl", "rl", environment=environment, steps=1, prompts=2, samples=2, max_tokens=4)


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_rows_that_are_malformed(tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(60)]
    lines = [*map(json.dumps, rows[:30]), "{]", json.dumps({"answer": "1"}), *map(json.dumps, rows[30:])]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines) + "\n")
    environment = {"id": "jsonl", "path": str(tmp_path / "sums.jsonl"), "broken_rows": policy}
    options = {"steps": 1, "prompts": 2, "samples": 2, "max_tokens": 4}
    if policy == "stop":
        with pytest.raises(RequestError, match=r"sums.jsonl:31: not JSON"):
            run_task(tmp_path / "rl", "rl", environment=environment, **options)
        return
    run_task(tmp_path / "rl", "rl", environment=environment, **options)
    assert "left out 2 invalid rows of 62; the first: " in caplog.text


def test_a_record_that_is_malformed_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(RequestError, match=r"data:1: column 'messages' is not a list of messages"):
        run_task(tmp_path / "sft", "sft", inputs={"data": tmp_path / "records.jsonl"})


def test_tools_in_small(tmp_path: Path) -> None:
    """The bundled recipe's stages, one after the other."""
    recipe = load_recipe(bundled_recipe("tools"))
    assert [stage.task for stage in recipe.stages] == ["collect", "sft", "evaluate", "rl", "evaluate"]
    environment = recipe.environment
    options = {"teacher": "tools", "strategies": {"solve": 0.1, "guess": 0.9}, "traces": 16}
    collected = run_task(tmp_path / "collect", "collect", environment=environment, **options)
    traces = collected / "artifacts" / "traces"
    few = {"steps": 2, "batch_size": 4, "warmup": 1}
    sft = run_task(tmp_path / "sft", "sft", inputs={"data": traces}, environment=environment, **few)
    checkpoint = {"checkpoint": sft / "artifacts" / "checkpoints" / "final"}
    small = {"steps": 1, "prompts": 2, "samples": 2, "max_tokens": 40}
    climbed = run_task(tmp_path / "rl", "rl", inputs=checkpoint, environment=environment, **small)
    assert metrics(climbed)[0]["failures"] == 0
    rows = episodes(climbed)
    assert all(messages[1]["role"] == "assistant" for messages in rows["messages"])
