"""The gradient check: the learner's gradient against a loss written out by hand, before the first step.

The loss is a function of the log-probs of the learned tokens (and of the critic's values): torch's autograd
gives its derivative for each of them. How these move with the weights is measured in float64 by central
differences, for the decoder's own backward pass is among what is checked. Both together are the derivative of
the loss along a direction in the space of weights, which the learner's gradient must give too.

The sampler has drifted from the policy, and the reference is another policy: clips, ratios and the KL all
count. Products are float32 whatever the precision of the run: bfloat16 rounds by more than some mistakes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.algorithms import Algorithm
from perilune.learn.batch import COMPONENTS, PackedBatch, pack
from perilune.learn.checks import check_packed, check_weights
from perilune.learn.trainer import CRITIC, predicting_states, target_logprobs, with_reference
from perilune.learn.weights import Component, KLEstimator, Surrogate, ValueTargets, WeightedGroup
from perilune.tasks.checks.twin import Figures, Twin, plain
from perilune.tasks.stage.publishing import RANDOM, gap_limit, plain_limit

DIRECTIONS = 2
STEP = 1e-5  # in every weight, of a central difference
CPU_TOLERANCE, TOLERANCE = 2e-3, 2e-2  # of a derivative, relative to the largest
TINY = 1e-7  # a derivative that is rounding
TOKEN_BUDGET = 12  # so that there are several micro-batches


@dataclass(frozen=True)
class _Tokens:
    """What the loss by hand is made of: float64[M], one for each learned token of all episodes."""

    weights: Tensor
    sampler: Tensor
    reference: Tensor
    returns: Tensor
    old_values: Tensor
    episode_of: Tensor
    surrogate: Surrogate
    value_clip: float


Loss = Callable[[_Tokens, Figures], Tensor]


def check_gradient(twin: Twin) -> None:
    """Compare every component of the run's loss.

    Raises:
        WorkFailedError: naming the component, and the mistake or the parameters whose gradient is wrong; as
            `check_weights` and `check_packed`; when the learner's log-probs are wrong already.
    """
    spec, learner = twin.spec, twin.learner
    left_out = [name for name in twin.trained if name not in learner.optimizer.parameters]
    if left_out:
        raise WorkFailedError(
            f"{len(left_out)} of {len(twin.trained)} parameters are not given to the optimizer, the first is"
            f" {left_out[0]}",
            where="preflight",
            remedy=REPORT_BUG,
        )
    weighted = twin.weight_groups(twin.groups)
    centred = spec.algorithm.centred and spec.algorithm.compares == "group"
    check_weights(weighted, centred=centred, sparse=spec.algorithm.sparse)
    batches = pack(weighted, TOKEN_BUDGET, temperature=spec.temperature)
    check_packed(weighted, batches)
    _check_logprobs(twin, batches)
    if spec.kl:
        batches = with_reference(batches, twin.reference)
    episodes = [one for group in twin.groups for one in group]
    now = plain(learner.decoder, twin.critic, episodes, spec.temperature)
    moves = [_moves(twin, direction) for direction in range(DIRECTIONS)]
    for name in COMPONENTS:
        alone = [_only(batch, name) for batch in batches if getattr(batch, name) is not None]
        if not alone:
            continue
        learner.forward_backward(alone)
        found = [sum(_slopes(twin, direction).values()) for direction in range(DIRECTIONS)]
        tokens = _tokens(twin, weighted, name)
        right = [_derivative(_BY_HAND[name], tokens, now, one) for one in moves]
        limit = _tolerance(twin) * max(map(abs, right)) + TINY
        if not _alike(found, right, limit):
            known = {
                why: [_derivative(loss, other, now, one) for one in moves]
                for why, loss, other in _mistakes(name, twin, tokens, len(alone))
            }
            why = next((said for said, theirs in known.items() if _alike(found, theirs, limit)), None)
            raise WorkFailedError(
                f"the gradient of {_CALLED[name]} is not the one worked out by hand:"
                f" {why or _where(twin, partial(_derivative, _BY_HAND[name], tokens, now))}",
                where="preflight",
                remedy=REPORT_BUG,
            )
        for parameter in learner.optimizer.parameters.values():
            parameter.grad = None


def _check_logprobs(twin: Twin, batches: Sequence[PackedBatch]) -> None:
    """Compare the log-probs that the loss is a function of, computed as for learning."""
    by_id = {one.episode_id: one for group in twin.groups for one in group}
    decoder, temperature = twin.learner.decoder, twin.spec.temperature
    for batch in batches:
        episodes = [by_id[name] for name in batch.episode_ids]
        moved = batch.to(twin.device)
        found, again = (
            target_logprobs(decoder, moved, predicting_states(decoder, moved))[0].detach().cpu().double()
            for _ in range(2)
        )
        why = f"the learner's forward pass gives other log-probs each time: {RANDOM}"
        if float((found - again).abs().max()) <= gap_limit(decoder):
            right, at_one = (plain(decoder, None, episodes, one)[0] for one in (temperature, 1.0))
            gap = float((found - right).abs().max())
            if gap <= plain_limit(decoder):
                continue
            why = f"the learner's log-probs differ by {gap:.3g} nats from those of one sequence at a time"
            if float((found - at_one).abs().max()) <= plain_limit(decoder):
                why = f"the temperature {temperature:g} is missing from the learner's log-probs"
        raise WorkFailedError(why, where="preflight", remedy=REPORT_BUG)


def _only(batch: PackedBatch, name: str) -> PackedBatch:
    return replace(batch, **{other: None for other in COMPONENTS if other != name})  # type: ignore[arg-type]


def _tolerance(twin: Twin) -> float:
    return CPU_TOLERANCE if twin.device.type == "cpu" else TOLERANCE


def _alike(some: Sequence[float], others: Sequence[float], limit: float) -> bool:
    return all(abs(one - other) <= limit for one, other in zip(some, others, strict=True))


# ---- derivatives along a direction -----------------------------------------------------------------------


def _directions(twin: Twin, direction: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """By name of a parameter that learns: the exact twin's, and +-1 for each of its elements."""
    random = torch.Generator().manual_seed(direction)
    exact = dict(twin.exact.named_parameters())
    if twin.exact_critic is not None:
        exact |= {CRITIC + name: one for name, one in twin.exact_critic.named_parameters()}
    for name in twin.trained:
        yield name, exact[name], torch.randint(0, 2, exact[name].shape, generator=random).double() * 2 - 1


