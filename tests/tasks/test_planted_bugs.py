"""Mistakes that training systems have shipped, planted in the real code one at a time.

Each must stop a run with the settings that every run has, and the message must name the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import DIGITS, metrics, run_task

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.runner import TorchRunner
from perilune.environments.protocol import Failure
from perilune.errors import WorkFailedError
from perilune.learn import batch as packing
from perilune.learn import trainer
from perilune.learn.algorithms import base
from perilune.learn.algorithms.grpo import GRPO
from perilune.learn.batch import PackedBatch
from perilune.learn.weights import GroupWeights
from perilune.models.decoder import Decoder
from perilune.models.lora import base_of
from perilune.tasks import policy_update, rollouts, session
from perilune.tasks.rollouts import Rollouts

Patch = pytest.MonkeyPatch


def change_episodes(patch: Patch, change: Callable[[Rollouts, Episode], Episode]) -> None:
    right = Rollouts._episode
    patch.setattr(Rollouts, "_episode", lambda self, *args: change(self, right(self, *args)))


def with_mask(mask: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rollouts, Episode], Episode]:
    return lambda _, one: replace(one, loss_mask=mask(one.loss_mask))


def mask_off_by_one(patch: Patch) -> None:
    """As when a mask of prompt and answer is shifted like the labels, but once more."""
    change_episodes(patch, with_mask(lambda mask: np.concatenate([[False], mask[:-1]])))


def rows_off_by_one(patch: Patch) -> None:
    """Each token is learned from the state that has already seen it."""
    right = packing._pack_bin

    def shifted(items: Any, temperature: float) -> PackedBatch:
        batch = right(items, temperature)
        return replace(batch, rows=(batch.rows + 1).clamp(max=len(batch.token_ids) - 1))

    patch.setattr(packing, "_pack_bin", shifted)


def mask_swapped_with_advantages(patch: Patch) -> None:
    """Where a token's advantage is to be, there is 1."""
    right = base.aggregate
    patch.setattr(
        base, "aggregate", lambda group, scale, mode, **k: right(group, [1.0 for _ in scale], mode, **k)
    )


def stale_weights(patch: Patch) -> None:
    """The engine counts versions, and samples with the first weights."""
    patch.setattr(Engine, "update_weights", lambda self, state, version: setattr(self, "version", version))


def engine_of_another_model(patch: Patch) -> None:
    """It is given a copy of the policy, which nobody trains."""

    def copied(decoder: Decoder, **options: Any) -> Engine:
        copy = Decoder(decoder.config)
        copy.load_state_dict(decoder.state_dict())
        return Engine(copy, **options)

    patch.setattr("perilune.engine.engine.Engine", copied)


def weights_stop_at_the_runner(patch: Patch) -> None:
    """As a merged adapter that does not reach the kernels: all but what computes has the new weights."""
    for runner in (NativeRunner, TorchRunner):
        right = runner.take_weights

        def once(self: Any, decoder: Decoder, right: Callable[..., None] = right) -> None:
            if not hasattr(self, "taken"):
                self.taken = True
                right(self, decoder)

        patch.setattr(runner, "take_weights", once)


def adapter_stays_behind(patch: Patch) -> None:
    """The engine copies the frozen matrices, and not what is learned beside them."""
    for runner in (NativeRunner, TorchRunner):
        right = runner.take_weights

        def alone(self: Any, decoder: Decoder, right: Callable[..., None] = right) -> None:
            right(self, base_of(decoder))

        patch.setattr(runner, "take_weights", alone)


def versions_relabelled(patch: Patch) -> None:
    """Every token says that the newest weights sampled it."""
    change_episodes(patch, lambda _, one: replace(one, policy_version=one.policy_version + 1))


def versions_miscounted_by_the_engine(patch: Patch) -> None:
    """It samples with the newest weights, and says of its tokens that they are of weights to come."""
    right = Engine.sample

    def reported(self: Engine, *args: Any, **options: Any) -> Any:
        found = right(self, *args, **options)
        return [[replace(one, policy_version=one.policy_version + 1) for one in group] for group in found]

    patch.setattr(Engine, "sample", reported)


def advantage_on_the_last_token(patch: Patch) -> None:
    """As when a reward at the end is taken for an advantage a token."""
    right = GRPO.component

    def last_only(self: GRPO, group: Sequence[Episode], scale: Any, context: Any) -> Any:
        parts = [np.where(np.arange(n := len(e.token_ids)) == n - 1, a, 0.0)
                 for e, a in zip(group, scale, strict=True)]  # fmt: skip
        return right(self, group, parts, context)

    patch.setattr(GRPO, "component", last_only)


def token_mean_a_micro_batch(patch: Patch) -> None:
    """Each group is a micro-batch, divided by its own tokens; what counts is the mean of those means."""
    right = policy_update.pack

    def own_means(groups: Sequence[GroupWeights], *args: Any, **options: Any) -> list[PackedBatch]:
        batches = [one for group in groups for one in right([group], *args, **options)]
        return [replace(one, policy_gradient=one.policy_gradient / len(batches)) for one in batches]

    patch.setattr(policy_update, "pack", own_means)


def temperature_missing(patch: Patch) -> None:
    right = trainer.row_logprobs
    patch.setattr(trainer, "row_logprobs", lambda logits, targets, temperature: right(logits, targets))


def temperature_missing_from_the_sampler(patch: Patch) -> None:
    """It draws at the temperature, and reports log-probs without."""

    right = Engine.sample

    def reported(self: Engine, prompts: Any, n: int, params: Any, on_progress: Any = None) -> Any:
        found = right(self, prompts, n, replace(params, raw_logprobs=True), on_progress)
        return [[replace(one, logprobs=one.raw_logprobs) for one in group] for group in found]

    patch.setattr(Engine, "sample", reported)


