"""The loop of distill: the student samples, the teacher scores every token, the student learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.errors import RequestError
from perilune.learn.distillation import Distillation, chunks, distil
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.tasks.distill.memory import distill_memory
from perilune.tasks.distill.spec import DistillSpec
from perilune.tasks.rl.metrics import lengths_over
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.player import open_player, outcome_figures
from perilune.tasks.stage.policy import Policy, start_model
from perilune.tasks.stage.publishing import Publisher
from perilune.tasks.stage.system_prompt import hinted_messages
from perilune.tasks.stage.training import StepReport, TrainingLoop, first_and_last
from perilune.tasks.supervised.demonstrations import Demonstrations

FIRST_AND_LAST = ("loss", "reward", "pass_rate", "length", "reverse_kl", "overlap_ratio", "entropy_gap")
SCHEDULE = 0x0D15  # tells the random numbers of the on-policy schedule from others of the same seed


def run(workspace: Workspace, spec: DistillSpec) -> dict[str, Any]:
    """Train the student, and return the stage's summary."""
    seed = workspace.job.seed
    loss = Distillation(spec.loss, spec.k, spec.beta, spec.coefficient, spec.temperature)
    with open_player(workspace, spec.max_tokens, spec) as player:
        student, device = player.policy, player.device
        teacher = _teacher(workspace, device)
        _require_same_tokens(student, teacher)
        memory = require_memory(
            distill_memory(spec, teacher.decoder.config, device.type), workspace.job.resources
        )
        data = None
        if workspace.has_input("data"):
            longest = student.decoder.config.max_position_embeddings
            data = Demonstrations.load(workspace.input("data"), student.tokenizer, seed, longest)
        learner = Learner(student.decoder, spec, ranks=player.rollouts.ranks)
        loop = TrainingLoop(workspace, learner, spec)
        publisher = Publisher(player.engine, learner)
        workspace.episodes.mkdir(exist_ok=True)
        on_policy = np.random.default_rng([seed, SCHEDULE]).random(spec.steps) < spec.on_policy
        tasks = player.training_tasks(skip=int(on_policy[: loop.first].sum()) * spec.prompts)

        def sample(done: int, watch: Stopwatch) -> Groups:
            publisher.publish()
            groups = player.play(
                tasks.take(spec.prompts),
                samples=spec.samples,
                temperature=spec.temperature,
                step=done + 1,
                watch=watch,
            )
            if workspace.leads:
                path = workspace.episodes / f"step-{done + 1:06d}.parquet"
                write_episodes(path, (one for group in groups for one in group))
            return publisher.checked(groups)

        def step(done: int, watch: Stopwatch) -> StepReport:
            figures: dict[str, Any] = {"on_policy": float(on_policy[done])}
            advantages = None
            if on_policy[done] or data is None:
                groups = sample(done, watch)
                episodes = [one for group in groups for one in group]
                figures |= outcome_figures(episodes, f"step {done + 1}")
                advantages = _advantages(groups, spec.task_reward)
            else:
                episodes = data.batch(done, spec.prompts * spec.samples)
            with watch.learns():
                prompts = teacher_prompts(episodes, teacher, spec.system)
                parts = chunks(
                    episodes, prompts, spec.token_budget, advantages=advantages, temperature=spec.temperature
                )
                tokens = sum(int(one.loss_mask.sum()) for one in episodes)
                figures |= distil(learner, teacher.decoder, parts, loss, tokens)
                figures |= learner.optim_step(learning_rate(spec, done, spec.steps))
            shown = ("loss", "pass_rate", "overlap_ratio")
            return StepReport(figures, {name: figures[name] for name in shown if name in figures})

        loop.run(step)
    lines = workspace.metrics()
    everywhere = [name for name in FIRST_AND_LAST if all(name in line for line in lines)]
    return loop.finish(student) | {
        "algorithm": spec.loss,
        "overlap_k": lines[-1]["overlap_k"],
        "length_dynamics": lengths_over(workspace),
        **first_and_last(lines, everywhere),
        "memory": memory_figures(memory, device),
    }


def _teacher(workspace: Workspace, device: torch.device) -> Policy:
    """The stage's teacher; without one, the recipe's model as the student started."""
    if workspace.has_input("teacher"):
        return Policy(*load_checkpoint(workspace.input("teacher"), device))
    return start_model(workspace, device)


def teacher_prompts(episodes: Sequence[Episode], teacher: Policy, system: str) -> list[list[int]]:
    """Each episode's prompt as the teacher's template writes it, after `system`.

    Raises:
        RequestError: when prompt and answer exceed the teacher's context: a truncated prompt would be scored
            wrongly.
    """
    prompts = teacher.tokenizer.encode_prompts([hinted_messages(one.opening, system) for one in episodes])
    longest = teacher.decoder.config.max_position_embeddings
    for one, prompt in zip(episodes, prompts, strict=True):
        if len(prompt) + len(one.token_ids) > longest:
            raise RequestError(
                f"the teacher sees {longest} tokens, and episode {one.episode_id} has"
                f" {len(prompt) + len(one.token_ids)} with its prompt",
                where="teacher",
                remedy="lower max_tokens, shorten system, or take a teacher with more positions",
            )
    return prompts


def _require_same_tokens(student: Policy, teacher: Policy) -> None:
    if not student.tokenizer.has_same_tokens(teacher.tokenizer):
        raise RequestError(
            "teacher and student have different vocabularies",
            where="teacher",
            remedy="take a teacher of the same model family, or train on its answers with sft",
        )


def _advantages(groups: Sequence[Sequence[Episode]], scale: float) -> list[float] | None:
    """`scale` times the reward minus its group's mean, one an episode; None when `scale` is 0."""
    if not scale:
        return None
    advantages = []
    for group in groups:
        known = [one.reward for one in group if one.reward is not None]
        mean = sum(known) / len(known) if known else 0.0
        advantages += [0.0 if one.reward is None else scale * (one.reward - mean) for one in group]
    return advantages
