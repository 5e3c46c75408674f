"""Bugs known from training systems, injected into the real code one at a time.

Each bug must stop a short run with default checks, and the message must name the cause.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_in_learning as learning
import planted_in_sampling as sampling
import pytest
from task_cases import DIGITS, metrics, run_task

from perilune.errors import WorkFailedError
from perilune.learn.algorithms.group_relative import GRPO

Patch = pytest.MonkeyPatch

HALF = {**DIGITS, "raises": "02468ace"}

DUAL = {"name": "grpo", "dual_clip": 3.0}

ANOTHER = "scored another text than episode .* sampled: does the score belong to another answer"
RANDOM = "the learner's forward pass gives other log-probs each time: it has dropout"

PLANTED: list[tuple[Callable[[Patch], None], dict[str, Any], str]] = [
    # Found before the last review of the checks.
    (sampling.mask_off_by_one, {}, "loss mask that leaves out token 0"),
    (learning.rows_off_by_one, {}, "the mask is off by one"),
    (learning.mask_swapped_with_advantages, {}, "the mask or the advantages are mixed up"),
    (sampling.stale_weights, {}, "its weights are stale"),
    (sampling.engine_of_another_model, {}, "its weights are stale, or another model's"),
    (sampling.weights_stop_at_the_runner, {}, "took version [1-3] and computes with other weights"),
    (
        sampling.adapter_stays_behind,
        {"lora": {"rank": 4}},
        "the base weights alone: the adapter did not reach the engine",
    ),
    (
        sampling.adapter_stays_behind,
        {"lora": {"rank": 4, "base": "int8"}, "lr": 1e-5},
        "the adapter did not reach the engine",
    ),
    (sampling.versions_relabelled, {}, "other policy versions than sampled it"),
    (sampling.versions_miscounted_by_the_engine, {}, "by version 1, which the learner never published"),
    (learning.advantage_on_the_last_token, {}, "an advantage that reaches 1 of its"),
    (learning.token_mean_a_micro_batch, {}, "a denominator is not that of the whole step"),
    (learning.temperature_missing, {}, "preflight: the temperature 0.8 is missing from the learner's"),
    (learning.temperature_missing_in_the_run, {}, "temperature 0.8 is missing from the learner's log-probs"),
    (sampling.temperature_missing_from_the_sampler, {}, "the temperature 0.8 is missing from the sampler's"),
    (sampling.end_of_sequence_masked, {"samples": 12}, r"leaves out token \d+ \(the end-of-sequence token\)"),
    (learning.another_reference, {"kl": 0.1}, "the reference policy has checksum"),
    (learning.reference_is_trained, {"kl": 0.1}, "the reference policy has changed: it is being trained"),
    (sampling.turns_tokenized_again, {"samples": 12}, "was its text tokenized again"),
    (sampling.failures_are_zero, {"environment": HALF}, "has reward 0.0, and its verifier failed"),
    (learning.group_baseline_forgotten, {}, "advantages that add up to"),
    (learning.micro_batch_twice, {}, "a step learns twice"),
    (learning.gradients_scaled_twice, {}, "it is divided by the number of micro-batches twice"),
    (
        learning.micro_batch_forgotten,
        {},
        "the gradient of the policy loss differs from an independent computation",
    ),
    (learning.loss_has_the_wrong_sign, {}, "the gradient of the policy loss .*: its sign is wrong"),
    (learning.optimizer_climbs_the_loss, {}, "did not move as AdamW says.*: the update climbs the loss"),
    # Bugs that the review injected and no check found at the time.
    (
        sampling.rewards_of_neighbors,
        {},
        "and its verifier gave .*: does the reward belong to another answer",
    ),
    (sampling.verdicts_of_neighbors, {}, ANOTHER),
    (sampling.texts_of_neighbors, {}, ANOTHER),
    (learning.rewards_in_another_order, {}, "weighs an episode by its place in the group"),
    (learning.kl_has_the_wrong_sign, {"kl": 1.0}, "the gradient of the KL .*: its sign is wrong"),
    (learning.kl_at_temperature_1, {"kl": 0.1}, "KL .*: the reference's log-probs are at temperature 1"),
    (learning.kl_to_the_sampler, {"kl": 0.1}, "KL .*: it is computed to the sampler, not to the reference"),
    (learning.kl_to_the_sampler_in_the_run, {"kl": 0.1}, "reference policy's own: they are the sampler's"),
    (learning.adapter_climbs_the_loss, {"lora": {"rank": 4}}, "and that of .*lora_A.* has the wrong sign"),
    (learning.lower_layers_detached, {}, "and that of model.layers.0.* is missing"),
    (sampling.top_p_unreported, {"temperature": 1.0}, "its log-probs are of another distribution"),
    (learning.clip_takes_the_larger, {}, "the clip takes the larger gain, not the smaller"),
    (learning.ratio_is_1, {}, "the ratio is taken as 1"),
    (sampling.same_tasks_again, {}, "repeats within its epoch"),
    (learning.moments_reset, {}, "moments of .* changed between two updates: the optimizer lost its state"),
    (learning.dropout_while_learning, {}, RANDOM),
    (learning.dropout_while_learning_in_the_run, {}, "its own without one: it has dropout"),
    (learning.dropout_always_in_the_run, {}, RANDOM),
    # Bugs added since.
    (sampling.seeds_reused, {}, "it drew them with the random numbers of step 1"),
    (sampling.end_of_sequence_dropped, {"samples": 12}, "not an end-of-sequence token: was it cut off"),
    (sampling.aborted_are_judged, {}, "was aborted by the engine and has reward"),
    (sampling.logprobs_off_by_one, {}, "the sampler's log-probs are off by one token"),
    (sampling.prompt_cut_for_the_engine, {}, "sampler and learner differ by"),
    (learning.norms_decay, {"weight_decay": 0.1}, "weight decay was applied to norms and biases"),
    (learning.gradient_clipped_twice, {"grad_clip": 0.01}, "did not move as AdamW says"),
    (learning.parameters_left_out, {}, "parameters are not given to the optimizer, the first is .*norm"),
    (learning.no_learning_rate_for_some, {}, "the first is model.embed_tokens.weight: its weight went from"),
    (learning.dual_clip_not_forwarded, {"algorithm": DUAL}, "the dual clip is missing"),
    (learning.advantages_have_the_wrong_sign, {}, "makes an answer less likely for being right"),
    (learning.baseline_of_the_batch, {}, "its weights change with the other groups"),
    (
        learning.critic_learns_twice_as_much,
        {"algorithm": "ppo"},
        "the critic's loss .*is 2 times the right one",
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("plant", "options", "said"), PLANTED, ids=[case[0].__name__ for case in PLANTED])
def test_injected_bug_stops_the_run_and_is_named(
    plant: Callable[[Patch], None],
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(WorkFailedError, match=said):
        run_task(tmp_path / "rl", "rl", **options)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_checks_raise_no_false_alarm(seed: int, tmp_path: Path) -> None:
    """All settings of the injected bugs at once, without a bug."""
    environment = {**DIGITS, "raises": "0"}  # some verifiers fail
    options: dict[str, Any] = {"token_budget": 24, "kl": 0.1, "samples": 6, "updates_per_batch": 2}
    bundle = run_task(
        tmp_path / "rl", "rl", seed=seed, environment=environment, prompts=5, steps=3, **options
    )
    assert len(metrics(bundle)) == 3


def test_sparse_and_uncentred_algorithms_pass_the_checks(tmp_path: Path, monkeypatch: Patch) -> None:
    """Valid for algorithms that credit a single token or only the best answer."""
    learning.advantage_on_the_last_token(monkeypatch)
    learning.group_baseline_forgotten(monkeypatch)
    monkeypatch.setattr(GRPO, "sparse", True)
    monkeypatch.setattr(GRPO, "centred", False)
    assert len(metrics(run_task(tmp_path / "rl", "rl", steps=2))) == 2
