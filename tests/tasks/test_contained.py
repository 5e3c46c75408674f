"""Every kind of episode failure in an rl run: contained, counted and recorded, or a stop by the policy."""

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
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step over a task of each kind."""
    root = tmp_path_factory.mktemp("faulty_run")
    options = {"steps": 1, "prompts": len(KINDS), "samples": 2, "max_tokens": 6}
    return run_task(root / "rl", "rl", environment=MISCHIEF, seed=5, **options)


def rows_of(faulty_run: Path, kind: str) -> pd.DataFrame:
    rows = episodes(faulty_run)
    numbers = [int(messages[0]["content"].rstrip("=")) for messages in rows["messages"]]
    return rows[[KINDS[number % len(KINDS)] == kind for number in numbers]]


@pytest.mark.parametrize("kind", FAILS)
def test_failed_episodes_record_their_boundary_and_have_no_reward(faulty_run: Path, kind: str) -> None:
    rows = rows_of(faulty_run, kind)
    assert len(rows) == 2
    assert rows["failure"].str.startswith(FAILS[kind]).all(), list(rows["failure"])
    assert rows["reward"].isna().all()
    assert not any("advantage" in figures_of(pairs) for pairs in rows["metrics"])


@pytest.mark.parametrize("kind", ["well", "prints garbage", *CODE])
def test_contained_faults_give_ordinary_episodes(faulty_run: Path, kind: str) -> None:
    rows = rows_of(faulty_run, kind)
    assert len(rows) == 2 and (rows["failure"] == "").all() and rows["reward"].notna().all()
    figures = [figures_of(pairs) for pairs in rows["metrics"]]
    if kind in CONTAINED:
        assert all(row[CONTAINED[kind]] == 1.0 for row in figures)


def test_run_counts_failures_and_continues(faulty_run: Path) -> None:
    (line,) = metrics(faulty_run)
    assert line["failures"] == summary(faulty_run)["failures"] == 2 * len(FAILS)
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
def test_failure_policy_stops_the_run(tmp_path: Path, kinds: list[str], policy: dict, said: str) -> None:
    environment = {**MISCHIEF, "kinds": kinds, "episodes": policy}
    with pytest.raises(WorkFailedError, match=said):
        run_task(tmp_path / "rl", "rl", environment=environment, steps=1, prompts=2, samples=2, max_tokens=4)


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_broken_rows_stop_or_are_dropped(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_malformed_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(RequestError, match=r"data:1: column 'messages' is not a list of messages"):
        run_task(tmp_path / "sft", "sft", inputs={"data": tmp_path / "records.jsonl"})


def test_bundled_tools_recipe_runs_with_small_settings(tmp_path: Path) -> None:
    """The first stages of the bundled recipe in order."""
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
    trained = run_task(tmp_path / "rl", "rl", inputs=checkpoint, environment=environment, **small)
    assert metrics(trained)[0]["failures"] == 0
    rows = episodes(trained)
    assert all(messages[1]["role"] == "assistant" for messages in rows["messages"])
