"""The gradient check: compares the learner's gradient with an independent computation before the first step.

The loss is a function of the log-probs of the trained tokens (and of the critic's values); autograd gives
its derivative with respect to them. Central differences in float64 give their derivative along a direction
in the space of weights, because the decoder's own backward pass is checked too. The chain rule combines both
into the derivative of the loss along the direction, which the learner's gradient must reproduce.

The batch comes from `Twin`: its sampler has drifted from the policy, and its reference is another policy, so
clips, ratios and the KL all matter. Products are float32 for every precision of the run, because some
mistakes are smaller than bfloat16 rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.algorithms import Algorithm
from perilune.learn.batch import PackedBatch, pack
from perilune.learn.checks import check_packed, check_weights
from perilune.learn.trainer import CRITIC_PREFIX, add_reference_logprobs, predicting_states, target_logprobs
from perilune.learn.weights import COMPONENTS, KLEstimator, Surrogate, WeightedGroup
from perilune.tasks.checks.twin import Figures, FirstRoutes, Twin, plain_figures
from perilune.tasks.stage.publishing import RANDOM_LAYER_HINT
from perilune.tasks.stage.rounding import plain_rounding, rounding_of

DIRECTIONS = 2  # directions in which derivatives are compared
DIFFERENCE_STEP = 1e-5  # change of every weight in a central difference
CPU_TOLERANCE, TOLERANCE = 2e-3, 2e-2  # error of a derivative, relative to the largest derivative
ABSOLUTE_TOLERANCE = 1e-7  # error of a derivative due to rounding
TOKEN_BUDGET = 12  # tokens; small, so that there are several micro-batches


@dataclass(frozen=True)
class _Tokens:
    """The inputs of the independent losses: float64[M], one value for each trained token."""

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
    """Compare the gradients of all components of the run's loss.

    Raises:
        WorkFailedError: naming the component, and the mistake or the parameters whose gradient is wrong; when
            the optimizer lacks parameters, or the learner's log-probs are wrong; see also `check_weights` and
            `check_packed`.
    """
    spec, learner = twin.spec, twin.learner
    missing = [name for name in twin.trained if name not in learner.optimizer.parameters]
    if missing:
        raise _error(
            f"{len(missing)} of {len(twin.trained)} parameters are not given to the optimizer, the first is"
            f" {missing[0]}"
        )
    weighted = twin.weight_groups(twin.groups)
    centred = spec.algorithm.centred and spec.algorithm.compares == "group"
    check_weights(weighted, centred=centred, sparse=spec.algorithm.sparse)
    batches = pack(weighted, TOKEN_BUDGET, temperature=spec.temperature)
    check_packed(weighted, batches)
    _check_logprobs(twin, batches)
    if spec.kl:
        batches = add_reference_logprobs(batches, twin.reference)
    episodes = [episode for group in twin.groups for episode in group]
    current = plain_figures(learner.decoder, twin.critic, episodes, spec.temperature)
    differences = [_central_differences(twin, direction) for direction in range(DIRECTIONS)]
    for name in COMPONENTS:
        single = [_keep_component(batch, name) for batch in batches if getattr(batch, name) is not None]
        if not single:
            continue
        learner.forward_backward(single)
        actual = [sum(_slopes(twin, direction).values()) for direction in range(DIRECTIONS)]
        tokens = _loss_inputs(twin, weighted, name)
        expected = [_derivative(_LOSSES[name], tokens, current, change) for change in differences]
        limit = _tolerance(twin) * max(map(abs, expected)) + ABSOLUTE_TOLERANCE
        if not _are_close(actual, expected, limit):
            mistakes = {
                mistake: [_derivative(loss, other, current, change) for change in differences]
                for mistake, loss, other in _known_mistakes(name, twin, tokens, len(single))
            }
            reason = next(
                (mistake for mistake, wrong in mistakes.items() if _are_close(actual, wrong, limit)), None
            )
            reason = reason or _describe_wrong_parameters(
                twin, partial(_derivative, _LOSSES[name], tokens, current)
            )
            raise _error(f"the gradient of {_LABELS[name]} differs from an independent computation: {reason}")
        for parameter in learner.optimizer.parameters.values():
            parameter.grad = None


def _error(message: str) -> WorkFailedError:
    return WorkFailedError(message, where="preflight", remedy=REPORT_BUG)


def _check_logprobs(twin: Twin, batches: Sequence[PackedBatch]) -> None:
    """Compare the learner's log-probs, computed as in training, with those of single sequences."""
    by_id = {episode.episode_id: episode for group in twin.groups for episode in group}
    decoder, temperature = twin.learner.decoder, twin.spec.temperature
    for batch in batches:
        episodes = [by_id[name] for name in batch.episode_ids]
        on_device = batch.to(twin.device)
        first, second = (
            target_logprobs(decoder, on_device, predicting_states(decoder, on_device))[0]
            .detach()
            .cpu()
            .double()
            for _ in range(2)
        )
        if not rounding_of(decoder).allows((first - second).numpy()):
            raise _error(f"the learner's forward pass gives other log-probs each time: {RANDOM_LAYER_HINT}")
        expected, at_one = (plain_figures(decoder, None, episodes, value)[0] for value in (temperature, 1.0))
        rounding = plain_rounding(decoder)
        if rounding.allows((first - expected).numpy()):
            continue
        if rounding.allows((first - at_one).numpy()):
            raise _error(f"the temperature {temperature:g} is missing from the learner's log-probs")
        gap = float((first - expected).abs().max())
        raise _error(f"the learner's log-probs differ by {gap:.3g} nats from those of one sequence at a time")


