"""The loop of the distill task: the student plays, the teacher reads, the student learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.errors import RequestError
from perilune.learn.distillation import Distillation, chunks, distil
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.config.decoder_config import DecoderConfig
from perilune.rollout.timing import Stopwatch
from perilune.tasks.distill.hints import hinted_messages
from perilune.tasks.rl.metrics import lengths_over
from perilune.tasks.stage.memory_plan import StageMemory, memory_figures
from perilune.tasks.stage.player import open_player, outcome_figures
from perilune.tasks.stage.policy import Policy, start_model
from perilune.tasks.stage.training import finish, first_and_last, restore_optimizer, resume, save_when_due
from perilune.tasks.supervised.demonstrations import Demonstrations

if TYPE_CHECKING:
    from perilune.tasks.distill.spec import DistillSpec

FIRST_AND_LAST = ("loss", "reward", "pass_rate", "length", "reverse_kl", "overlap_ratio", "entropy_gap")
SCHEDULE = 0x0D15  # tells the random numbers of the on-policy schedule from others of the same seed


def run(
    workspace: Workspace, spec: DistillSpec, memory_of: Callable[[DecoderConfig, str], StageMemory]
) -> dict[str, Any]:
    """Distil, and return the summary."""
    seed = workspace.job.seed
    loss = Distillation(spec.loss, spec.k, spec.beta, spec.coefficient, spec.temperature)
    total_watch = Stopwatch()
    with open_player(workspace, spec.max_tokens, spec) as player:
        student, device = player.policy, player.device
        if workspace.has_input("teacher"):
            teacher = Policy(*load_checkpoint(workspace.input("teacher"), device))
        else:
            teacher = start_model(workspace, device)
        _require_same_tokens(student, teacher)
        memory = require_memory(memory_of(teacher.decoder.config, device.type), workspace.job.resources)
        data = None
        if workspace.has_input("data"):
            longest = student.decoder.config.max_position_embeddings
            data = Demonstrations.load(workspace.input("data"), student.tokenizer, seed, longest)
        learner = Learner(student.decoder, spec, ranks=player.rollouts.ranks)
        restore_optimizer(workspace, learner, spec)

        first = resume(workspace, learner)
        workspace.episodes.mkdir(exist_ok=True)
        is_own = np.random.default_rng([seed, SCHEDULE]).random(spec.steps) < spec.on_policy
        tasks = player.training_tasks(skip=int(is_own[:first].sum()) * spec.prompts)
        for step in range(first, spec.steps):
            watch = Stopwatch()
            figures: dict[str, Any] = {"on_policy": float(is_own[step])}
            gains = None
            if is_own[step] or data is None:
                player.engine.update_weights(None, learner.version)
                groups = player.play(
                    tasks.take(spec.prompts), samples=spec.samples, temperature=spec.temperature,
                    step=step + 1, watch=watch,
                )  # fmt: skip
                episodes = [one for group in groups for one in group]
                figures |= outcome_figures(episodes, f"step {step + 1}")
                if workspace.leads:
                    write_episodes(workspace.episodes / f"step-{step + 1:06d}.parquet", episodes)
                gains = _advantages(groups, spec.task_reward)
            else:
                episodes = data.batch(step, spec.prompts * spec.samples)
            watch.start_learning()
            prompts = teacher_prompts(episodes, teacher, spec.system)
            parts = chunks(
                episodes, prompts, spec.token_budget, advantages=gains, temperature=spec.temperature
            )
            tokens = sum(int(one.loss_mask.sum()) for one in episodes)
            figures |= distil(learner, teacher.decoder, parts, loss, tokens)
            figures |= learner.optim_step(learning_rate(spec, step, spec.steps))
            watch.stop_learning()
            workspace.metric(step + 1, **figures)
            workspace.timing(step + 1, **watch.figures())
            shown = {name: figures[name] for name in ("pass_rate", "overlap_ratio") if name in figures}
            workspace.progress(step + 1, spec.steps, loss=figures["loss"], **shown)
            save_when_due(workspace, learner, step + 1, spec)
    lines = workspace.metrics()
    everywhere = [name for name in FIRST_AND_LAST if all(name in line for line in lines)]
    return finish(workspace, student, learner, spec) | {
        "algorithm": spec.loss,
        "overlap_k": lines[-1]["overlap_k"],
        "length_dynamics": lengths_over(workspace),
        **first_and_last(lines, everywhere),
        "seconds": total_watch.elapsed,
        "memory": memory_figures(memory, device),
    }


def teacher_prompts(episodes: Sequence[Episode], teacher: Policy, system: str) -> list[list[int]]:
    """Each episode's prompt as the teacher's template writes it, after `system`.

    Raises:
        RequestError: when prompt and answer are more than the teacher can see: it would judge half a prompt.
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
            "teacher and student have different tokens: a token of the one says nothing to the other",
            where="teacher",
            remedy="take a teacher of the same model family, or train on its answers with sft",
        )


def _advantages(groups: Sequence[Sequence[Episode]], scale: float) -> list[float] | None:
    """Rewards less their group's mean, times `scale`; None when they do not count."""
    if not scale:
        return None
    gains = []
    for group in groups:
        known = [one.reward for one in group if one.reward is not None]
        mean = sum(known) / len(known) if known else 0.0
        gains += [0.0 if one.reward is None else scale * (one.reward - mean) for one in group]
    return gains