def end_of_sequence_masked(patch: Patch) -> None:
    """The end token is taken for padding."""

    def masked(self: Rollouts, one: Episode) -> Episode:
        return replace(one, loss_mask=one.token_ids != self.tokenizer.eos_token_id)

    change_episodes(patch, masked)


def another_reference(patch: Patch) -> None:
    """The KL is to the preset's weights of another seed."""
    right = session.load_policy
    calls: list[None] = []

    def load(*args: Any) -> session.Policy:
        policy = right(*args)
        calls.append(None)
        if len(calls) == 2:
            policy.decoder.initialize(99)
        return policy

    patch.setattr(session, "load_policy", load)


def reference_is_trained(patch: Patch) -> None:
    """Policy and reference are one object."""
    right = session.load_policy
    loaded: list[session.Policy] = []

    def load(*args: Any) -> session.Policy:
        loaded.append(loaded[0] if loaded else right(*args))
        return loaded[-1]

    patch.setattr(session, "load_policy", load)


def turns_tokenised_again(patch: Patch) -> None:
    """The tokens are those of the text, which has no end token."""

    def again(self: Rollouts, one: Episode) -> Episode:
        ids = np.array(self.tokenizer.encode(one.text), np.int32)
        n = min(len(ids), len(one.token_ids))
        cut = {name: getattr(one, name)[:n] for name in ("loss_mask", "logprobs", "policy_version")}
        return replace(one, token_ids=ids[:n], **cut)

    change_episodes(patch, again)


def failures_are_zero(patch: Patch) -> None:
    right = rollouts._verdict
    patch.setattr(rollouts, "_verdict", lambda o: {"reward": 0.0} if isinstance(o, Failure) else right(o))


def group_baseline_forgotten(patch: Patch) -> None:
    """Rewards are taken for advantages."""
    patch.setattr("perilune.learn.algorithms.grpo.standardised", lambda scores: scores)


def micro_batch_twice(patch: Patch) -> None:
    right = policy_update.pack
    patch.setattr(policy_update, "pack", lambda *args, **options: right(*args, **options) * 2)


HALF = {**DIGITS, "raises": "02468ace"}

PLANTED: list[tuple[Callable[[Patch], None], dict[str, Any], str]] = [
    (mask_off_by_one, {}, "loss mask that leaves out token 0"),
    (rows_off_by_one, {}, "the mask is off by one"),
    (mask_swapped_with_advantages, {}, "mask and advantages are mixed up"),
    (stale_weights, {}, "its weights are stale"),
    (engine_of_another_model, {}, "its weights are stale, or another model's"),
    (weights_stop_at_the_runner, {}, "took version [1-3] and computes with other weights"),
    (adapter_stays_behind, {"lora": {"rank": 4}}, "with the base alone: the adapter did not reach it"),
    (adapter_stays_behind, {"lora": {"rank": 4, "base": "int8"}, "lr": 1e-5}, "the adapter did not reach it"),
    (versions_relabelled, {}, "other policy versions than sampled it"),
    (versions_miscounted_by_the_engine, {}, "was sampled by version 1, which the learner never published"),
    (advantage_on_the_last_token, {}, "an advantage that reaches 1 of its"),
    (token_mean_a_micro_batch, {}, "a denominator is not the whole step's"),
    (temperature_missing, {}, "the temperature 0.8 is missing from the learner's log-probs"),
    (temperature_missing_from_the_sampler, {}, "the temperature 0.8 is missing from the sampler's log-probs"),
    (end_of_sequence_masked, {"samples": 12}, r"leaves out token \d+ \(the end-of-sequence token\)"),
    (another_reference, {"kl": 0.1}, "the reference policy has checksum"),
    (reference_is_trained, {"kl": 0.1}, "the reference policy has changed: it is being trained"),
    (turns_tokenised_again, {"samples": 12}, "was its text tokenised again"),
    (failures_are_zero, {"environment": HALF}, "has reward 0.0, and its verifier failed"),
    (group_baseline_forgotten, {}, "advantages that add up to"),
    (micro_batch_twice, {}, "learned from twice"),
]


@pytest.mark.parametrize(("plant", "options", "said"), PLANTED, ids=[case[0].__name__ for case in PLANTED])
def test_a_planted_mistake_stops_the_run_and_is_named(
    plant: Callable[[Patch], None],
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(WorkFailedError, match=said):
        run_task(tmp_path / "rl", "rl", **options)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_false_alarm(seed: int, tmp_path: Path) -> None:
    """The settings under which mistakes are planted, all at once, without one."""
    environment = {**DIGITS, "raises": "0"}  # tasks whose ids begin with it: some fail
    options: dict[str, Any] = {"token_budget": 24, "kl": 0.1, "samples": 6, "updates_per_batch": 2}
    bundle = run_task(
        tmp_path / "rl", "rl", seed=seed, environment=environment, prompts=5, steps=3, **options
    )
    assert len(metrics(bundle)) == 3


def test_an_algorithm_may_say_that_it_is_sparse_or_not_centred(tmp_path: Path, monkeypatch: Patch) -> None:
    """As one that credits one token, or only the best answer, rightly does."""
    advantage_on_the_last_token(monkeypatch)
    group_baseline_forgotten(monkeypatch)
    monkeypatch.setattr(GRPO, "sparse", True)
    monkeypatch.setattr(GRPO, "centred", False)
    assert len(metrics(run_task(tmp_path / "rl", "rl", steps=2))) == 2
