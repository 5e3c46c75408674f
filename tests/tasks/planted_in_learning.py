"""Bugs between the episode and the next weights. Each function injects a bug into the real code."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from perilune.data.episode import Episode
from perilune.learn import batch as packing
from perilune.learn import losses, trainer
from perilune.learn.algorithms import base, group_relative
from perilune.learn.algorithms.group_relative import GRPO
from perilune.learn.batch import PackedBatch
from perilune.learn.optimizer import AdamW
from perilune.learn.trainer import Learner
from perilune.learn.weights import WeightedGroup
from perilune.models.adapters import lora
from perilune.models.decoder import Block
from perilune.tasks.rl import update as policy_update
from perilune.tasks.stage import player
from perilune.tasks.stage import policy as session

Patch = pytest.MonkeyPatch
LAST = 2  # layer of the tiny model
TRIED = 32  # width and vocabulary size of the preflight model


def rows_off_by_one(patch: Patch) -> None:
    """Each token is predicted from the hidden state that has already seen it."""
    right = packing._pack_bin

    def shifted(items: Any, temperature: float) -> PackedBatch:
        batch = right(items, temperature)
        return replace(batch, rows=(batch.rows + 1).clamp(max=len(batch.token_ids) - 1))

    patch.setattr(packing, "_pack_bin", shifted)


def mask_swapped_with_advantages(patch: Patch) -> None:
    """Every token has advantage 1."""
    right = base.aggregate
    patch.setattr(
        base, "aggregate", lambda group, scale, mode, **k: right(group, [1.0 for _ in scale], mode, **k)
    )


def advantage_on_the_last_token(patch: Patch) -> None:
    """Only the last token has an advantage, as if a final reward were a per-token advantage."""
    right = GRPO.component

    def last_only(self: GRPO, group: Sequence[Episode], scale: Any, context: Any) -> Any:
        parts = [np.where(np.arange(n := len(e.token_ids)) == n - 1, a, 0.0)
                 for e, a in zip(group, scale, strict=True)]  # fmt: skip
        return right(self, group, parts, context)

    patch.setattr(GRPO, "component", last_only)


def temperature_missing_in_the_run(patch: Patch) -> None:
    """`temperature_missing` in the run alone, not in the preflight."""
    right = trainer.row_logprobs

    def logprobs(logits: Any, targets: Any, temperature: float) -> Any:
        return right(logits, targets, temperature if logits.shape[-1] == TRIED else 1.0)

    patch.setattr(trainer, "row_logprobs", logprobs)


def token_mean_a_micro_batch(patch: Patch) -> None:
    """Each group is a micro-batch with its own token denominator, and the loss is the mean of the means."""
    right = policy_update.pack

    def own_means(groups: Sequence[WeightedGroup], *args: Any, **options: Any) -> list[PackedBatch]:
        batches = [batch for group in groups for batch in right([group], *args, **options)]
        return [replace(batch, policy_gradient=batch.policy_gradient / len(batches)) for batch in batches]

    patch.setattr(policy_update, "pack", own_means)


def temperature_missing(patch: Patch) -> None:
    right = trainer.row_logprobs
    patch.setattr(trainer, "row_logprobs", lambda logits, targets, temperature: right(logits, targets))


def another_reference(patch: Patch) -> None:
    """The KL reference has weights of another seed."""
    right = session.load_policy
    calls: list[None] = []

    def load(*args: Any, **options: Any) -> session.Policy:
        policy = right(*args, **options)
        calls.append(None)
        if len(calls) == 2:
            policy.decoder.initialize(99)
        return policy

    for module in (session, player):
        patch.setattr(module, "load_policy", load)


def reference_is_trained(patch: Patch) -> None:
    """Policy and reference are the same object."""
    right = session.load_policy
    loaded: list[session.Policy] = []

    def load(*args: Any) -> session.Policy:
        loaded.append(loaded[0] if loaded else right(*args))
        return loaded[-1]

    for module in (session, player):
        patch.setattr(module, "load_policy", load)


def group_baseline_forgotten(patch: Patch) -> None:
    """Rewards are used as advantages."""
    patch.setattr("perilune.learn.algorithms.group_relative.standardized", lambda scores: scores)


def micro_batch_twice(patch: Patch) -> None:
    right = policy_update.pack
    patch.setattr(policy_update, "pack", lambda *args, **options: right(*args, **options) * 2)


def gradients_scaled_twice(patch: Patch) -> None:
    """The gradient is divided by the number of micro-batches, although the weights already are."""
    right = Learner.forward_backward

    def twice(self: Learner, batches: Any) -> dict[str, float]:
        figures = right(self, batches)
        for parameter in self.decoder.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(batches)
        return figures

    patch.setattr(Learner, "forward_backward", twice)


def micro_batch_forgotten(patch: Patch) -> None:
    """The gradient of the last micro-batch replaces those of the others."""
    right = Learner._loss

    def alone(self: Learner, *args: Any) -> torch.Tensor:
        for parameter in self.decoder.parameters():
            parameter.grad = None
        return right(self, *args)

    patch.setattr(Learner, "_loss", alone)


def loss_has_the_wrong_sign(patch: Patch) -> None:
    right = losses.policy_gradient
    patch.setattr(losses, "policy_gradient", lambda *args: (-(out := right(*args))[0], out[1]))


def kl_has_the_wrong_sign(patch: Patch) -> None:
    right = losses.reference_kl
    patch.setattr(losses, "reference_kl", lambda *args: -right(*args))


def kl_at_temperature_1(patch: Patch) -> None:
    right = trainer.token_logprobs
    patch.setattr(trainer, "token_logprobs", lambda d, batch: right(d, replace(batch, temperature=1.0)))


def kl_to_the_sampler(patch: Patch) -> None:
    patch.setattr(trainer, "token_logprobs", lambda _, batch: batch.sampler_logprobs)


def kl_to_the_sampler_in_the_run(patch: Patch) -> None:
    """`kl_to_the_sampler` in the run alone, not in the preflight."""

    def own(batches: Any, *_: Any) -> Any:
        return [batch.with_reference(batch.sampler_logprobs) for batch in batches]

    patch.setattr(policy_update, "add_reference_logprobs", own)


def adapter_climbs_the_loss(patch: Patch) -> None:
    """The gradient of LoRA's A has the wrong sign."""
    right = lora._Merged.backward

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, nothing, *pairs = right(ctx, grad)
        return x, nothing, *[-part if index % 2 == 0 else part for index, part in enumerate(pairs)]

    patch.setattr(lora._Merged, "backward", staticmethod(backward))


