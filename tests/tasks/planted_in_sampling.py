"""Bugs between the task and the episode. Each function injects a bug into the real code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.runner import TorchRunner
from perilune.environments.core.protocol import Failure
from perilune.models.adapters.lora import without_adapter
from perilune.models.decoder import Decoder
from perilune.rollout import worker as rollouts
from perilune.rollout.rollout import AgentRollout, Rollout
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.stage.training_tasks import TrainingTasks
from perilune.verifiers.sessions import Sessions

Patch = pytest.MonkeyPatch


def change_episodes(patch: Patch, change: Callable[[RolloutWorker, Episode], Episode]) -> None:
    right = RolloutWorker._episode
    patch.setattr(RolloutWorker, "_episode", lambda self, *args: change(self, right(self, *args)))


def with_mask(mask: Callable[[np.ndarray], np.ndarray]) -> Callable[[RolloutWorker, Episode], Episode]:
    return lambda _, episode: replace(episode, loss_mask=mask(episode.loss_mask))


def mask_off_by_one(patch: Patch) -> None:
    """The loss mask is shifted twice instead of once."""
    change_episodes(patch, with_mask(lambda mask: np.concatenate([[False], mask[:-1]])))


def stale_weights(patch: Patch) -> None:
    """The engine counts versions but samples with the first weights."""
    patch.setattr(Engine, "update_weights", lambda self, state, version: setattr(self, "version", version))


def engine_of_another_model(patch: Patch) -> None:
    """The engine gets an untrained copy of the policy."""

    def copied(decoder: Decoder, **options: Any) -> Engine:
        copy = Decoder(decoder.config)
        copy.load_state_dict(decoder.state_dict())
        return Engine(copy, **options)

    patch.setattr("perilune.engine.engine.Engine", copied)


def weights_stop_at_the_runner(patch: Patch) -> None:
    """New weights reach the engine but not its runner, as if a merged adapter missed the kernels."""
    for runner in (NativeRunner, TorchRunner):
        right = runner.load_weights

        def once(self: Any, decoder: Decoder, right: Callable[..., None] = right) -> None:
            if not hasattr(self, "taken"):
                self.taken = True
                right(self, decoder)

        patch.setattr(runner, "load_weights", once)


def adapter_stays_behind(patch: Patch) -> None:
    """The engine copies the frozen matrices without the adapter."""
    for runner in (NativeRunner, TorchRunner):
        right = runner.load_weights

        def alone(self: Any, decoder: Decoder, right: Callable[..., None] = right) -> None:
            right(self, without_adapter(decoder))

        patch.setattr(runner, "load_weights", alone)


def versions_relabelled(patch: Patch) -> None:
    """Every token is labelled with a later policy version than sampled it."""
    change_episodes(patch, lambda _, episode: replace(episode, policy_version=episode.policy_version + 1))


def versions_miscounted_by_the_engine(patch: Patch) -> None:
    """The engine samples with the newest weights and reports a future version."""
    right = Engine.sample

    def reported(self: Engine, *args: Any, **options: Any) -> Any:
        groups = right(self, *args, **options)
        return [[replace(old, policy_version=old.policy_version + 1) for old in group] for group in groups]

    patch.setattr(Engine, "sample", reported)


def temperature_missing_from_the_sampler(patch: Patch) -> None:
    """The engine samples at the temperature and reports log-probs at temperature 1."""

    right = Engine.sample

    def reported(self: Engine, prompts: Any, n: int, params: Any, on_progress: Any = None) -> Any:
        groups = right(self, prompts, n, replace(params, raw_logprobs=True), on_progress)
        return [[replace(answer, logprobs=answer.raw_logprobs) for answer in group] for group in groups]

    patch.setattr(Engine, "sample", reported)


def end_of_sequence_masked(patch: Patch) -> None:
    """The end-of-sequence token is masked like padding."""

    def masked(self: RolloutWorker, one: Episode) -> Episode:
        return replace(one, loss_mask=one.token_ids != self.tokenizer.eos_token_id)

    change_episodes(patch, masked)


def turns_tokenized_again(patch: Patch) -> None:
    """The tokens are retokenized from the text, which has no end-of-sequence token."""

    def again(self: RolloutWorker, one: Episode) -> Episode:
        ids = np.array(self.tokenizer.encode(one.text), np.int32)
        n = min(len(ids), len(one.token_ids))
        cut = {name: getattr(one, name)[:n] for name in ("loss_mask", "logprobs", "policy_version")}
        return replace(one, token_ids=ids[:n], **cut)

    change_episodes(patch, again)


def failures_are_zero(patch: Patch) -> None:
    right = rollouts.outcome_fields
    patch.setattr(
        rollouts, "outcome_fields", lambda o: {"reward": 0.0} if isinstance(o, Failure) else right(o)
    )


def change_completions(patch: Patch, change: Callable[[Any], Any]) -> None:
    right = Engine.sample

    def sample(self: Engine, *args: Any, **options: Any) -> Any:
        return [[change(answer) for answer in group] for group in right(self, *args, **options)]

    patch.setattr(Engine, "sample", sample)


def _next(items: Any) -> Any:
    return zip(items, [*items[1:], *items[:1]], strict=True)


def rewards_of_neighbors(patch: Patch) -> None:
    """Each episode has the reward of the next episode in its group."""
    right = RolloutWorker._group

    def group(self: RolloutWorker, parts: Any, *args: Any) -> Any:
        outcomes = {id(part): other.outcome for part, other in _next(parts)}
        episode = self._episode

        def another(part: AgentRollout) -> Episode:
            played, outcome = episode(part), outcomes[id(part)]
            return replace(played, reward=outcome.reward) if hasattr(outcome, "reward") else played

        object.__setattr__(self, "_episode", another)
        return right(self, parts, *args)

    patch.setattr(RolloutWorker, "_group", group)


def verdicts_of_neighbors(patch: Patch) -> None:
    """The verifier's results return in another order."""
    right = Sessions.step

    def step(self: Sessions, moves: Any) -> None:
        right(self, moves)
        results = [session.result for session, _, _ in moves]
        for (session, _, _), other in zip(moves, [*results[1:], *results[:1]], strict=True):
            session.result = other

    patch.setattr(Sessions, "step", step)


