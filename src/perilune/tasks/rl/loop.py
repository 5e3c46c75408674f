"""The loop of reinforcement learning: each step publishes weights, samples groups, trains and records."""

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
from perilune.tasks.rl.metrics import Recorder
from perilune.tasks.rl.opponents import NoOpponents
from perilune.tasks.rl.sampling import GroupSampler, GroupSource
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.update import PolicyUpdates
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.own_metrics import OwnMetrics
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
        make_opponents: makes the opponents of the policy; none by default.
        stop_without_signal: stop the run when nearly all groups have had equal rewards for many steps.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(
            open_player(
                workspace,
                spec.max_tokens,
                spec,
                spec.memory_plan,
                record_routes=spec.routing_replay,
                backend=spec.engine.runner() if spec.engine else None,
            )
        )
        sub_agents = open_sub_agents(
            workspace, opened.policy, opened.device, opened.longest, trained=spec.train_sub_agents
        )
        rollouts = replace(opened.rollouts, learned=_reward_model(spec, opened), sub_agents=sub_agents)
        player = replace(opened, rollouts=rollouts)
        policy, device = player.policy, player.device
        load_start = partial(load_reference, workspace, device, policy, spec)
        reference = load_start() if spec.uses_reference else None
        learner = _learner(spec, player)
        opponents = make_opponents(player, learner)
        loop = TrainingLoop(workspace, learner, spec, policy, rollouts=player.rollouts)
        run_preflight(workspace, spec, policy.decoder.config, device, loop.first)

        source = stack.enter_context(closing(_source(spec, player, opponents, learner)))
        publisher = Publisher(player.engine, learner, reference)
        publisher.published |= source.versions
        updates = PolicyUpdates(
            spec,
            learner,
            reference,
            longest=player.longest,
            draws_are_known=getattr(player.environment, "players", 1) == 1,
        )
        start = None if opponents.moves_reference else reference
        gold = GoldWatch(workspace, lambda: start or load_start(), spec.temperature, spec.token_budget)
        own = OwnMetrics(spec.metrics, workspace.log)
        recorder = Recorder(workspace, gold, own, stop_without_signal=stop_without_signal)

        def step(done: int, watch: Stopwatch) -> StepReport:
            publisher.publish()
            groups = publisher.check_versions(source.sample(done + 1, watch))
            of_source = source.figures(groups)
            if opponents.move_reference(reference):
                publisher.accept_reference()
            with watch.time_learning():
                weighted, figures = updates.make(groups, done)
            figures = {**figures, **of_source, "epoch": source.epoch}
            if spec.auxiliary_rewards:
                figures["auxiliary_scale"] = spec.auxiliary_rewards.scale(done + 1, spec.steps)
            figures = opponents.after(done + 1, weighted, figures)
            return recorder.record(done + 1, weighted, figures, watch, source.timing())

        loop.run(step, source.remember)
    assert player.memory is not None
    return {
        **loop.finish(policy, opponents.write),
        **opponents.summary(),
        **recorder.summary(spec.algorithm, spec.samples),
        "memory": memory_figures(player.memory, device),
    }


def _source(spec: RLSpec, player: Player, opponents: NoOpponents, learner: Learner) -> GroupSource:
    if spec.asynchronous is None:
        return GroupSampler(spec, player, opponents.rollouts, learner.memory)
    return AsynchronousSampler(spec, player, learner)


def _learner(spec: RLSpec, player: Player) -> Learner:
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


def _reward_model(spec: RLSpec, player: Player) -> LearnedReward | None:
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
