"""The work of calibrate: compare the values of prefixes with Monte Carlo rollouts from them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.data.episodes_file import write_episodes
from perilune.errors import WorkFailedError
from perilune.learn.process_rewards import AnswerValues
from perilune.rollout.timing import Stopwatch
from perilune.tasks.process_rewards.calibration import Calibrated, calibration_summary, flat, told
from perilune.tasks.process_rewards.rewards import ProcessRewards
from perilune.tasks.process_rewards.spec import CalibrateSpec
from perilune.tasks.stage.player import open_player, outcome_figures
from perilune.tasks.stage.policy import heldout_tasks


def run(workspace: Workspace, spec: CalibrateSpec) -> dict[str, Any]:
    """Sample answers, value their prefixes, play on from them, and compare."""
    assert isinstance(spec.process_rewards, AnswerValues)
    workspace.rewind(-1)  # removes the figures of an earlier attempt
    total, seed = spec.tasks * spec.samples, workspace.job.seed
    watch = Stopwatch()
    with open_player(workspace, spec.max_tokens) as player:
        process = ProcessRewards(
            spec.process_rewards, player.policy.decoder, player.rollouts, spec, spec.token_budget
        )
        tasks = heldout_tasks(player.environment, spec.tasks, seed)
        groups = player.play(
            tasks, samples=spec.samples, temperature=spec.temperature, step=0, watch=watch, total=total
        )
        walks = process.walks(tasks, groups)
        begun = time.perf_counter()
        values = process.answered(walks, spec.process_rewards)
        valued = time.perf_counter()
        verdicts = process.played(walks, 0, spec.continuations)
        played = time.perf_counter()
    episodes = [one for group in groups for one in group]
    answers = [
        Calibrated(walk.task.task_id, found, outcomes)
        for walk, found, outcomes in zip(walks, values, verdicts, strict=True)
        if found is not None and not np.isnan(outcomes).any()
    ]
    if not answers:
        raise WorkFailedError(
            "no answer could be given values: none is stated, it is guessed too easily, or nobody judged",
            where=player.environment.id,
            remedy="choose an environment that states its answers, or raise process_rewards.guessable",
        )
    summary = {
        "kind": "calibration",
        "environment": player.environment.id,
        "tasks": spec.tasks,
        "samples": spec.samples,
        "continuations": spec.continuations,
        "without": 1 - len(answers) / len(episodes),
        **outcome_figures(episodes, player.environment.id),
        **calibration_summary(answers, seed),
    }
    workspace.episodes.mkdir(exist_ok=True)
    write_episodes(workspace.episodes / "step-000000.parquet", episodes)
    workspace.metric(0, **flat(summary))
    workspace.timing(0, **watch.figures() | {"values": valued - begun, "play": played - valued})
    workspace.progress(total, total, "answers")
    said = told(summary)
    for sentence in said:
        workspace.log(sentence)
    return summary | {
        "said": said,
        "seconds": watch.elapsed,
        "seconds_values": valued - begun,
        "seconds_play": played - valued,
    }
