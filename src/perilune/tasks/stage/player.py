"""The set-up of a stage that samples: policy, engine, environment and rollout worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.engine.engine import Engine
from perilune.engine.openvino_runner import OpenVino
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Environment, Task
from perilune.environments.core.registry import make_environment
from perilune.learn.training_settings import LearnerSettings
from perilune.models.config.decoder_config import DecoderConfig
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.stage.memory_plan import (
    StageMemory,
    make_engine,
    planned_episode_tokens,
    require_prompt_room,
)
from perilune.tasks.stage.policy import Policy, join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training_tasks import TrainingTasks
from perilune.verifiers import Scorer


@dataclass(frozen=True)
class Player:
    """A policy, its environment, and the engine and worker that sample rollouts.

    Attributes:
        max_tokens: most tokens of a turn.
        max_episode_tokens: most tokens of an episode after its prompt.
        memory: the stage's memory plan; None if `open_player` was given none.
    """

    workspace: Workspace
    device: torch.device
    policy: Policy
    environment: Environment
    engine: Engine
    rollouts: RolloutWorker
    max_tokens: int
    max_episode_tokens: int
    memory: StageMemory | None = None

    def training_tasks(self, skip: int = 0) -> TrainingTasks:
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
        """Sample and score the tasks.

        Args:
            done: answers of the stage finished before this call.
            total: all answers of the stage; with it, progress is reported.
        """
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
    *,
    environments: int = 1,
    record_routes: bool = False,
    backend: OpenVino | None = None,
) -> Iterator[Player]:
    """Load the stage's checkpoint, open its environment, and set up engine and rollout worker.

    Args:
        max_tokens: most tokens of a turn.
        settings: training settings, for a policy that is trained.
        memory: computes the memory plan from the model's configuration, the tokens of the longest episode and
            the type of device. The plan must fit the machine before the engine is made.
        environments: number of environment processes.
        record_routes: record which experts compute each token.
        backend: computes the engine's steps; None for Perilune's own runner.

    Raises:
        RequestError: when the answers leave no room for a prompt, or the plan does not fit.
    """
    with Scorer(
        workspace.job.environment, workers=environments
    ) as scorer:  # its process starts while the model loads
        device = prepare_device(workspace)
        policy = load_policy(workspace, device, settings)
        config = policy.decoder.config
        require_prompt_room(config, max_tokens)
        environment = make_environment(workspace.job.environment)
        max_episode_tokens = planned_episode_tokens(workspace.job.environment, max_tokens, config)
        planned = None
        if memory is not None:
            planned = require_memory(memory(config, max_episode_tokens, device.type), workspace.job.resources)
        samples = None if planned is None else planned.slots
        engine = make_engine(
            policy.decoder,
            max_episode_tokens,
            policy.tokenizer,
            samples=samples,
            record_routes=record_routes,
            backend=backend,
        )
        ranks = join_ranks(workspace, device, policy.decoder)
        rollouts = RolloutWorker(
            engine, policy.tokenizer, scorer, environment, workspace.job.seed, ranks=ranks
        )
        yield Player(
            workspace, device, policy, environment, engine, rollouts, max_tokens, max_episode_tokens, planned
        )
