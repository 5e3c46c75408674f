"""What stages that sample answers and have them judged open first, and the figures of what came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.registry import make_environment
from perilune.errors import WorkFailedError
from perilune.learn.training_settings import LearnerSettings
from perilune.rollout.failures import failure_figures
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.stage.memory_plan import engine_room, planned_tokens, require_room
from perilune.tasks.stage.outcomes import passed, strategies
from perilune.tasks.stage.policy import Policy, join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training_tasks import TrainingTasks
from perilune.verifiers import Scorer


@dataclass(frozen=True)
class Player:
    """A policy, the environment it plays in, and what joins them."""

    workspace: Workspace
    device: torch.device
    policy: Policy
    environment: Environment
    engine: Engine
    rollouts: RolloutWorker
    max_tokens: int

    def training_tasks(self, skip: int = 0) -> TrainingTasks:
        """Training tasks after the first `skip`."""
        return TrainingTasks(self.environment, self.workspace, skip=skip)

    def play(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        temperature: float,
        step: int,
        watch: Stopwatch,
        done: int = 0,
        total: int | None = None,
    ) -> Groups:
        """Sample and judge; with `total`, tell of progress in answers, `done` of them before these."""
        params = SamplingParams(self.max_tokens, temperature, self.policy.stop_token_ids)

        def told(finished: int, _: int) -> None:
            if total is not None:
                self.workspace.progress(done + finished, total, "answers")

        return self.rollouts.play(
            tasks, samples=samples, params=params, step=step, watch=watch, on_progress=told
        )


@contextmanager
def open_player(
    workspace: Workspace, max_tokens: int, settings: LearnerSettings | None = None
) -> Iterator[Player]:
    """Load the stage's checkpoint and open its environment.

    Args:
        settings: how the policy is to learn, where it is.

    Raises:
        RequestError: when the answers leave no room for a prompt.
    """
    with Scorer(workspace.job.environment) as scorer:  # its process warms up while the model loads
        device = prepare_device(workspace)
        policy = load_policy(workspace, device, settings)
        require_room(policy.decoder.config, max_tokens)
        environment = make_environment(workspace.job.environment)
        config = policy.decoder.config
        longest = planned_tokens(workspace.job.environment, max_tokens, config)
        engine = Engine(policy.decoder, **engine_room(config, longest, device.type))
        rollouts = RolloutWorker(
            engine, policy.tokenizer, scorer, environment, workspace.job.seed,
            ranks=join_ranks(workspace, device),
        )  # fmt: skip
        yield Player(workspace, device, policy, environment, engine, rollouts, max_tokens)


def outcome_figures(episodes: Sequence[Episode], where: str) -> dict[str, Any]:
    """Mean reward, pass rate, length and strategies of judged episodes.

    Raises:
        WorkFailedError: when none was judged.
    """
    rewards = [one.reward for one in episodes if one.reward is not None]
    if not rewards:
        raise WorkFailedError(f"the verifier judged no episode: {episodes[0].failure}", where=where)
    figures: dict[str, Any] = {
        "reward": sum(rewards) / len(rewards),
        "pass_rate": sum(map(passed, episodes)) / len(rewards),
        **failure_figures(episodes),
        "length": sum(one.sampled for one in episodes) / len(episodes),
        "truncated": sum(one.truncated for one in episodes) / len(episodes),
    }
    for name, found in strategies(episodes).items():
        figures[f"strategy/{name}"] = found["share"]
        figures[f"accuracy/{name}"] = found["accuracy"]
    return figures