def _slopes(twin: Twin, direction: int) -> dict[str, float]:
    """What the learner's gradient of each parameter says of the loss along a direction."""
    gradients = {name: parameter.grad for name, parameter in twin.learner.optimizer.parameters.items()}
    return {
        name: 0.0 if (gradient := gradients[name]) is None else float((gradient.cpu().double() * signs).sum())
        for name, _, signs in _directions(twin, direction)
    }


def _moves(twin: Twin, direction: int, only: str | None = None) -> Figures:
    """By central differences of all weights, or of one parameter's."""
    episodes = [one for group in twin.groups for one in group]
    weights = [one for one in _directions(twin, direction) if only in (None, one[0])]

    def moved(by: float) -> Figures:
        for _, weight, signs in weights:
            weight.add_(signs, alpha=by)
        return plain(twin.exact, twin.exact_critic, episodes, twin.spec.temperature)

    up, down = moved(STEP), moved(-2 * STEP)
    for _, weight, signs in weights:
        weight.add_(signs, alpha=STEP)
    return Figures(*((one - other) / (2 * STEP) for one, other in zip(up, down, strict=True)))


def _derivative(loss: Loss, tokens: _Tokens, now: Figures, moves: Figures) -> float:
    """Of a loss, by the chain rule."""
    leaves = Figures(*(one.clone().requires_grad_() for one in now))
    found = torch.autograd.grad(loss(tokens, leaves), leaves, allow_unused=True)
    return sum(float(one @ move) for one, move in zip(found, moves, strict=True) if one is not None)


def _where(twin: Twin, derivative: Callable[[Figures], float]) -> str:
    """Which parameters have the wrong gradient."""
    found = _slopes(twin, 0)
    right = {name: derivative(_moves(twin, 0, name)) for name in found}
    limit = _tolerance(twin) * max(map(abs, right.values())) + TINY
    wrong = [name for name in found if abs(found[name] - right[name]) > limit]
    if not wrong:
        return "it differs by little in many parameters"
    first = max(wrong, key=lambda name: abs(right[name]))
    times = found[first] / right[first] if right[first] else np.inf
    of = "all parameters" if len(wrong) == len(found) else f"{len(wrong)} of {len(found)} parameters"
    what = "is missing" if abs(times) < 1e-6 else "has the wrong sign" if abs(times + 1) < 0.05 else (
        f"is {times:.3g} times the right one"
    )  # fmt: skip
    return f"that of {of} is wrong, that of {first} {what}"


# ---- the loss by hand -----------------------------------------------------------------------------------


def _policy_loss(tokens: _Tokens, now: Figures, *, smaller: bool = True) -> Tensor:
    """PPO's clipped gain with its dual clip, of token or sequence ratios; or CISPO's weighted log-probs."""
    rule, weights, logprobs = tokens.surrogate, tokens.weights, now.logprobs
    ratio = (logprobs - tokens.sampler).exp()
    if rule.ratio != "token":
        of = torch.nn.functional.one_hot(tokens.episode_of).double()
        total = (logprobs - tokens.sampler).detach() @ of
        whole = total / of.sum(0) if rule.ratio == "sequence" else total
        ratio = (of @ whole).exp() * (logprobs - logprobs.detach()).exp()
    bounded = torch.clip(ratio, rule.low, rule.high)
    if rule.clip == "weight":
        return -(weights * bounded.detach() * logprobs).sum()
    free, held = ratio * weights, bounded * weights
    gain = torch.where((free < held) == smaller, free, held)
    if rule.dual is not None:
        gain = torch.where((weights < 0) & (gain < rule.dual * weights), rule.dual * weights, gain)
    return -gain.sum()