def lower_layers_detached(patch: Patch) -> None:
    """Only the last layer learns."""
    right = Block.forward

    def forward(self: Block, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return right(self, x.detach() if self.self_attn.layer == LAST else x, *args)

    patch.setattr(Block, "forward", forward)


def clip_takes_the_larger(patch: Patch) -> None:
    patch.setattr(losses, "torch", SimpleNamespace(**{**vars(torch), "minimum": torch.maximum}))


def ratio_is_1(patch: Patch) -> None:
    """The importance ratio compares the policy with itself."""
    right = losses.policy_gradient
    patch.setattr(losses, "policy_gradient", lambda now, old, *args: right(now, now.detach(), *args))


def dual_clip_not_forwarded(patch: Patch) -> None:
    plain = base.ClippedPolicyGradient.surrogate.fget
    assert plain is not None
    patch.setattr(
        base.ClippedPolicyGradient, "surrogate", property(lambda self: replace(plain(self), dual=None))
    )


def moments_reset(patch: Patch) -> None:
    """The optimizer state is reset in every step."""
    right = Learner.forward_backward

    def fresh(self: Learner, batches: Any) -> dict[str, float]:
        for moments in (self.optimizer.first, self.optimizer.second):
            for moment in moments.values():
                moment.zero_()
        return right(self, batches)

    patch.setattr(Learner, "forward_backward", fresh)


def optimizer_climbs_the_loss(patch: Patch) -> None:
    right = AdamW.update
    patch.setattr(AdamW, "update", lambda self, lr: right(self, -lr))


def norms_decay(patch: Patch) -> None:
    """Weight decay is applied to norms and biases too."""
    right = AdamW.update

    def update(self: AdamW, lr: float) -> float:
        for parameter in self.parameters.values():
            if parameter.ndim == 1:
                parameter.data.mul_(1 - lr * self._weight_decay)
        return right(self, lr)

    patch.setattr(AdamW, "update", update)


def gradient_clipped_twice(patch: Patch) -> None:
    right = AdamW.update

    def update(self: AdamW, lr: float) -> float:
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._grad_clip / 2)
        return right(self, lr)

    patch.setattr(AdamW, "update", update)


