"""rl: sample, judge, compare within the group, learn, again. The main loop is `RL.run`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import Consumes
from perilune.environments.core.registry import REWARDS
from perilune.errors import RequestError
from perilune.learn.process_rewards import ProcessRewardField
from perilune.learn.training_settings import AlgorithmSettings, LearnerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving, planned
from perilune.tasks.stage.sampling import SamplingSpec

if TYPE_CHECKING:
    import torch

    from perilune.bundle.workspace import Workspace
    from perilune.learn.algorithms import Algorithm
    from perilune.learn.critic import Critic
    from perilune.learn.trainer import Learner
    from perilune.models.config.decoder_config import DecoderConfig
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.rollout.groups import Groups
    from perilune.rollout.learned_reward import LearnedReward
    from perilune.rollout.opponents import Alone
    from perilune.rollout.worker import RolloutWorker
    from perilune.tasks.selfplay.league import League
    from perilune.tasks.stage.memory_plan import StageMemory


class RLSpec(Saving, AlgorithmSettings, LearnerSettings, SamplingSpec):
    """Fields of an rl stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the policy starts")
    steps: int = Field(100, ge=1, description="batches of episodes, sampled and learned from")
    prompts: int = Field(32, ge=1, description="tasks a step")
    samples: int = Field(8, ge=1, description="episodes a task: the size of a group")
    reward_model: Annotated[str | None, Consumes("reward_model")] = Field(
        None, description="stage whose reward model is climbed; the verifier's verdict is then only watched"
    )
    verifier_weight: float = Field(
        0.0, ge=0, description="of the verdict beside a reward model; above 0 it is trained on too"
    )
    process_rewards: ProcessRewardField = Field(
        None, description="process rewards: a name, or a section of a name and its options"
    )

    @model_validator(mode="after")
    def _large_enough(self) -> RLSpec:
        least = self.algorithm.least_samples
        if self.samples < least:
            raise ValueError(
                f"samples is {self.samples}, and {self.algorithm.name} compares at least {least}"
            )
        return self

    @model_validator(mode="after")
    def _takes_the_kl(self) -> RLSpec:
        if self.kl and self.kl_estimator == "k1_reward" and not self.algorithm.takes_any_reward:
            raise ValueError(
                f"kl_estimator is k1_reward, which makes rewards negative, and {self.algorithm.name} takes"
                " rewards from 0 upwards or verdicts: k2 has the same gradient as a loss"
            )
        return self

    @model_validator(mode="after")
    def _takes_process_rewards(self) -> RLSpec:
        if self.process_rewards is None:
            return self
        if self.algorithm.takes_step_rewards != (self.process_rewards.role == "reward"):
            right = "reward" if self.algorithm.takes_step_rewards else "bonus, advantage or trace"
            raise ValueError(
                f"process_rewards.role is {self.process_rewards.role}, and {self.algorithm.name} takes"
                f" process rewards as {right}"
            )
        if self.reward_model and self.process_rewards.name == "montecarlo":
            raise ValueError(
                "process_rewards: montecarlo plays for the verifier's verdict, and a reward model is climbed"
            )
        return self


