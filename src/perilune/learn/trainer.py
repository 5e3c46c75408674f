"""The learner: forward_backward, optim_step, save_state, load_state. It never asks which algorithm runs.

A training step is
    batches = pack(algorithm("grpo").weight_groups(groups, StepContext(max_tokens=...)), token_budget)
    figures = learner.forward_backward(batches)
    figures |= learner.optim_step(lr)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.errors import RequestError
from perilune.learn import checkpoints, losses
from perilune.learn.adaptation import comparable, frozen_checksum, trainable
from perilune.learn.batch import PackedBatch, round_up
from perilune.learn.critic import Critic
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.figures import Figures, merge_micro_batches
from perilune.learn.optimizer import AdamW
from perilune.learn.training_settings import OptimizerSettings
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder
from perilune.models.logprobs import in_row_chunks
from perilune.models.logprobs import token_logprobs as row_logprobs

if TYPE_CHECKING:
    from perilune.learn.sharding import ShardedDecoder

Objective = Callable[[PackedBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""A loss that is more than a weight a token: (batch, hidden float[M, d] that predict its learned tokens) ->
its share of the step's loss, and sums of figures over whatever it counts."""

CRITIC = "critic."  # what names of its parameters begin with


class Learner:
    """A decoder with an optimizer.

    Args:
        decoder: trained in place; an engine that holds the same object samples with the new weights.
        optimizer: beta2, weight decay and gradient clip; the learning rate is given to each step.
        critic: predicts values, and learns beside the decoder, where the algorithm has value targets.
        critic_lr: the critic's peak learning rate where it is not the decoder's.
        ranks: that learn together: each is given the same micro-batches, and computes some of them.

    Attributes:
        trained: the decoder that forward passes with a gradient go through: `decoder` itself, or where
            training is cut over processes a twin, whose weights `decoder` takes after each update.
        version: updates done, the policy version of the weights.
        memory: JSON values that are saved and loaded with the rest: an algorithm's, a place in the data.
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
        self._sharded = _cut(decoder, ranks)
        self.trained = decoder if self._sharded is None else self._sharded.module
        self.critic = critic
        self.version = 0
        self.memory: dict[str, Any] = {}
        self._frozen = frozen_checksum(decoder)
        parameters = trainable(decoder) if self._sharded is None else self._sharded.parameters
        if critic is not None:
            parameters = parameters | {CRITIC + name: p for name, p in critic.named_parameters()}
        self.optimizer = AdamW(
            parameters,
            beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            grad_clip=optimizer.grad_clip,
            lr_factors={}
            if critic_lr is None
            else {name: critic_lr / optimizer.peak_lr for name in parameters if name.startswith(CRITIC)},
        )
        if self._sharded is not None:
            self.optimizer.whole_norms = self._sharded.whole_norms

    def forward_backward(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """Add the gradient of one step's loss, all its micro-batches, to the parameters.

        Returns:
            loss; tokens (learned from); and over those tokens: entropy (nats), and where sampled tokens are
            learned from, clip_fraction, staleness (updates since they were sampled), kl_behaviour and
            kl_behaviour_k3 (two estimates of KL(sampler || learner)), and logprob_gap_max and _mean,
            |sampler - learner|, over tokens that the very same weights sampled. staleness_max. kl_reference
            (k3) and value_error (mean square of value - return) where the loss has them. What there was
            nothing to measure on is left out.

        Raises:
            RequestError: when a batch has reference_kl weights and no reference log-probs, or values to
                learn and no critic.
        """
        with self._in_step():
            seen = [self._learn(batch) for batch in self._own(batches)]
        every = self.ranks.all_gather_json("figures", [figures.read() for figures in seen])
        return merge_micro_batches(every)

    def _learn(self, batch: PackedBatch) -> Figures:
        """Add the gradient of one micro-batch to the parameters."""
        if batch.reference_kl is not None and batch.reference_logprobs is None:
            raise RequestError(
                "a KL to the reference without its log-probs",
                remedy="batch.with_reference(token_logprobs(reference, batch))",
            )
        figures = Figures()
        states = predicting_states(self.trained, batch)
        logprobs, entropy = target_logprobs(
            self.trained, batch, states, learn_entropy=batch.entropy is not None
        )
        loss = self._loss(batch, logprobs, figures) + self._value_loss(batch, states, figures)
        if batch.entropy is not None:
            loss = loss - (batch.entropy * entropy).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        figures.add_total("loss", loss.detach())
        figures.add_mean("entropy", entropy.detach())
        self._observe(batch, logprobs.detach(), figures)
        return figures

    def forward_backward_custom(
        self, batches: Sequence[PackedBatch], objective: Objective
    ) -> dict[str, float]:
        """Add the gradient of one step's loss, where `objective` says what that is.

        Returns:
            loss, tokens, and every figure of the objective, all summed over the micro-batches.
        """
        seen: list[dict[str, Tensor]] = []
        tokens: list[int] = []
        with self._in_step():
            for batch in self._own(batches):
                loss, sums = objective(batch, predicting_states(self.trained, batch))
                loss.backward()  # type: ignore[no-untyped-call]
                seen.append({"loss": loss.detach(), **sums})
                tokens.append(len(batch.targets))
        own = [
            {name: float(value.double()) for name, value in sums.items()} | {"tokens": float(count)}
            for sums, count in zip(seen, tokens, strict=True)
        ]
        totals = {"tokens": 0.0}
        for found in self.ranks.all_gather_json("figures", own):
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _in_step(self) -> AbstractContextManager[None]:
        """Where processes wait for each other inside of layers, the wait for a whole step."""
        return nullcontext() if self._sharded is None else self.ranks.waiting("the step's layers")

    def _own(self, batches: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
        """The micro-batches that this process computes; after them the gradient is that of all."""
        parameters = self.optimizer.parameters
        if self._sharded is None:
            own = self.ranks.distribute(batches, list(parameters.values()))
        else:
            others = [p for name, p in parameters.items() if name.startswith(CRITIC)]
            own = self._sharded.distribute(batches, others)
        return (batch.to(self._device) for batch in own)

    def _loss(self, batch: PackedBatch, logprobs: Tensor, figures: Figures) -> Tensor:
        """The sum of the batch's components."""
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
                batch.old_logprobs,
            )
            figures.add_mean("kl_reference", losses.k3(logprobs.detach() - batch.reference_logprobs))
        return total

    def _value_loss(self, batch: PackedBatch, states: Tensor, figures: Figures) -> Tensor:
        """What the critic has to learn, nothing where there is no critic."""
        if batch.value is None:
            return states.new_zeros(())
        if self.critic is None:
            raise RequestError("values to learn without a critic", remedy="Learner(..., critic=Critic(d))")
        assert batch.old_values is not None and batch.returns is not None
        values = self.critic(states)
        figures.add_mean("value_error", (values.detach() - batch.returns).square())
        return losses.value(values, batch.old_values, batch.returns, batch.value, batch.value_clip)

    def _observe(self, batch: PackedBatch, logprobs: Tensor, figures: Figures) -> None:
        """How far the learner is from the policy that sampled."""
        if batch.policy_gradient is None:
            return
        difference = batch.sampler_logprobs - logprobs
        figures.add_mean("kl_behaviour", difference)
        figures.add_mean("kl_behaviour_k3", losses.k3(difference))
        staleness = self.version - batch.policy_version
        figures.add_mean("staleness", staleness)
        figures.add_max("staleness_max", staleness)
        same = difference[batch.policy_version == self.version].abs()
        if len(same):
            figures.add_mean("logprob_gap_mean", same)
            figures.add_max("logprob_gap_max", same)

    def optim_step(self, lr: float) -> dict[str, float]:
        """Clip, update, forget the gradient; a step without gradient still decays the moments.

        Raises:
            WorkFailedError: when the gradient is not finite; weights are as they were.
        """
        norm = self.optimizer.update(lr)
        if self._sharded is not None:
            self._sharded.publish(self.decoder)
        self.version += 1
        return {"grad_norm": norm, "lr": lr}

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write weights, moments and counters so that `directory` is complete or absent; `extra` is JSON.

        Of several processes, all of which must call it, the first one writes.
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
            tensors = {name: self._sharded.whole(parts) for name, parts in tensors.items()}
        if self.ranks.leads:
            checkpoints.write(directory, tensors, state)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Become the learner that was saved, bit for bit; return the `extra` it was saved with.

        Raises:
            RequestError: when files are missing or damaged, tensors are not those of this decoder, or the
                frozen weights are not those that these were learned beside.
        """
        tensors, state = checkpoints.read(directory, ("weights", "first_moments", "second_moments"))
        if state.get("frozen", "") != self._frozen:
            raise RequestError(
                f"learned beside frozen weights with checksum {state.get('frozen') or 'none'}, and those of"
                f" this model have {self._frozen or 'none'}: another base, or one kept otherwise",
                where=str(directory),
            )
        if self._sharded is not None:
            tensors = {name: self._sharded.parts(whole) for name, whole in tensors.items()}
        checkpoints.copy_into(self.optimizer.parameters, tensors["weights"], directory)
        checkpoints.copy_into(self.optimizer.first, tensors["first_moments"], directory)
        checkpoints.copy_into(self.optimizer.second, tensors["second_moments"], directory)
        if self._sharded is not None:
            self._sharded.publish(self.decoder)
        self.version = int(state["version"])
        self.memory = dict(state.get("memory", {}))
        self.optimizer.step = int(state["optimizer_step"])
        return dict(state["extra"])

    def restore_second_moments(self, directory: Path) -> None:
        """Start from the second moments and the step count of another stage's state, first moments zero.

        The moments have the scale of the gradients that made them. With beta2 = 0.99 they decay over about
        100 updates; until then the step length depends on the ratio of the two losses' gradients.

        Raises:
            RequestError: as `load_state`, or when the other stage trained other parameters.
        """
        tensors, state = checkpoints.read(directory, ("second_moments",))
        decoder = {name: p for name, p in self.optimizer.second.items() if not name.startswith(CRITIC)}
        theirs = {name: p for name, p in tensors["second_moments"].items() if not name.startswith(CRITIC)}
        if self._sharded is not None:
            theirs = self._sharded.parts(theirs)
        if not comparable(decoder, theirs):
            raise RequestError(
                "the optimizer state belongs to other parameters: one of the two stages trained an adapter",
                where=str(directory),
                remedy="set restore_optimizer: false",
            )
        checkpoints.copy_into(decoder, theirs, directory)
        self.optimizer.step = int(state["optimizer_step"])

    @property
    def _device(self) -> torch.device:
        return next(iter(self.optimizer.parameters.values())).device


@torch.no_grad()
def token_logprobs(decoder: Decoder, batch: PackedBatch) -> Tensor:
    """Log-probs float32[M] of the learned tokens under `decoder`, a frozen reference for instance."""
    device = next(decoder.parameters()).device
    batch = batch.to(device)
    return target_logprobs(decoder, batch, predicting_states(decoder, batch))[0]


def target_logprobs(
    decoder: Decoder, batch: PackedBatch, states: Tensor, *, learn_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies float32[M] of the learned tokens, from `predicting_states`.

    Args:
        learn_entropy: whether entropies carry a gradient too, which takes another pass over the logits.
    """

    def of_rows(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = decoder.logits(hidden)
        logprobs, entropy = row_logprobs(logits, targets, batch.temperature)
        return logprobs, losses.entropy(logits, batch.temperature) if learn_entropy else entropy

    learned = len(batch.targets)
    missing = round_up(learned) - learned
    states, targets = F.pad(states, (0, 0, 0, missing)), F.pad(batch.targets, (0, missing))
    logprobs, entropy = in_row_chunks(of_rows, states, targets, decoder.config.vocab_size)
    return logprobs[:learned], entropy[:learned]


def predicting_states(decoder: Decoder, batch: PackedBatch) -> Tensor:
    """Last hidden states float[M, d] that predict the learned tokens of a batch on the decoder's device."""
    fed = batch.padded()
    attention = PackedAttention(fed.cu_seqlens, fed.prefix_of, fed.prefix_lengths)
    return decoder(fed.token_ids, fed.positions, attention).index_select(0, batch.rows)  # type: ignore[no-any-return]


def _cut(decoder: Decoder, ranks: Ranks) -> ShardedDecoder | None:
    if not ranks.sharded:
        return None
    if len(trainable(decoder)) < len(dict(decoder.named_parameters())):
        raise RequestError(
            "of a frozen model only the adapter is trained, which is too small to be cut",
            where="resources.sharded",
            remedy="set sharded: false: processes share the work all the same",
        )
    from perilune.learn.sharding import ShardedDecoder

    return ShardedDecoder(decoder, ranks)


def with_reference(
    batches: Sequence[PackedBatch], reference: Decoder, ranks: Ranks = SINGLE_RANK
) -> list[PackedBatch]:
    """The batches with the log-probs of a frozen `reference` where their loss asks for them.

    Of several processes, each sees to those that it learns from.
    """
    return [
        batch.with_reference(token_logprobs(reference, batch))
        if batch.reference_kl is not None and index % ranks.count == ranks.rank
        else batch
        for index, batch in enumerate(batches)
    ]
