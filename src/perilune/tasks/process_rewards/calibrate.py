"""The work of calibrate: compare cheap values of prefixes with Monte Carlo values."""

import time
from typing import Any

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.data.episodes_file import write_episodes
from perilune.errors import WorkFailedError
from perilune.learn.process_rewards import AnswerValues
from perilune.rollout.timing import Stopwatch
from perilune.tasks.process_rewards.calibration import (
    CalibratedAnswer,
    calibration_metrics,
    calibration_summary,
    describe_calibration,
)
from perilune.tasks.process_rewards.rewards import ProcessRewards
from perilune.tasks.process_rewards.stage import CalibrateSpec
from perilune.tasks.stage.outcomes import outcome_figures
from perilune.tasks.stage.player import open_player
from perilune.tasks.stage.policy import heldout_tasks


def run(workspace: Workspace, spec: CalibrateSpec) -> dict[str, Any]:
    """Sample answers, compute both values of their prefixes, and compare."""
    assert isinstance(spec.process_rewards, AnswerValues)
    workspace.rewind(-1)  # removes the metrics of an earlier attempt
    total, seed = spec.tasks * spec.samples, workspace.job.seed
    watch = Stopwatch()
    with open_player(workspace, spec.max_tokens, memory=spec.memory_plan) as player:
        process = ProcessRewards(
            spec.process_rewards, player.policy.decoder, player.rollouts, spec, spec.token_budget
        )
        tasks = heldout_tasks(player.environment, spec.tasks, seed)
        groups = player.play(
            tasks, samples=spec.samples, temperature=spec.temperature, step=0, watch=watch, total=total
        )
        segmented = process.segment(tasks, groups)
        began = time.perf_counter()
        values = process.answer_values(segmented, spec.process_rewards)
        valued = time.perf_counter()
        rewards = process.continuation_rewards(segmented, 0, spec.continuations)
        played = time.perf_counter()
    episodes = [episode for group in groups for episode in group]
    answers = [
        CalibratedAnswer(segment.task.task_id, cheap, outcomes)
        for segment, cheap, outcomes in zip(segmented, values, rewards, strict=True)
        if cheap is not None and not np.isnan(outcomes).any()
    ]
    if not answers:
        raise WorkFailedError(
            "no answer has both a forward-pass value and a Monte Carlo value: its"
            " task states no right answer, the right answer is too easy to"
            " guess, or the verifier failed",
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
    write_episodes(workspace.episodes / "step-000000.parquet", episodes)
    workspace.metric(0, **calibration_metrics(summary))
    workspace.timing(0, **watch.figures() | {"values": valued - began, "play": played - valued})
    workspace.progress(total, total, "answers")
    sentences = describe_calibration(summary)
    for sentence in sentences:
        workspace.log(sentence)
    return summary | {
        "sentences": sentences,
        "seconds": watch.elapsed,
        "seconds_values": valued - began,
        "seconds_play": played - valued,
    }