def _kl_loss(tokens: _Tokens, now: Figures) -> Tensor:
    x = now.logprobs - tokens.reference
    estimate = x**2 / 2 if tokens.surrogate.kl == "k2" else (-x).exp() - 1 + x
    if tokens.surrogate.kl == "k3_corrected":
        estimate = estimate * (now.logprobs - tokens.sampler).exp()
    return (tokens.weights * estimate).sum()


def _value_loss(tokens: _Tokens, now: Figures) -> Tensor:
    near = torch.clip(
        now.values, tokens.old_values - tokens.value_clip, tokens.old_values + tokens.value_clip
    )
    errors = torch.stack([now.values - tokens.returns, near - tokens.returns]) ** 2
    return (tokens.weights * errors.max(0).values).sum() / 2


def _cross_entropy(tokens: _Tokens, now: Figures) -> Tensor:
    return -(tokens.weights * now.logprobs).sum()


def _entropy_loss(tokens: _Tokens, now: Figures) -> Tensor:
    return -(tokens.weights * now.entropies).sum()


_BY_HAND: Mapping[str, Loss] = {
    "policy_gradient": _policy_loss,
    "cross_entropy": _cross_entropy,
    "reference_kl": _kl_loss,
    "entropy": _entropy_loss,
    "value": _value_loss,
}
_CALLED = {
    "policy_gradient": "the policy loss",
    "cross_entropy": "the cross-entropy",
    "reference_kl": "the KL to the reference",
    "entropy": "the entropy bonus",
    "value": "the critic's loss",
}


def _mistakes(name: str, twin: Twin, right: _Tokens, batches: int) -> Iterator[tuple[str, Loss, _Tokens]]:
    """Known mistakes, as losses of tokens."""
    loss = _BY_HAND[name]
    yield "its sign is wrong", lambda *seen: -loss(*seen), right
    yield "it is divided by the number of micro-batches once more", lambda *seen: loss(*seen) / batches, right
    if name == "policy_gradient":
        rule = right.surrogate
        yield "the clip takes the larger gain, not the smaller", partial(_policy_loss, smaller=False), right
        yield "the ratio is taken as 1", _cross_entropy, right
        free = replace(rule, low=0.0, high=np.inf)
        yield "the ratio is not clipped", loss, replace(right, surrogate=free)
        yield "the dual clip is missing", loss, replace(right, surrogate=replace(rule, dual=None))
    if name == "reference_kl":
        episodes = [one for group in twin.groups for one in group]
        other: KLEstimator = "k3" if right.surrogate.kl == "k2" else "k2"
        at_one, *_ = plain(twin.reference, None, episodes, 1.0)
        yield (
            "it is taken to the sampler, not to the reference",
            loss,
            replace(right, reference=right.sampler),
        )
        yield "the reference's log-probs are at temperature 1", loss, replace(right, reference=at_one)
        yield f"its estimator is {other}", loss, replace(right, surrogate=replace(right.surrogate, kl=other))


def _tokens(twin: Twin, weighted: Sequence[WeightedGroup], name: str) -> _Tokens:
    """The parts of a component's loss, counted again from what the algorithm made of the groups."""
    spec, group = twin.spec, weighted[0]
    episodes = [one for group in weighted for one in group.episodes]
    masks = [one.loss_mask for one in episodes]

    def learned(arrays: Sequence[np.ndarray]) -> Tensor:
        parts = [array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    targets = [one.value for one in weighted if one.value is not None]
    components = [_component(one, name) for one in weighted]
    denominator = sum(sum(one.counts) for one in components)
    weights = learned([array for one in components for array in one.weights]) / denominator
    none = torch.zeros_like(weights)
    return _Tokens(
        weights=weights,
        sampler=learned([one.logprobs for one in episodes]),
        reference=plain(twin.reference, None, episodes, spec.temperature)[0],
        returns=learned([a for one in targets for a in one.returns]) if targets else none,
        old_values=learned([a for one in targets for a in one.values]) if targets else none,
        episode_of=torch.arange(len(masks)).repeat_interleave(torch.tensor([int(m.sum()) for m in masks])),
        surrogate=_configured(spec.algorithm, replace(group.surrogate, kl=spec.kl_estimator)),
        value_clip=targets[0].clip if targets else 0.0,
    )


def _component(group: WeightedGroup, name: str) -> Component:
    found: Component | ValueTargets = getattr(group, name)
    return found.component if isinstance(found, ValueTargets) else found


def _configured(algorithm: Algorithm, surrogate: Surrogate) -> Surrogate:
    """The surrogate with the bounds that the algorithm's options say."""
    options = algorithm.model_dump()
    if "ratio_max" in options:
        return replace(surrogate, low=options["ratio_min"], high=options["ratio_max"], clip="weight")
    if "clip_high" in options:
        low, high = 1 - options["clip_low"], 1 + options["clip_high"]
        return replace(surrogate, low=low, high=high, dual=options.get("dual_clip"), clip="gain")
    return surrogate
