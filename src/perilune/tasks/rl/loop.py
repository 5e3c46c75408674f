"""The loop of reinforcement learning.

Each step publishes the learner's weights to the engine, samples groups of episodes, updates the policy, and
records metrics and episodes.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.learn.critic import Critic
from perilune.learn.trainer import Learner
from perilune.rollout.learned_reward import LearnedReward
from perilune.rollout.timing import Stopwatch
from perilune.tasks.checks.gold_watch import GoldWatch
from perilune.tasks.checks.preflight import run_preflight
from perilune.tasks.rl.asynchronous.sampler import AsynchronousSampler
from perilune.tasks.rl.metrics import StepRecorder
from perilune.tasks.rl.opponents import NoOpponents
from perilune.tasks.rl.sampling import GroupSampler, GroupSource
from perilune.tasks.rl.server import ServerSampler
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.update import PolicyUpdater
from perilune.tasks.stage.custom_metrics import CustomMetrics
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.player import Player, open_player
from perilune.tasks.stage.policy import load_reference
from perilune.tasks.stage.publishing import Publisher
from perilune.tasks.stage.sub_agents import open_sub_agents
from perilune.tasks.stage.training import StepReport, TrainingLoop

MakeOpponents = Callable[[Player, Learner], NoOpponents]


def run(
    workspace: Workspace,
    spec: RLSpec,
    make_opponents: MakeOpponents = lambda player, learner: NoOpponents(player.rollouts),
    *,
    stop_without_signal: bool = True,
) -> dict[str, Any]:
    """Train the policy and return the stage's summary.

    Args:
        make_opponents: returns the opponents of the policy; by default there are none.
        stop_without_signal: see `StepRecorder`.

    Raises:
        WorkFailedError: when a check fails, or the run has no signal to learn from.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(
            open_player(
                workspace,
                spec.max_tokens,
                spec,
                spec.memory_plan,
                record_routes=spec.routing_replay,
                backend=spec.openvino.runner() if spec.openvino else None,
            )
        )
        player = _extend_rollouts(spec, opened)
        policy, device = player.policy, player.device
        load_initial_policy = partial(load_reference, workspace, device, policy, spec)
        reference = load_initial_policy() if spec.uses_reference else None
        learner = _make_learner(spec, player)
        opponents = make_opponents(player, learner)
        loop = TrainingLoop(workspace, learner, spec, policy, rollouts=player.rollouts)
        run_preflight(workspace, spec, policy.decoder.config, device, loop.completed_steps)

        source = stack.enter_context(closing(_make_source(spec, player, opponents, learner)))
        publisher = Publisher(player.engine, learner, reference)
        publisher.published |= source.versions
        updater = PolicyUpdater(
            spec,
            learner,
            reference,
            max_episode_tokens=player.max_episode_tokens,
            draws_are_known=getattr(player.environment, "players", 1) == 1,
        )
        initial_policy = None if opponents.updates_reference else reference
        gold = GoldWatch(
            workspace, lambda: initial_policy or load_initial_policy(), spec.temperature, spec.token_budget
        )
        custom = CustomMetrics(spec.metrics, workspace.log)
        recorder = StepRecorder(workspace, gold, custom, stop_without_signal=stop_without_signal)

        def step(completed: int, watch: Stopwatch) -> StepReport:
            number = completed + 1
            publisher.publish()
            groups = publisher.check_versions(source.sample(number, watch))
            if opponents.update_reference(reference):
                publisher.accept_reference()
            with watch.measure("learning"):
                weighted, metrics = updater.update(groups, completed)
            metrics = {**metrics, **source.metrics(groups), "epoch": source.epoch}
            if spec.auxiliary_rewards:
                metrics["auxiliary_scale"] = spec.auxiliary_rewards.scale(number, spec.steps)
            metrics = opponents.after_step(number, weighted, metrics)
            return recorder.record(number, weighted, metrics, watch, source.timings())

        loop.run(step, source.save_progress)
    assert player.memory is not None
    return {
        **loop.finish(policy, opponents.save_final),
        **opponents.summary(),
        **recorder.summary(spec.algorithm, spec.samples),
        "memory": memory_figures(player.memory, device),
    }


def _extend_rollouts(spec: RLSpec, player: Player) -> Player:
    """Return the player with the stage's reward model and sub-agents, if it has them."""
    sub_agents = open_sub_agents(
        player.workspace,
        player.policy,
        player.device,
        player.max_episode_tokens,
        trained=spec.train_sub_agents,
    )
    learned_reward = _load_learned_reward(spec, player)
    return replace(
        player, rollouts=replace(player.rollouts, learned_reward=learned_reward, sub_agents=sub_agents)
    )


def _make_source(spec: RLSpec, player: Player, opponents: NoOpponents, learner: Learner) -> GroupSource:
    if spec.asynchronous is not None:
        return AsynchronousSampler(spec, player, learner)
    if spec.server is not None:
        return ServerSampler(spec, spec.server, player, learner)
    return GroupSampler(spec, player, opponents.rollouts, learner.memory)


def _make_learner(spec: RLSpec, player: Player) -> Learner:
    decoder, critic = player.policy.decoder, None
    if "values" in spec.algorithm.needs:
        critic = Critic(decoder.config.hidden_size).to(player.device)
    return Learner(
        decoder,
        spec,
        critic=critic,
        critic_lr=getattr(spec.algorithm, "critic_lr", None),
        ranks=player.rollouts.ranks,
    )


def _load_learned_reward(spec: RLSpec, player: Player) -> LearnedReward | None:
    workspace = player.workspace
    if not workspace.has_input("reward_model"):
        return None
    return LearnedReward.load(
        workspace.input("reward_model"),
        player.device,
        player.policy.tokenizer,
        spec.verifier_weight,
        spec.token_budget,
    )
