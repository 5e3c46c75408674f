"""The collapse watch: an alarm for runs whose reward collapses, and none for healthy runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import DIGITS, metrics, run_task, summary

from perilune.files import read_json_lines
from perilune.tasks.checks.collapse import CollapseWatch

GROUPS, SAMPLES = 32, 8


def observe_steps(chance: Callable[[int], float], steps: int, seed: int) -> tuple[CollapseWatch, list[str]]:
    """The messages of a watch over steps whose tasks have pass rates around `chance(step)`."""
    random = np.random.default_rng(seed)
    watch, messages = CollapseWatch(), []
    for step in range(1, steps + 1):
        p = chance(step)
        right = random.binomial(SAMPLES, random.beta(p, 1 - p, GROUPS))
        dead = float(((right == 0) | (right == SAMPLES)).mean())
        messages.append(watch.observe(step, float(right.mean()) / SAMPLES, dead))
    return watch, [message for message in messages if message]


def test_halved_reward_raises_one_collapse_alarm() -> None:
    runs = [observe_steps(lambda step: 0.12 if step < 40 else 0.05, 140, seed) for seed in range(10)]
    assert all(watch.alarm and watch.since and watch.since >= 40 for watch, _ in runs)
    assert all(len(messages) == 1 and "the reward collapsed: 0.0" in messages[0] for _, messages in runs)


@pytest.mark.parametrize(
    "chance",
    [lambda step: 0.05, lambda step: 0.3, lambda step: min(0.1 + step / 200, 0.95), lambda step: 0.97],
    ids=["low", "flat", "rising", "solved"],
)
def test_healthy_runs_raise_no_collapse_alarm(chance: Callable[[int], float]) -> None:
    assert [message for seed in range(20) for message in observe_steps(chance, 250, seed)[1]] == []


def test_watch_reports_one_collapse_and_one_recovery() -> None:
    """A reward that fluctuates around the threshold counts as a single collapse."""
    watch, messages = observe_steps(
        lambda step: 0.4 if step < 40 or step > 160 else 0.24 - 0.02 * (step % 3), 220, 1
    )
    assert len(messages) == 2 and "collapsed" in messages[0] and "recovered" in messages[1]
    assert not watch.alarm and watch.since is not None


def test_dead_groups_lower_the_evidence_needed_for_an_alarm() -> None:
    """The same rewards raise the alarm only if most groups are dead."""
    random = np.random.default_rng(0)
    rewards = [0.12 if step < 30 else 0.06 for step in range(60)] + random.normal(0, 0.04, 60)
    seen = []
    for dead in (0.4, 0.95):
        watch = CollapseWatch()
        for step, reward in enumerate(rewards.tolist()):
            watch.observe(step, reward, 0.4 if step < 30 else dead)
        seen.append(watch.alarm)
    assert seen == [False, True]


def test_rl_run_warns_about_its_collapse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without bandit and audit, to save time.
    monkeypatch.setattr("perilune.tasks.checks.preflight.MIN_LONG_RUN_STEPS", 100)
    environment = {**DIGITS, "factory": "task_environments:Fades"}
    options: dict[str, Any] = {"steps": 30, "prompts": 2, "save_every": 50, "lr": 1e-6}
    bundle = run_task(tmp_path / "rl", "rl", environment=environment, **options)
    lines = metrics(bundle)
    first = next(line["step"] for line in lines if line["collapse_alarm"])
    assert first > 20 and lines[-1]["collapse_alarm"] == 1 and lines[0]["collapse_alarm"] == 0
    (warning,) = summary(bundle)["warnings"]
    assert f"the reward collapsed by step {first} and has not recovered" in warning
    assert f"warning: step {first}: the reward collapsed" in capsys.readouterr().out
    events = read_json_lines(bundle / "runtime" / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "collapse"] == [first]