class RL:
    """Reinforcement learning against the environment's verifier."""

    name = "rl"
    spec: type[RLSpec] = RLSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"
    parallel = True
    called_off = True  # when there has been nothing to learn for long

    def league(self, workspace: Workspace, learner: Learner, rollouts: RolloutWorker) -> Alone | League:
        """Who plays besides the policy that learns."""
        from perilune.rollout.opponents import Alone

        return Alone(rollouts)

    def plan(self, job: Job) -> Mapping[str, object]:
        """Episodes, updates, the schedule and memory."""
        from perilune.tasks.stage.memory_plan import model_config, planned_tokens

        spec = read_spec(self.spec, job)
        if spec.reward_model and not spec.verifier_weight and job.environment.get(REWARDS):
            raise RequestError(
                "the recipe's rewards are not climbed beside a reward model",
                where=f"stages.{job.stage}.reward_model",
                remedy="verifier_weight: 1 counts both",
            )
        config = model_config(job)
        longest = planned_tokens(job.environment, spec.max_tokens, config)
        memory = _memory(spec, config, longest, job.resources.device)
        episodes = spec.steps * spec.prompts * spec.samples
        most = spec.algorithm.refills
        refills = f", and dead groups refilled up to {most} times a step" if most else ""
        return {
            "episodes": f"{spec.steps} steps x {spec.prompts} tasks x {spec.samples} = {episodes:,}{refills}",
            "tokens at most": f"{episodes * (1 + most) * longest:,}",
            "algorithm": f"{_told(spec.algorithm)}, updates a step"
            f" {spec.updates_per_batch * spec.epochs_per_batch}, KL {spec.kl:g}",
            **({"process rewards": spec.process_rewards.describe()} if spec.process_rewards else {}),
            "learning rate": describe_learning_rate(spec, job),
            "checkpoints": planned(spec, memory),
            **spec.planned(),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The loop."""
        from perilune.engine.engine import Engine
        from perilune.environments.core.registry import make_environment
        from perilune.learn.trainer import Learner
        from perilune.rollout.dynamic_sampling import play_until_live
        from perilune.rollout.timing import Stopwatch
        from perilune.rollout.worker import RolloutWorker
        from perilune.tasks.checks.gold_watch import GoldWatch
        from perilune.tasks.checks.preflight import run_preflight
        from perilune.tasks.process_rewards.rewards import ProcessRewards
        from perilune.tasks.rl.metrics import Observer
        from perilune.tasks.rl.update import PolicyUpdates
        from perilune.tasks.stage.memory_plan import engine_room, memory_figures, planned_tokens
        from perilune.tasks.stage.policy import join_ranks, load_policy, load_reference, prepare_device
        from perilune.tasks.stage.publishing import Publisher
        from perilune.tasks.stage.training import finish, restore_optimizer, resume, save_when_due
        from perilune.tasks.stage.training_tasks import TrainingTasks
        from perilune.verifiers import Scorer

        spec = read_spec(self.spec, workspace.job, workspace.log)
        with Scorer(workspace.job.environment) as scorer:
            device = prepare_device(workspace)
            policy = load_policy(workspace, device, spec)
            reference = load_reference(workspace, device, policy, spec) if _has_reference(spec) else None
            config = policy.decoder.config
            environment = make_environment(workspace.job.environment)
            longest = planned_tokens(workspace.job.environment, spec.max_tokens, config)
            memory = require_memory(_memory(spec, config, longest, device.type), workspace.job.resources)
            engine = Engine(policy.decoder, **engine_room(config, longest, device.type))
            learner = Learner(
                policy.decoder, spec, critic=_critic(spec, config, device),
                critic_lr=getattr(spec.algorithm, "critic_lr", None),
                ranks=join_ranks(workspace, device),
            )  # fmt: skip
            restore_optimizer(workspace, learner, spec)
            rollouts = RolloutWorker(
                engine, policy.tokenizer, scorer, environment, workspace.job.seed,
                _learned_reward(workspace, device, policy.tokenizer, spec),
                learner.ranks,
            )  # fmt: skip
            league = self.league(workspace, learner, rollouts)
            process = ProcessRewards(
                spec.process_rewards, policy.decoder, league.rollouts, spec, spec.token_budget
            )

            first = resume(workspace, learner)
            run_preflight(workspace, spec, config, device, first)
            observer = Observer(
                workspace, spec.steps,
                GoldWatch(
                    workspace, partial(load_reference, workspace, device, policy, spec), spec.temperature
                ),
                called_off=self.called_off,
            )  # fmt: skip
            publisher = Publisher(engine, learner, reference)
            tasks = TrainingTasks(environment, workspace, skip=learner.memory.get("tasks", 0))
            updates = PolicyUpdates(
                spec, learner, reference,
                longest=longest, draws_are_known=getattr(environment, "players", 1) == 1,
            )  # fmt: skip
            for step in range(first, spec.steps):
                watch = Stopwatch()
                publisher.publish()

                def play(count: int, before: int, step: int = step, watch: Stopwatch = watch) -> Groups:
                    return publisher.checked(process.play(
                        tasks.take(count), samples=spec.samples, params=spec.params(policy.stop_token_ids),
                        step=step + 1, watch=watch, first=before,
                    ))  # fmt: skip

                groups = play_until_live(play, spec.prompts, spec.algorithm.refills)
                tasks.check(groups, step + 1)
                learner.memory["tasks"] = tasks.taken
                watch.start_learning()
                weighted, figures = updates.make(groups, step)
                watch.stop_learning()
                observer.record(
                    step + 1, weighted,
                    league.after(step + 1, weighted, figures | {"epoch": tasks.epoch}), watch,
                )  # fmt: skip
                save_when_due(workspace, learner, step + 1, spec)
        return {
            **finish(workspace, policy, learner, spec, league.write),
            **league.summary(),
            **observer.summary(spec.algorithm, spec.samples),
            "memory": memory_figures(memory, device),
        }


def _learned_reward(
    workspace: Workspace, device: torch.device, tokenizer: Tokenizer, spec: RLSpec
) -> LearnedReward | None:
    from perilune.rollout.learned_reward import LearnedReward

    if not workspace.has_input("reward_model"):
        return None
    return LearnedReward.load(
        workspace.input("reward_model"), device, tokenizer, spec.verifier_weight, spec.token_budget
    )


def _critic(spec: RLSpec, config: DecoderConfig, device: torch.device) -> Critic | None:
    from perilune.learn.critic import Critic

    return Critic(config.hidden_size).to(device) if "values" in spec.algorithm.needs else None


def _has_reference(spec: RLSpec) -> bool:
    return spec.kl > 0 or "deviation" in spec.algorithm.needs


def _told(algorithm: Algorithm) -> str:
    """Name and options."""
    options = algorithm.model_dump(exclude={"name"}, exclude_none=True)
    listed = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"{algorithm.name} ({listed})"


def _memory(spec: RLSpec, config: DecoderConfig, longest: int, device: str) -> StageMemory:
    from perilune.tasks.stage.memory_plan import stage_memory

    return stage_memory(
        config,
        samples=spec.prompts * spec.samples,
        max_tokens=longest,
        token_budget=spec.token_budget,
        reference=_has_reference(spec),
        learner=spec,
        device=device,
    )


plugin = RL()