def texts_of_neighbors(patch: Patch) -> None:
    """The verifier is given the text of the next answer."""
    right = Sessions.step

    def step(self: Sessions, moves: Any) -> None:
        texts = [text for _, text, _ in moves]
        others = zip(moves, [*texts[1:], *texts[:1]], strict=True)
        right(self, [(session, other, finished) for (session, _, finished), other in others])

    patch.setattr(Sessions, "step", step)


def top_p_unreported(patch: Patch) -> None:
    """The engine samples with top-p and reports log-probs of the full distribution."""
    right = Engine.sample

    def sample(self: Engine, prompts: Any, n: int, params: Any, on_progress: Any = None) -> Any:
        groups = right(self, prompts, n, replace(params, top_p=0.9, raw_logprobs=True), on_progress)
        return [[replace(answer, logprobs=answer.raw_logprobs) for answer in group] for group in groups]

    patch.setattr(Engine, "sample", sample)


def seeds_reused(patch: Patch) -> None:
    """Every step samples with the random numbers of the first step."""
    right = RolloutWorker._begin

    def begun(self: RolloutWorker, sessions: Any, tasks: Any, samples: Any, step: int, places: Any) -> Any:
        games = right(self, sessions, tasks, samples, step, places)
        of_first = Engine.sample

        def sample(engine: Engine, prompts: Any, *args: Any, **options: Any) -> Any:
            keys = [replace(prompt, key=(prompt.key[0], 1, prompt.key[2])) for prompt in prompts]
            return of_first(engine, keys, *args, **options)

        if step == 1:
            patch.setattr(Engine, "sample", sample)
        return games

    patch.setattr(RolloutWorker, "_begin", begun)


def same_tasks_again(patch: Patch) -> None:
    """Every step gets the tasks of the first step."""
    right = TrainingTasks.take
    first: list[Any] = []

    def take(self: TrainingTasks, size: int) -> Any:
        first.extend([] if first else right(self, size))
        return first

    patch.setattr(TrainingTasks, "take", take)


def end_of_sequence_dropped(patch: Patch) -> None:
    """The engine returns answers without their end-of-sequence token."""

    def shortened(one: Any) -> Any:
        if one.finish_reason != "stop" or len(one.token_ids) < 2:
            return one
        cut = {name: getattr(one, name)[:-1] for name in ("token_ids", "logprobs", "policy_version")}
        return replace(one, **cut)

    change_completions(patch, shortened)


def aborted_are_judged(patch: Patch) -> None:
    """Aborted completions are scored like answers."""
    right = Rollout.take

    def take(self: Rollout, sampled: Any) -> list[str]:
        cut = {
            turn: sample._replace(completion=replace(sample.completion, finish_reason="length"))
            for turn, sample in sampled.items()
        }
        actions = right(self, cut)
        for turn in self.due:
            turns = turn.trajectory.turns
            turns[-1] = replace(turns[-1], completion=sampled[turn].completion)
        return actions

    patch.setattr(Rollout, "take", take)
    change_completions(patch, lambda answer: replace(answer, finish_reason="aborted"))


def logprobs_off_by_one(patch: Patch) -> None:
    """The engine reports the log-prob of the previous token."""
    change_completions(patch, lambda answer: replace(answer, logprobs=np.roll(answer.logprobs, 1)))


def prompt_cut_for_the_engine(patch: Patch) -> None:
    """The engine gets a truncated prompt, and the learner the whole prompt."""
    right = Engine.sample

    def sample(self: Engine, prompts: Any, *args: Any, **options: Any) -> Any:
        return right(self, [replace(old, token_ids=old.token_ids[1:]) for old in prompts], *args, **options)

    patch.setattr(Engine, "sample", sample)
