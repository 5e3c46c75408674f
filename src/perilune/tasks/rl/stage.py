"""rl: reinforcement learning against the environment's verifier, or against a reward model."""

from collections.abc import Mapping
from typing import TypeVar

from perilune.bundle.job import Job
from perilune.environments.core.managed_context import CONTEXT_KEY as CONTEXT
from perilune.environments.core.registry import MIXTURE, REWARDS, make_environment
from perilune.errors import RequestError
from perilune.learn.algorithms import Algorithm
from perilune.plural import plural
from perilune.tasks.process_rewards.requirements import check_process_rewards
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.custom_metrics import CustomMetrics
from perilune.tasks.stage.memory_plan import model_config, planned_episode_tokens
from perilune.tasks.stage.sampling import check_server
from perilune.tasks.stage.stage import Stage, training_plan

Spec = TypeVar("Spec", bound=RLSpec)


class ReinforcementStage(Stage[Spec]):
    """Base of rl and selfplay, with the plan that they share."""

    produces = "checkpoint"

    def describe(self, spec: Spec, job: Job) -> Mapping[str, object]:
        """Return the plan: episodes, updates, the schedule and memory.

        Raises:
            RequestError: when the environment or the resources do not fit the spec. For example, `rewards`
                are ignored beside a reward model, or a server samples for several processes.
        """
        if spec.reward_model and not spec.verifier_weight and job.environment.get(REWARDS):
            raise RequestError(
                "`rewards` is ignored when `reward_model` is set",
                where=f"stages.{job.stage}.reward_model",
                remedy="set verifier_weight above 0 to combine them, or remove one of them",
            )
        if job.environment.get(CONTEXT) and not spec.train_sub_agents:
            raise RequestError(
                "the environment's `context` begins new contexts, and the policy would not learn in them",
                where=f"stages.{job.stage}.train_sub_agents",
                remedy="set train_sub_agents: true",
            )
        _check_verdicts(spec, job)
        check_process_rewards(spec.process_rewards, make_environment(job.environment))
        if spec.asynchronous is not None:
            _check_asynchronous(job)
        if spec.server is not None:
            check_server(spec.server, job)
            _check_one_process(job, "engine", "a server samples for one learner process")
        CustomMetrics(spec.metrics)  # refuses functions that cannot be loaded
        config = model_config(job)
        if spec.routing_replay and config.experts is None:
            raise RequestError(
                f"a {config.architecture} model has no experts, so there are no routes to replay",
                where=f"stages.{job.stage}.routing_replay",
                remedy="remove routing_replay, or train a mixture of experts",
            )
        longest = planned_episode_tokens(job.environment, spec.max_tokens, config)
        episodes = spec.steps * spec.prompts * spec.samples
        max_refills = spec.algorithm.refills
        refills = f", and dead groups refilled up to {max_refills} times a step" if max_refills else ""
        tasks = f"{plural(spec.steps, 'step')} x {plural(spec.prompts, 'task')}"
        return {
            "episodes": f"{tasks} x {spec.samples} = {episodes:,}{refills}",
            "tokens at most": f"{episodes * (1 + max_refills) * longest:,}",
            "algorithm": f"{_describe_algorithm(spec.algorithm)}; updates per step:"
            f" {spec.updates_per_batch * spec.epochs_per_batch}; {_describe_kl(spec)}",
            **({"curriculum": spec.curriculum.describe()} if spec.curriculum else {}),
            **({"engine": f"OpenVINO on {spec.openvino.device}"} if spec.openvino else {}),
            **({"engine": f"{spec.server.url}, which gets the weights of each step"} if spec.server else {}),
            **({"asynchronous": spec.asynchronous.describe()} if spec.asynchronous else {}),
            **({"routing": "replayed in training"} if spec.routing_replay else {}),
            **({"auxiliary rewards": spec.auxiliary_rewards.describe()} if spec.auxiliary_rewards else {}),
            **({"process rewards": spec.process_rewards.describe()} if spec.process_rewards else {}),
            **training_plan(spec, job, spec.memory_plan(config, longest, job.resources.device)),
        }


class RL(ReinforcementStage[RLSpec]):
    """Reinforcement learning against the environment's verifier."""

    name = "rl"
    spec = RLSpec
    loop = "perilune.tasks.rl.loop"
    parallel = True


def _check_verdicts(spec: RLSpec, job: Job) -> None:
    """Check that an algorithm that recognizes right answers by their reward gets unscaled rewards."""
    parts = job.environment["parts"] if job.environment.get("id") == MIXTURE else {}
    scaled = [name for name, part in parts.items() if part.get("reward_scale", 1.0) != 1.0]
    if scaled and hasattr(spec.algorithm, "passes_at"):
        raise RequestError(
            f"{spec.algorithm.name} recognizes right answers by their reward, which reward_scale changes",
            where=f"environment.parts.{scaled[0]}.reward_scale",
            remedy="choose another algorithm, or remove reward_scale",
        )


def _check_asynchronous(job: Job) -> None:
    """Check that rollouts can run in separate processes: one learner process, and no secrets on Ray."""
    where = f"stages.{job.stage}.asynchronous"
    _check_one_process(job, "asynchronous", "asynchronous training has one learner process")
    settings = job.spec["asynchronous"]
    if job.secrets and settings["ray"] is not None:
        raise RequestError(
            f"rollout processes on a Ray cluster cannot be given secrets: {', '.join(job.secrets)}",
            where=f"{where}.ray",
            remedy="remove ray, and sample on the machine of the stage",
        )


def _check_one_process(job: Job, key: str, reason: str) -> None:
    if job.resources.processes * job.resources.nodes > 1:
        raise RequestError(
            reason,
            where=f"stages.{job.stage}.{key}",
            remedy="set resources.processes and resources.nodes to 1",
        )


def _describe_kl(spec: RLSpec) -> str:
    if spec.kl:
        return f"kl {spec.kl:g} ({spec.kl_estimator})"
    ignored = spec.kl_estimator != RLSpec.model_fields["kl_estimator"].default
    return f"kl 0, so kl_estimator {spec.kl_estimator} has no effect" if ignored else "kl 0"


def _describe_algorithm(algorithm: Algorithm) -> str:
    options = algorithm.model_dump(exclude={"name"}, exclude_none=True)
    text = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"{algorithm.name} ({text})"


plugin = RL()
