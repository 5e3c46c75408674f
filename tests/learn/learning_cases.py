"""Small episodes, models and reference implementations for the tests in this directory."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from perilune.data.episode import Episode
from perilune.learn.algorithms import StepContext, algorithm
from perilune.learn.critic import Critic
from perilune.learn.weights import KLEstimator, WeightedGroup
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder

VOCABULARY = 23


def small_decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    config = PRESETS["tiny"].replace(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_layers=2, head_dim=8,
        initializer_range=0.3,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(seed)
    return decoder.to(dtype)


def episode(
    reward: float | None = 0.0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    tokens: Sequence[int] = (4, 5),
    mask: Sequence[bool] | None = None,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    failure: str = "",
    name: str = "0/0/0",
    truncated: bool = False,
) -> Episode:
    length = len(tokens)
    return Episode(
        episode_id=name,
        group_id=name.rpartition("/")[0],
        task_id="task-7",
        environment="test",
        seed=0,
        messages=(),
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.ones(length, np.bool_) if mask is None else np.array(mask, np.bool_),
        logprobs=np.full(length, -2.0, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        policy_version=np.full(length, version, np.int32),
        finish_reason="length" if truncated else "stop",
        reward=None if failure else reward,
        failure=failure,
    )


def random_groups(seed: int, groups: int = 4, size: int = 3, longest: int = 7) -> list[list[Episode]]:
    """Groups with random prompts, lengths (1 upwards), masks, rewards and sampler log-probs."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6))
        members = []
        for i in range(size):
            length = int(rng.integers(1, longest + 1))
            mask = rng.random(length) < 0.8
            mask[0] = True
            members.append(
                episode(
                    float(rng.integers(0, 2)) + 0.1 * i,
                    prompt=prompt,
                    tokens=rng.integers(0, VOCABULARY, length),
                    mask=mask,
                    logprobs=rng.normal(-3, 0.5, length),
                    name=f"0/{g}/{i}",
                )
            )
        made.append(members)
    return made


def plain_logprobs(decoder: Decoder, one: Episode) -> torch.Tensor:
    """Log-probs [T] of one episode, from a forward pass over its whole sequence without packing."""
    return plain_logprobs_and_values(decoder, one, None)[0]


def plain_logprobs_and_values(
    decoder: Decoder, one: Episode, critic: Critic | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [T] of one episode, and values [T] of the states before each token."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
    states = decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    states = states[len(one.prompt_ids) - 1 : -1]
    logits = decoder.logits(states)
    logprobs = F.log_softmax(logits, -1).gather(1, torch.from_numpy(one.token_ids.astype(np.int64))[:, None])
    values = None if critic is None else states.float() @ critic.head.weight[0] + critic.head.bias
    return logprobs[:, 0], values


def plain_entropies(decoder: Decoder, one: Episode) -> torch.Tensor:
    """Entropies [T] of the distributions from which an episode's tokens were sampled."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
    states = decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    return torch.distributions.Categorical(
        logits=decoder.logits(states[len(one.prompt_ids) - 1 : -1])
    ).entropy()


def signals_for(groups: Sequence[Sequence[Episode]], seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Random values for every signal of every episode."""
    rng = np.random.default_rng(seed)
    names = ("values", "deviation", "uncertainty")
    return {
        name: {e.episode_id: rng.random(len(e.token_ids)).astype(np.float32) for g in groups for e in g}
        for name in names
    }


def weighted_groups(
    name: str,
    groups: Sequence[Sequence[Episode]],
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    **options,
) -> list[WeightedGroup]:
    context = StepContext(max_tokens=8, kl=kl, kl_estimator=kl_estimator, signals=signals_for(groups))
    return algorithm(name, **options).weight_groups(groups, context)


def small_critic(decoder: Decoder) -> Critic:
    """A critic with a random head; a new critic predicts zero."""
    critic = Critic(decoder.config.hidden_size)
    torch.manual_seed(5)
    torch.nn.init.normal_(critic.head.weight, std=0.3)
    return critic


def plain_loss(
    decoder: Decoder,
    groups: Sequence[WeightedGroup],
    *,
    reference: Decoder | None = None,
    critic: Critic | None = None,
) -> torch.Tensor:
    """The loss of weighted groups from its definition, one episode and one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for name in ("policy_gradient", "cross_entropy", "reference_kl", "entropy", "value"):
        parts = [getattr(group, name) for group in groups]
        components = [part.component if name == "value" and part else part for part in parts]
        denominator = sum(c.denominator for c in components if c is not None)
        for group, component in zip(groups, components, strict=True):
            if component is None:
                continue
            for index, (answer, weights) in enumerate(zip(group.episodes, component.weights, strict=True)):
                if not weights.any():
                    continue
                logprobs, values = plain_logprobs_and_values(decoder, answer, critic)
                with torch.no_grad():
                    theirs = None if reference is None else plain_logprobs(reference, answer)
                old = torch.from_numpy(answer.logprobs).double()
                ratios = torch.exp(logprobs - old)
                if group.surrogate.ratio == "sequence":  # sg[s] * pi / sg[pi], s the geometric mean
                    mean = (logprobs - old)[torch.from_numpy(answer.loss_mask)].mean().detach().exp()
                    ratios = mean * torch.exp(logprobs - logprobs.detach())
                if (
                    group.surrogate.ratio == "sequence-product"
                ):  # of the answer: each token gets an equal share of the gradient
                    whole = torch.exp((logprobs - old)[torch.from_numpy(answer.loss_mask)].sum())
                    ratios = (whole / answer.loss_mask.sum()).expand(len(logprobs))
                    ratios = ratios + (whole - whole / answer.loss_mask.sum()).detach()
                for t, weight in enumerate(weights.tolist()):
                    lp, ratio = logprobs[t], ratios[t]
                    bounded = ratio.clamp(group.surrogate.low, group.surrogate.high)
                    if name == "policy_gradient" and group.surrogate.clip == "weight":
                        loss = -bounded.detach() * weight * lp
                    elif name == "policy_gradient":
                        loss = -torch.min(ratio * weight, bounded * weight)
                    elif name == "cross_entropy":
                        loss = -lp * weight
                    elif name == "reference_kl":
                        x = lp - theirs[t]
                        loss = weight * (x * x / 2 if group.surrogate.kl == "k2" else torch.exp(-x) - 1 + x)
                        if group.surrogate.kl == "k3_corrected":
                            loss = loss * torch.exp(lp - old[t])
                    elif name == "entropy":
                        loss = -weight * plain_entropies(decoder, answer)[t]
                    else:
                        predicted = values[t]
                        before, target = (
                            float(of[index][t]) for of in (group.value.values, group.value.returns)
                        )
                        near = torch.clamp(predicted, before - group.value.clip, before + group.value.clip)
                        loss = weight * 0.5 * torch.max((predicted - target) ** 2, (near - target) ** 2)
                    total = total + loss / denominator
    return total
