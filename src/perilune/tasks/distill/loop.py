"""The loop of distill: the student samples, the teacher scores every token, and the student is trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.errors import RequestError
from perilune.learn.advantages import centred
from perilune.learn.distillation import Distillation, distill, split_chunks
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.learn.weights import rewards
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.config.decoder_config import DecoderConfig
from perilune.rollout.timing import Stopwatch
from perilune.tasks.distill.stage import DistillSpec
from perilune.tasks.rl.metrics import compare_lengths
from perilune.tasks.stage.memory_plan import StageMemory, memory_figures
from perilune.tasks.stage.outcomes import outcome_figures
from perilune.tasks.stage.player import Player, open_player
from perilune.tasks.stage.policy import Policy, load_recipe_model
from perilune.tasks.stage.publishing import Publisher
from perilune.tasks.stage.system_message import prepend_system_message
from perilune.tasks.stage.training import StepReport, TrainingLoop, mean_first_and_last
from perilune.tasks.supervised.demonstrations import Demonstrations
from perilune.tasks.supervised.tokens import RowReader

FIRST_AND_LAST = ("loss", "reward", "pass_rate", "length", "reverse_kl", "overlap_ratio", "entropy_gap")
SCHEDULE = 0x0D15  # separates the random numbers of the on-policy schedule from others of the same seed


def run(workspace: Workspace, spec: DistillSpec) -> dict[str, Any]:
    """Train the student and return the stage's summary."""

    def planned(config: DecoderConfig, _: int, device: str) -> StageMemory:
        return spec.memory_plan(config, device)

    with open_player(workspace, spec.max_tokens, spec, planned) as player:
        student, device = player.policy, player.device
        teacher = _teacher(workspace, device)
        _require_same_tokens(student, teacher)
        plan = spec.memory_plan(teacher.decoder.config, device.type)
        memory = require_memory(plan, workspace.job.resources)
        learner = Learner(student.decoder, spec, ranks=player.rollouts.ranks)
        loop = TrainingLoop(workspace, learner, spec, student, rollouts=player.rollouts)
        source = _Source(workspace, spec, player, Publisher(player.engine, learner), loop.completed_steps)
        loss = Distillation(spec.loss, spec.k, spec.beta, spec.coefficient, spec.temperature)

        def step(done: int, watch: Stopwatch) -> StepReport:
            episodes, advantages, figures = source.batch(done, watch)
            with watch.measure("learning"):
                prompts = teacher_prompts(episodes, teacher, spec.system)
                parts = split_chunks(
                    episodes, prompts, spec.token_budget, advantages=advantages, temperature=spec.temperature
                )
                tokens = sum(int(episode.loss_mask.sum()) for episode in episodes)
                figures |= distill(learner, teacher.decoder, parts, loss, tokens)
                figures |= learner.optim_step(learning_rate(spec, done, spec.steps))
            names = ("loss", "pass_rate", "overlap_ratio")
            return StepReport(figures, {name: figures[name] for name in names if name in figures})

        loop.run(step)
    lines = workspace.step_metrics()
    everywhere = [name for name in FIRST_AND_LAST if all(name in line for line in lines)]
    return loop.finish(student) | {
        "algorithm": spec.loss,
        "overlap_k": lines[-1]["overlap_k"],
        "length_dynamics": compare_lengths(workspace),
        **mean_first_and_last(lines, everywhere),
        "memory": memory_figures(memory, device),
    }


class _Source:
    """The episodes of each step: the student's own answers, or in off-policy steps the stage's traces."""

    def __init__(
        self, workspace: Workspace, spec: DistillSpec, player: Player, publisher: Publisher, done: int
    ) -> None:
        self._workspace, self._spec, self._player, self._publisher = workspace, spec, player, publisher
        seed, policy = workspace.job.seed, player.policy
        self._data = None
        if workspace.has_input("data"):
            reader = RowReader(policy.tokenizer, policy.decoder.config.max_position_embeddings)
            self._data = Demonstrations([workspace.input("data")], reader, seed, with_messages=True)
        self._on_policy = np.random.default_rng([seed, SCHEDULE]).random(spec.steps) < spec.on_policy
        self._tasks = player.training_tasks(skip=int(self._on_policy[:done].sum()) * spec.prompts)

    def batch(self, done: int, watch: Stopwatch) -> tuple[list[Episode], list[float] | None, dict[str, Any]]:
        """Return the episodes of a step, their advantages if `task_reward` is set, and their metrics."""
        spec = self._spec
        figures: dict[str, Any] = {"on_policy": float(self._on_policy[done])}
        if self._data is not None and not self._on_policy[done]:
            return self._data.batch(done, spec.prompts * spec.samples), None, figures
        self._publisher.publish()
        groups = self._player.play(
            self._tasks.take(spec.prompts),
            samples=spec.samples,
            temperature=spec.temperature,
            step=done + 1,
            watch=watch,
        )
        episodes = [episode for group in groups for episode in group]
        if self._workspace.leads:
            write_episodes(self._workspace.episodes / f"step-{done + 1:06d}.parquet", episodes)
        self._publisher.check_versions(groups)
        figures |= outcome_figures(episodes, f"step {done + 1}") | {"groups": len(groups)}
        return episodes, _advantages(groups, spec.task_reward), figures


def _teacher(workspace: Workspace, device: torch.device) -> Policy:
    """Return the stage's teacher, or the recipe's model if the stage has no teacher."""
    if workspace.has_input("teacher"):
        return Policy(*load_checkpoint(workspace.input("teacher"), device))
    return load_recipe_model(workspace, device)


def teacher_prompts(episodes: Sequence[Episode], teacher: Policy, system: str) -> list[list[int]]:
    """Return the tokens of each episode's prompt, after the message `system`, in the teacher's chat template.

    Raises:
        RequestError: when prompt and answer exceed the teacher's positions.
    """
    prompts = teacher.tokenizer.encode_prompts(
        [prepend_system_message(episode.opening, system) for episode in episodes]
    )
    longest = teacher.decoder.config.max_position_embeddings
    for episode, prompt in zip(episodes, prompts, strict=True):
        if len(prompt) + len(episode.token_ids) > longest:
            raise RequestError(
                f"the teacher has {longest} positions, and episode {episode.episode_id} has"
                f" {len(prompt) + len(episode.token_ids)} tokens with its prompt",
                where="teacher",
                remedy="lower max_tokens, shorten `system`, or use a teacher with more positions",
            )
    return prompts


def _require_same_tokens(student: Policy, teacher: Policy) -> None:
    if not student.tokenizer.has_same_tokens(teacher.tokenizer):
        raise RequestError(
            "teacher and student have different vocabularies",
            where="teacher",
            remedy="use a teacher of the same model family, or train on its answers with sft",
        )


def _advantages(groups: Sequence[Sequence[Episode]], scale: float) -> list[float] | None:
    """Return `scale` times (reward - mean of the group) for each episode; None when `scale` is 0."""
    if not scale:
        return None
    return [scale * value for group in groups for value in np.nan_to_num(centred(rewards(group))).tolist()]
