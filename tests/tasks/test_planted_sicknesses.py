"""Sicknesses planted in real runs: the verdict names each within two steps of its onset.

`test_planted_bugs` has those that stop a run at once: other log-probs, and stale weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from task_cases import SUMS, metrics, run_task

from perilune.environments import Outcome, Score, Split, Task, Transcript, make_environment
from perilune.files import read_json_lines
from perilune.metrics.health.evidence import Evidence
from perilune.metrics.health.series import Series
from perilune.metrics.health.verdict import Health, assess_health
from perilune.tasks.rl.sampling import GroupSampler
from perilune.tasks.rl.spec import RLSpec

pytestmark = pytest.mark.thorough

ONSET, STEPS, PROMPTS, SAMPLES = 15, 18, 16, 8
WITHIN = 2  # steps from the onset to the verdict
HARD = {**SUMS, "config": {**SUMS["config"], "min_digits": 4, "max_digits": 4}}


class Sums:
    """Sums of two numbers, with the section's `sickness`: from step `ONSET` on, hard tasks always."""

    id = "sums"

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.easy, self.hard = make_environment(SUMS), make_environment(HARD)
        self.sickness = section.get("sickness", "")

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        hard = self.hard.tasks(split, seed)
        for number, task in enumerate(self.easy.tasks(split, seed)):
            sick = split == "train" and number >= (ONSET - 1) * PROMPTS
            chosen = next(hard) if self.sickness == "hard tasks" and number % PROMPTS else task
            yield replace(chosen, data={**chosen.data, "sick": sick})

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        sickness = self.sickness if task.data["sick"] else ""
        if sickness == "slow verifier":
            time.sleep(0.05)
        if sickness == "verifier always 0":
            return Score(0.0)
        return self.easy.score(task, transcript)


Patch = pytest.MonkeyPatch


def from_onset(patch: Patch, spoil: Callable[[Patch], None]) -> None:
    """Call `spoil` before the step `ONSET`."""
    right = GroupSampler.sample

    def sample(self: GroupSampler, step: int, watch: Any) -> Any:
        if step == ONSET:
            spoil(patch)
        return right(self, step, watch)

    patch.setattr(GroupSampler, "sample", sample)


def cut_answers(patch: Patch) -> None:
    """The token limit falls to 2."""
    right = RLSpec.params
    patch.setattr(RLSpec, "params", lambda self, *stop: replace(right(self, *stop), max_tokens=2))


@dataclass(frozen=True)
class Sickness:
    finding: str
    status: str
    environment: str = ""
    spoil: Callable[[Patch], None] | None = None
    onset: int = ONSET


SICKNESSES = {
    "hard tasks": Sickness("dead groups", "watch", "hard tasks", onset=1),
    "cut answers": Sickness("truncation", "watch", spoil=cut_answers),
    "slow verifier": Sickness("stall", "watch", "slow verifier"),
    "verifier always 0": Sickness("reward error", "broken", "verifier always 0"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes about a third of the sums right."""
    root = tmp_path_factory.mktemp("start")
    data = run_task(root / "data", "collect", environment=SUMS, teacher="arithmetic", traces=2000)
    inputs = {"data": data / "artifacts" / "traces"}
    options = {"steps": 300, "batch_size": 32, "lr": 5e-3, "save_every": 300}
    trained = run_task(root / "sft", "sft", environment=SUMS, inputs=inputs, **options)
    return trained / "artifacts" / "checkpoints" / "final"


def run(root: Path, checkpoint: Path, sickness: Sickness) -> Path:
    environment = {
        "id": "factory",
        "factory": "test_planted_sicknesses:Sums",
        "sickness": sickness.environment,
    }
    options = {"steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": 24, "lr": 1e-4}
    return run_task(root, "rl", environment=environment, inputs={"checkpoint": checkpoint}, **options)


def verdicts(bundle: Path) -> Iterator[tuple[int, Health]]:
    """The verdict after each step, as a reader of the files sees it."""
    rows, timings = metrics(bundle), list(read_json_lines(bundle / "artifacts" / "timings.jsonl"))
    for step in range(1, len(rows) + 1):
        evidence = Evidence(Series(rows[:step]), Series(timings[:step]), samples=SAMPLES)
        yield step, assess_health(evidence)


def test_healthy_run_raises_no_alarm(tmp_path: Path, checkpoint: Path) -> None:
    for step, health in verdicts(run(tmp_path / "run", checkpoint, Sickness("", ""))):
        assert health.status == "healthy", (step, health.line)


@pytest.mark.parametrize("name", SICKNESSES)
def test_verdict_names_the_sickness_within_two_steps(
    name: str, tmp_path: Path, checkpoint: Path, monkeypatch: Patch
) -> None:
    sickness = SICKNESSES[name]
    if sickness.spoil:
        from_onset(monkeypatch, sickness.spoil)
    named = [
        (step, health)
        for step, health in verdicts(run(tmp_path / "run", checkpoint, sickness))
        if health.status != "healthy"
    ]
    step, first = named[0]
    assert (first.findings[0].name, first.status) == (sickness.finding, sickness.status), first.line
    assert sickness.onset <= step < sickness.onset + WITHIN
    assert first.findings[0].since == sickness.onset