def _keep_component(batch: PackedBatch, name: str) -> PackedBatch:
    return replace(batch, **{other: None for other in COMPONENTS if other != name})  # type: ignore[arg-type]


def _tolerance(twin: Twin) -> float:
    return CPU_TOLERANCE if twin.device.type == "cpu" else TOLERANCE


def _are_close(values: Sequence[float], others: Sequence[float], limit: float) -> bool:
    return all(abs(value - other) <= limit for value, other in zip(values, others, strict=True))


# ---- derivatives along a direction -----------------------------------------------------------------------


def _directions(twin: Twin, direction: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each trained parameter, its float64 copy, and +-1 for each element."""
    random = torch.Generator().manual_seed(direction)
    exact = dict(twin.exact.named_parameters())
    if twin.exact_critic is not None:
        exact |= {CRITIC_PREFIX + name: weight for name, weight in twin.exact_critic.named_parameters()}
    for name in twin.trained:
        yield name, exact[name], torch.randint(0, 2, exact[name].shape, generator=random).double() * 2 - 1


def _slopes(twin: Twin, direction: int) -> dict[str, float]:
    """Return the derivative of the loss along a direction, from the learner's gradient, by parameter."""
    gradients = {name: parameter.grad for name, parameter in twin.learner.optimizer.parameters.items()}
    return {
        name: 0.0 if (gradient := gradients[name]) is None else float((gradient.cpu().double() * signs).sum())
        for name, _, signs in _directions(twin, direction)
    }


def _central_differences(twin: Twin, direction: int, only: str | None = None) -> Figures:
    """Return the derivatives of the figures along a direction, for all weights or those of one parameter."""
    episodes = [episode for group in twin.groups for episode in group]
    weights = [entry for entry in _directions(twin, direction) if only in (None, entry[0])]

    routes = FirstRoutes()

    def shifted(by: float) -> Figures:
        for _, weight, signs in weights:
            weight.add_(signs, alpha=by)
        return plain_figures(twin.exact, twin.exact_critic, episodes, twin.spec.temperature, routes)

    if twin.exact.config.experts is not None:
        shifted(0.0)
    up, down = shifted(DIFFERENCE_STEP), shifted(-2 * DIFFERENCE_STEP)
    for _, weight, signs in weights:
        weight.add_(signs, alpha=DIFFERENCE_STEP)
    return Figures(*((high - low) / (2 * DIFFERENCE_STEP) for high, low in zip(up, down, strict=True)))


def _derivative(loss: Loss, tokens: _Tokens, current: Figures, differences: Figures) -> float:
    """Return the derivative of a loss along a direction, by the chain rule."""
    leaves = Figures(*(figure.clone().requires_grad_() for figure in current))
    gradients = torch.autograd.grad(loss(tokens, leaves), leaves, allow_unused=True)
    return sum(
        float(grad @ change) for grad, change in zip(gradients, differences, strict=True) if grad is not None
    )


def _describe_wrong_parameters(twin: Twin, derivative: Callable[[Figures], float]) -> str:
    actual = _slopes(twin, 0)
    expected = {name: derivative(_central_differences(twin, 0, name)) for name in actual}
    limit = _tolerance(twin) * max(map(abs, expected.values())) + ABSOLUTE_TOLERANCE
    wrong = [name for name in actual if abs(actual[name] - expected[name]) > limit]
    if not wrong:
        return "the gradients of many parameters differ a little"
    first = max(wrong, key=lambda name: abs(expected[name]))
    times = actual[first] / expected[first] if expected[first] else np.inf
    share = "all parameters" if len(wrong) == len(actual) else f"{len(wrong)} of {len(actual)} parameters"
    problem = f"is {times:.3g} times the right one"
    if abs(times) < 1e-6:
        problem = "is missing"
    elif abs(times + 1) < 0.05:
        problem = "has the wrong sign"
    return f"the gradient of {share} is wrong, and that of {first} {problem}"


# ---- the independent losses -----------------------------------------------------------------------------


def _policy_loss(tokens: _Tokens, now: Figures, *, smaller: bool = True) -> Tensor:
    """Return PPO's clipped gain with dual clip (token or sequence ratios), or CISPO's weighted log-probs."""
    rule, weights, logprobs = tokens.surrogate, tokens.weights, now.logprobs
    ratio = (logprobs - tokens.sampler).exp()
    if rule.ratio != "token":
        onehot = torch.nn.functional.one_hot(tokens.episode_of).double()
        total = (logprobs - tokens.sampler).detach() @ onehot
        whole = total / onehot.sum(0) if rule.ratio == "sequence" else total
        ratio = (onehot @ whole).exp() * (logprobs - logprobs.detach()).exp()
    clipped = torch.clip(ratio, rule.low, rule.high)
    if rule.clip == "weight":
        return -(weights * clipped.detach() * logprobs).sum()
    free, bounded = ratio * weights, clipped * weights
    gain = torch.where((free < bounded) == smaller, free, bounded)
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


_LOSSES: Mapping[str, Loss] = {
    "policy_gradient": _policy_loss,
    "cross_entropy": _cross_entropy,
    "reference_kl": _kl_loss,
    "entropy": _entropy_loss,
    "value": _value_loss,
}
_LABELS = {
    "policy_gradient": "the policy loss",
    "cross_entropy": "the cross-entropy",
    "reference_kl": "the KL to the reference",
    "entropy": "the entropy bonus",
    "value": "the critic's loss",
}


def _known_mistakes(
    name: str, twin: Twin, right: _Tokens, batches: int
) -> Iterator[tuple[str, Loss, _Tokens]]:
    """Yield known mistakes: a description, and a loss with its inputs that makes the mistake."""
    loss = _LOSSES[name]
    yield "its sign is wrong", lambda *inputs: -loss(*inputs), right
    yield "it is divided by the number of micro-batches twice", lambda *inputs: loss(*inputs) / batches, right
    if name == "policy_gradient":
        rule = right.surrogate
        yield "the clip takes the larger gain, not the smaller", partial(_policy_loss, smaller=False), right
        yield "the ratio is taken as 1", _cross_entropy, right
        free = replace(rule, low=0.0, high=np.inf)
        yield "the ratio is not clipped", loss, replace(right, surrogate=free)
        yield "the dual clip is missing", loss, replace(right, surrogate=replace(rule, dual=None))
    if name == "reference_kl":
        episodes = [episode for group in twin.groups for episode in group]
        other: KLEstimator = "k3" if right.surrogate.kl == "k2" else "k2"
        at_one, *_ = plain_figures(twin.reference, None, episodes, 1.0)
        sampler = replace(right, reference=right.sampler)
        yield "it is computed to the sampler, not to the reference", loss, sampler
        yield "the reference's log-probs are at temperature 1", loss, replace(right, reference=at_one)
        yield f"its estimator is {other}", loss, replace(right, surrogate=replace(right.surrogate, kl=other))


def _loss_inputs(twin: Twin, weighted: Sequence[WeightedGroup], name: str) -> _Tokens:
    spec, group = twin.spec, weighted[0]
    episodes = [episode for group in weighted for episode in group.episodes]
    masks = [episode.loss_mask for episode in episodes]

    def learned(arrays: Sequence[np.ndarray]) -> Tensor:
        parts = [array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    targets = [group.value for group in weighted if group.value is not None]
    components = [group.components[name] for group in weighted if name in group.components]
    denominator = sum(sum(component.counts) for component in components)
    weights = learned([array for component in components for array in component.weights]) / denominator
    none = torch.zeros_like(weights)
    return _Tokens(
        weights=weights,
        sampler=learned([episode.logprobs for episode in episodes]),
        reference=plain_figures(twin.reference, None, episodes, spec.temperature)[0],
        returns=learned([a for target in targets for a in target.returns]) if targets else none,
        old_values=learned([a for target in targets for a in target.values]) if targets else none,
        episode_of=torch.arange(len(masks)).repeat_interleave(torch.tensor([int(m.sum()) for m in masks])),
        surrogate=_configure_surrogate(spec.algorithm, replace(group.surrogate, kl=spec.kl_estimator)),
        value_clip=targets[0].clip if targets else 0.0,
    )


def _configure_surrogate(algorithm: Algorithm, surrogate: Surrogate) -> Surrogate:
    """Return the surrogate with the clip bounds that the algorithm's options state."""
    options = algorithm.model_dump()
    if "ratio_max" in options:
        return replace(surrogate, low=options["ratio_min"], high=options["ratio_max"], clip="weight")
    if "clip_high" in options:
        low, high = 1 - options["clip_low"], 1 + options["clip_high"]
        return replace(surrogate, low=low, high=high, dual=options.get("dual_clip"), clip="gain")
    return surrogate
