"""The learner, which does not depend on the algorithm.

A training step is
    batches = pack(algorithm("grpo").weight_groups(groups, StepContext(max_tokens=...)), token_budget)
    figures = learner.forward_backward(batches)
    figures |= learner.optim_step(lr)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.errors import RequestError
from perilune.learn import checkpoints, losses
from perilune.learn.adaptation import frozen_checksum, has_same_parameters, trainable
from perilune.learn.batch import PackedBatch, round_up_rows
from perilune.learn.critic import Critic
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.figures import Figures, merge_micro_batches
from perilune.learn.optimizer import AdamW
from perilune.learn.replay import RouteReplay
from perilune.learn.training_settings import OptimizerSettings, check_can_shard
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder
from perilune.models.logprobs import compute_in_row_chunks
from perilune.models.logprobs import token_logprobs as row_logprobs
from perilune.models.routing import Routing

if TYPE_CHECKING:
    from perilune.learn.sharding import ShardedDecoder

Objective = Callable[[PackedBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""A loss that is not a weighted sum over tokens. Takes the batch and the hidden states float[M, d] that
predict its learned tokens. Returns the batch's share of the step's loss, and sums of figures."""

CRITIC_PREFIX = "critic."  # prefix of the names of the critic's parameters


class Learner:
    """Trains a decoder.

    Args:
        decoder: trained in place; an engine that holds the same object samples with the new weights.
        optimizer: beta2, weight decay and gradient clip. The learning rate is an argument of `optim_step`.
        critic: predicts values and is trained with the decoder, for algorithms with value targets.
        critic_lr: the critic's peak learning rate, if it differs from the decoder's.
        ranks: the processes that train together. All get the same micro-batches, and each computes a share.

    Attributes:
        trained: the decoder to use for forward passes with gradients: `decoder`, or with sharded training a
            copy whose weights are written to `decoder` after each update.
        version: number of updates, the policy version of the weights.
        memory: JSON values to save in checkpoints, such as an algorithm's state or a position in the data.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: OptimizerSettings | None = None,
        *,
        critic: Critic | None = None,
        critic_lr: float | None = None,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        optimizer = optimizer or OptimizerSettings()
        self.decoder = decoder
        self.ranks = ranks
        self._sharded = _shard(decoder, ranks)
        self.trained = decoder if self._sharded is None else self._sharded.module
        self.critic = critic
        self.version = 0
        self.memory: dict[str, Any] = {}
        self._frozen = frozen_checksum(decoder)
        parameters = trainable(decoder) if self._sharded is None else self._sharded.parameters
        if critic is not None:
            parameters = parameters | {CRITIC_PREFIX + name: p for name, p in critic.named_parameters()}
        self.optimizer = AdamW(
            parameters,
            beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            grad_clip=optimizer.grad_clip,
            lr_factors={}
            if critic_lr is None
            else {
                name: critic_lr / optimizer.peak_lr for name in parameters if name.startswith(CRITIC_PREFIX)
            },
        )
        if self._sharded is not None:
            self.optimizer.gather_norms = self._sharded.gather_norms

    def forward_backward(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """Add the gradient of all micro-batches of one update to the parameters.

        Returns:
            loss; tokens (number of learned tokens); entropy (nats). With a policy gradient also
            clip_fraction; staleness and staleness_max (updates since a token was sampled); kl_behaviour and
            kl_behaviour_k3 (two estimates of KL(sampler || learner)); and over tokens sampled with the
            current weights, logprob_gap_mean and logprob_gap_max (|sampler - learner|) and logprob_gap_kl
            (the k3 estimate of their KL). kl_reference (k3) and value_error (mean square of value - return)
            if the loss has these components. With routes, routing/missing and routing/flipped (shares of fed
            tokens), routing/load_max and routing/load_entropy. Figures without any token are left out.

        Raises:
            RequestError: when a batch has reference_kl weights without reference log-probs, or value targets
                without a critic.
        """
        with self._in_step():
            batch_figures = [self._learn(batch) for batch in self._rank_batches(batches)]
        gathered = self.ranks.all_gather_json("figures", [figures.read() for figures in batch_figures])
        return merge_micro_batches(gathered)

    def _learn(self, batch: PackedBatch) -> Figures:
        """Add the gradient of one micro-batch to the parameters."""
        if batch.reference_kl is not None and batch.reference_logprobs is None:
            raise RequestError(
                "the batch has reference_kl weights but no reference log-probs",
                remedy="call batch.with_reference(token_logprobs(reference, batch))",
            )
        figures = Figures()
        replay = None if batch.routes is None else RouteReplay(batch.routes)
        states = predicting_states(self.trained, batch, replay)
        logprobs, entropy = target_logprobs(
            self.trained, batch, states, learn_entropy=batch.entropy is not None
        )
        loss = self._loss(batch, logprobs, figures) + self._value_loss(batch, states, figures)
        if batch.entropy is not None:
            loss = loss - (batch.entropy * entropy).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        figures.add_total("loss", loss.detach())
        figures.add_mean("entropy", entropy.detach())
        self._add_gap_figures(batch, logprobs.detach(), figures)
        if replay is not None:
            replay.add_figures(figures)
        return figures

    def forward_backward_custom(
        self, batches: Sequence[PackedBatch], objective: Objective
    ) -> dict[str, float]:
        """Add the gradient of one update with a custom loss.

        Returns:
            loss, tokens, and the figures of the objective, all summed over the micro-batches.
        """
        results: list[dict[str, Tensor]] = []
        tokens: list[int] = []
        with self._in_step():
            for batch in self._rank_batches(batches):
                loss, sums = objective(batch, predicting_states(self.trained, batch))
                loss.backward()  # type: ignore[no-untyped-call]
                results.append({"loss": loss.detach(), **sums})
                tokens.append(len(batch.targets))
        sums_by_batch = [
            {name: float(value.double()) for name, value in sums.items()} | {"tokens": float(count)}
            for sums, count in zip(results, tokens, strict=True)
        ]
        totals = {"tokens": 0.0}
        for figures in self.ranks.all_gather_json("figures", sums_by_batch):
            for name, value in figures.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _in_step(self) -> AbstractContextManager[None]:
        """Return the context of a step. In sharded training, ranks wait for each other in every layer."""
        return nullcontext() if self._sharded is None else self.ranks.waiting("the step's layers")

    def _rank_batches(self, batches: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
        """Iterate over this rank's micro-batches. At the end, the gradients are summed over all ranks."""
        parameters = self.optimizer.parameters
        if self._sharded is None:
            rank_batches = self.ranks.distribute(batches, list(parameters.values()))
        else:
            others = [p for name, p in parameters.items() if name.startswith(CRITIC_PREFIX)]
            rank_batches = self._sharded.distribute(batches, others)
        return (batch.to(self._device) for batch in rank_batches)

    def _loss(self, batch: PackedBatch, logprobs: Tensor, figures: Figures) -> Tensor:
        """Return the sum of the loss components that are weighted log-probs."""
        total = logprobs.new_zeros(())
        if batch.policy_gradient is not None:
            loss, clipped = losses.policy_gradient(
                logprobs, batch.old_logprobs, batch.policy_gradient, batch.surrogate, batch.episode_of
            )
            total = total + loss
            figures.add_mean("clip_fraction", clipped)
        if batch.cross_entropy is not None:
            total = total + losses.cross_entropy(logprobs, batch.cross_entropy)
        if batch.reference_kl is not None and batch.reference_logprobs is not None:
            total = total + losses.reference_kl(
                logprobs,
                batch.reference_logprobs,
                batch.reference_kl,
                batch.surrogate.kl,
                batch.sampler_logprobs,
            )
            figures.add_mean("kl_reference", losses.k3(logprobs.detach() - batch.reference_logprobs))
        return total

    def _value_loss(self, batch: PackedBatch, states: Tensor, figures: Figures) -> Tensor:
        """Return the loss of the critic; 0 if the batch has no value targets."""
        if batch.value is None:
            return states.new_zeros(())
        if self.critic is None:
            raise RequestError(
                "the batch has value targets, but the learner has no critic",
                remedy="pass Learner(..., critic=Critic(hidden_size))",
            )
        assert batch.old_values is not None and batch.returns is not None
        values = self.critic(states)
        figures.add_mean("value_error", (values.detach() - batch.returns).square())
        return losses.value(values, batch.old_values, batch.returns, batch.value, batch.value_clip)

    def _add_gap_figures(self, batch: PackedBatch, logprobs: Tensor, figures: Figures) -> None:
        """Add the figures of the distance between the learner and the policy that sampled."""
        if batch.policy_gradient is None:
            return
        difference = batch.sampler_logprobs - logprobs
        figures.add_mean("kl_behaviour", difference)
        figures.add_mean("kl_behaviour_k3", losses.k3(difference))
        staleness = self.version - batch.policy_version
        figures.add_mean("staleness", staleness)
        figures.add_max("staleness_max", staleness)
        same = difference[batch.policy_version == self.version]
        if len(same):
            figures.add_mean("logprob_gap_mean", same.abs())
            figures.add_mean("logprob_gap_kl", losses.k3(same))
            figures.add_max("logprob_gap_max", same.abs())

    def optim_step(self, lr: float) -> dict[str, float]:
        """Clip the gradient, update the weights and clear the gradient.

        A step without a gradient still decays the moments.

        Raises:
            WorkFailedError: when the gradient is not finite; the weights are unchanged.
        """
        norm = self.optimizer.update(lr)
        if self._sharded is not None:
            self._sharded.publish(self.decoder)
        self.version += 1
        return {"grad_norm": norm, "lr": lr}

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write weights, moments, counters and the JSON values `extra` to `directory`, atomically.

        All ranks must call this; rank 0 writes.
        """
        state = {
            "version": self.version,
            "optimizer_step": self.optimizer.step,
            "memory": self.memory,
            "frozen": self._frozen,
            "extra": dict(extra or {}),
        }
        tensors = {
            "weights": {name: p.detach() for name, p in self.optimizer.parameters.items()},
            "first_moments": self.optimizer.first,
            "second_moments": self.optimizer.second,
        }
        if self._sharded is not None:
            tensors = {name: self._sharded.gather_on_leader(parts) for name, parts in tensors.items()}
        if self.ranks.leads:
            checkpoints.write(directory, tensors, state)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore a saved learner, bit for bit, and return its `extra`.

        With sharded training, all ranks must call this, and only rank 0 reads the files.

        Raises:
            RequestError: when files are missing or damaged, the tensors do not fit this decoder, or the
                checkpoint was trained with other frozen weights.
        """
        own: dict[str, Mapping[str, Tensor]] = {
            "weights": self.optimizer.parameters,
            "first_moments": self.optimizer.first,
            "second_moments": self.optimizer.second,
        }
        tensors: dict[str, dict[str, Tensor]] = {}
        state: dict[str, Any] = {}
        if self._sharded is None or self.ranks.leads:
            tensors, state = checkpoints.read(directory, own)
        if self._sharded is not None:
            state = json.loads(self.ranks.broadcast("the checkpoint", json.dumps(state)))
        if state.get("frozen", "") != self._frozen:
            raise RequestError(
                f"the checkpoint belongs to frozen weights with checksum {state.get('frozen') or 'none'}, but"
                f" this model's have {self._frozen or 'none'}: it has another base, or another precision",
                where=str(directory),
                remedy="resume with the base model and the `lora` section of the attempt that wrote it",
            )
        if self._sharded is not None:
            tensors = {
                kind: self._sharded.scatter(tensors.get(kind, {}), parts, directory)
                for kind, parts in own.items()
            }
        for kind, parts in own.items():
            checkpoints.copy_into(parts, tensors[kind], directory)
        if self._sharded is not None:
            self._sharded.publish(self.decoder)
        self.version = int(state["version"])
        self.memory = dict(state.get("memory", {}))
        self.optimizer.step = int(state["optimizer_step"])
        return dict(state["extra"])

    def restore_second_moments(self, directory: Path) -> None:
        """Restore the second moments and the step count from another stage's checkpoint.

        The moments have the scale of the other stage's gradients. With beta2 = 0.99 they decay over about 100
        updates; until then the step size depends on the ratio of the two stages' gradients.

        Raises:
            RequestError: as `load_state`, or when the other stage trained other parameters.
        """
        tensors, state = checkpoints.read(directory, ("second_moments",))
        decoder = {name: p for name, p in self.optimizer.second.items() if not name.startswith(CRITIC_PREFIX)}
        saved = {
            name: p for name, p in tensors["second_moments"].items() if not name.startswith(CRITIC_PREFIX)
        }
        if self._sharded is not None:
            saved = self._sharded.shard(saved)
        if not has_same_parameters(decoder, saved):
            raise RequestError(
                "the optimizer state has other parameters: one of the two stages trained an adapter",
                where=str(directory),
                remedy="set restore_optimizer: false",
            )
        checkpoints.copy_into(decoder, saved, directory)
        self.optimizer.step = int(state["optimizer_step"])

    @property
    def _device(self) -> torch.device:
        return next(iter(self.optimizer.parameters.values())).device


