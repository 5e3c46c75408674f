"""Set up for stages that sample answers: a policy with its engine, environment and rollout worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.registry import make_environment
from perilune.errors import WorkFailedError
from perilune.learn.training_settings import LearnerSettings
from perilune.models.config.decoder_config import DecoderConfig
from perilune.rollout.failures import failure_figures
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.stage.memory_plan import StageMemory, make_engine, planned_tokens, require_room
from perilune.tasks.stage.outcomes import passed, strategies
from perilune.tasks.stage.policy import Policy, join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training_tasks import TrainingTasks
from perilune.verifiers import Scorer


@dataclass(frozen=True)
class Player:
    """A policy, the environment it plays in, and the engine and worker that join them.

    Attributes:
        longest: most tokens of an episode after its prompt.
        memory: the stage's memory plan, where the stage gave one.
    """

    workspace: Workspace
    device: torch.device
    policy: Policy
    environment: Environment
    engine: Engine
    rollouts: RolloutWorker
    max_tokens: int
    longest: int
    memory: StageMemory | None = None

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
        """Sample and score; with `total`, report progress in answers, `done` of them before these."""
        params = SamplingParams(self.max_tokens, temperature, self.policy.stop_token_ids)

        def report(finished: int, _: int) -> None:
            if total is not None:
                self.workspace.progress(done + finished, total, "answers")

        return self.rollouts.play(
            tasks, samples=samples, params=params, step=step, watch=watch, on_progress=report
        )


@contextmanager
def open_player(
    workspace: Workspace,
    max_tokens: int,
    settings: LearnerSettings | None = None,
    memory: Callable[[DecoderConfig, int, str], StageMemory] | None = None,
) -> Iterator[Player]:
    """Load the stage's checkpoint, open its environment, and set up engine and rollouts.

    Args:
        max_tokens: of a turn.
        settings: of learning, for a policy that is trained.
        memory: plans the stage's memory from the model's shape, the longest episode and the type of device;
            the plan is compared with the machine before the engine is set up.

    Raises:
        RequestError: when the answers leave no room for a prompt, or the plan does not fit.
    """
    with Scorer(workspace.job.environment) as scorer:  # its process warms up while the model loads
        device = prepare_device(workspace)
        policy = load_policy(workspace, device, settings)
        config = policy.decoder.config
        require_room(config, max_tokens)
        environment = make_environment(workspace.job.environment)
        longest = planned_tokens(workspace.job.environment, max_tokens, config)
        planned = None
        if memory is not None:
            planned = require_memory(memory(config, longest, device.type), workspace.job.resources)
        engine = make_engine(policy.decoder, longest)
        ranks = join_ranks(workspace, device)
        rollouts = RolloutWorker(
            engine, policy.tokenizer, scorer, environment, workspace.job.seed, ranks=ranks
        )
        yield Player(workspace, device, policy, environment, engine, rollouts, max_tokens, longest, planned)


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