def parameters_left_out(patch: Patch) -> None:
    """The norms are not given to the optimizer."""
    right = trainer.trainable
    patch.setattr(trainer, "trainable", lambda d: {n: p for n, p in right(d).items() if "norm" not in n})


def no_learning_rate_for_some(patch: Patch) -> None:
    """The embedding is never updated."""
    right = AdamW.update

    def update(self: AdamW, lr: float) -> float:
        kept = self.parameters["model.embed_tokens.weight"].detach().clone()
        norm = right(self, lr)
        self.parameters["model.embed_tokens.weight"].data.copy_(kept)
        return norm

    patch.setattr(AdamW, "update", update)


def rewards_in_another_order(patch: Patch) -> None:
    """The algorithm reads the reward of the next episode."""
    right = group_relative.rewards
    patch.setattr(group_relative, "rewards", lambda group: np.roll(right(group), -1))


def advantages_have_the_wrong_sign(patch: Patch) -> None:
    right = group_relative.standardized
    patch.setattr(group_relative, "standardized", lambda scores: -right(scores))


def baseline_of_the_batch(patch: Patch) -> None:
    """Rewards are standardized over all groups."""

    def weight_groups(self: GRPO, groups: Any, context: Any) -> Any:
        scores = [group_relative.rewards(group) for group in groups]
        white = iter(group_relative.standardized(np.concatenate(scores)))
        patched = [np.array([next(white) for _ in values]) for values in scores]
        # centred in its group again, so that only the scale comes from the batch
        return [
            self.weight_tokens(group, values, advantages - advantages.mean(), context)
            for group, values, advantages in zip(groups, scores, patched, strict=True)
        ]

    patch.setattr(GRPO, "weight_groups", weight_groups)


def critic_learns_twice_as_much(patch: Patch) -> None:
    right = losses.value
    patch.setattr(losses, "value", lambda *args: 2 * right(*args))


def dropout_while_learning(patch: Patch) -> None:
    """Dropout in forward passes with a gradient."""
    right = Block.forward
    patch.setattr(
        Block, "forward",
        lambda self, x, *args: F.dropout(right(self, x, *args), 0.1, training=torch.is_grad_enabled()),
    )  # fmt: skip


def dropout_while_learning_in_the_run(patch: Patch) -> None:
    """`dropout_while_learning` in the run alone, not in the preflight."""
    right = Block.forward

    def forward(self: Block, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return F.dropout(right(self, x, *args), 0.1, training=torch.is_grad_enabled() and x.shape[1] != TRIED)

    patch.setattr(Block, "forward", forward)


def dropout_always_in_the_run(patch: Patch) -> None:
    """Dropout in every forward pass of the trained decoder."""
    right = Block.forward
    patch.setattr(
        Block, "forward",
        lambda self, x, *args: F.dropout(right(self, x, *args), 0.1, training=x.shape[1] != TRIED),
    )  # fmt: skip