@torch.no_grad()
def token_logprobs(decoder: Decoder, batch: PackedBatch) -> Tensor:
    """Return log-probs float32[M] of the learned tokens under `decoder`, for instance a frozen reference."""
    device = next(decoder.parameters()).device
    batch = batch.to(device)
    return target_logprobs(decoder, batch, predicting_states(decoder, batch))[0]


def target_logprobs(
    decoder: Decoder, batch: PackedBatch, states: Tensor, *, learn_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs (differentiable) and entropies of the learned tokens, float32[M] each.

    Args:
        states: float[M, d], the hidden states that predict the learned tokens.
        learn_entropy: whether entropies carry a gradient too, which takes another pass over the logits.
    """

    def of_rows(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = decoder.logits(hidden)
        logprobs, entropy = row_logprobs(logits, targets, batch.temperature)
        return logprobs, losses.entropy(logits, batch.temperature) if learn_entropy else entropy

    learned = len(batch.targets)
    missing = round_up_rows(learned) - learned
    states, targets = F.pad(states, (0, 0, 0, missing)), F.pad(batch.targets, (0, missing))
    logprobs, entropy = compute_in_row_chunks(of_rows, (states, targets), decoder.config.vocab_size)
    return logprobs[:learned], entropy[:learned]


def predicting_states(decoder: Decoder, batch: PackedBatch, routing: Routing | None = None) -> Tensor:
    """Return the hidden states float[M, d] that predict the learned tokens of a batch on the same device.

    Args:
        routing: by default replays the routes of the batch, if it has any.
    """
    if routing is None and batch.routes is not None:
        routing = RouteReplay(batch.routes)
    fed = batch.padded()
    attention = PackedAttention(fed.cu_seqlens, fed.prefix_of, fed.prefix_lengths)
    hidden = decoder(fed.token_ids, fed.positions, attention, routing)
    return hidden.index_select(0, batch.rows)  # type: ignore[no-any-return]


def _shard(decoder: Decoder, ranks: Ranks) -> ShardedDecoder | None:
    if not ranks.sharded:
        return None
    adapter = len(trainable(decoder)) < len(dict(decoder.named_parameters()))
    check_can_shard(adapter=adapter, experts=decoder.config.experts is not None)
    from perilune.learn.sharding import ShardedDecoder

    return ShardedDecoder(decoder, ranks)


def add_reference_logprobs(
    batches: Sequence[PackedBatch], reference: Decoder, ranks: Ranks = SINGLE_RANK
) -> list[PackedBatch]:
    """Add the log-probs of a frozen `reference` to the batches with reference_kl weights.

    The reference uses its own routes. Each rank computes a share of the micro-batches, and all ranks receive
    all log-probs.
    """
    scored = [batch for batch in batches if batch.reference_kl is not None]
    own = [
        token_logprobs(reference, replace(batch, routes=None)).cpu().numpy() for batch in ranks.shard(scored)
    ]
    logprobs = iter(ranks.all_gather_arrays("reference log-probs", own))
    return [
        batch if batch.reference_kl is None else batch.with_reference(torch.from_numpy(next(logprobs)))
        for batch in batches
    ]
