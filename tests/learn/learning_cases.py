"""Small episodes and models that the tests of learning share."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from perilune.data.episode import Episode
from perilune.learn.weights import GroupWeights
from perilune.models.attention import PackedAttention
from perilune.models.config import PRESETS
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
    """Log-probs [T] of one episode alone, its whole sequence fed: no packing, no shared prompt."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
    attention = PackedAttention(torch.tensor([0, len(ids)]))
    logits = decoder.logits(decoder(ids, torch.arange(len(ids)), attention))
    return F.log_softmax(logits, -1)[len(one.prompt_ids) - 1 : -1].gather(
        1, torch.from_numpy(one.token_ids.astype(np.int64))[:, None]
    )[:, 0]


def plain_loss(
    decoder: Decoder,
    groups: Sequence[GroupWeights],
    *,
    reference: Decoder | None = None,
) -> torch.Tensor:
    """The loss of weighted groups by definition, one episode and one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for name in ("policy_gradient", "cross_entropy", "reference_kl"):
        components = [getattr(group, name) for group in groups]
        denominator = sum(c.denominator for c in components if c is not None)
        for group, component in zip(groups, components, strict=True):
            if component is None:
                continue
            for one, weights in zip(group.episodes, component.weights, strict=True):
                if not weights.any():
                    continue
                logprobs = plain_logprobs(decoder, one)
                for t, weight in enumerate(weights.tolist()):
                    lp = logprobs[t]
                    if name == "policy_gradient":
                        ratio = torch.exp(lp - float(one.logprobs[t]))
                        loss = -torch.min(
                            ratio * weight, ratio.clamp(group.surrogate.low, group.surrogate.high) * weight
                        )
                    elif name == "cross_entropy":
                        loss = -lp * weight
                    else:
                        x = lp - plain_logprobs(reference, one)[t].detach()
                        loss = weight * (torch.exp(-x) - 1 + x)
                    total = total + loss / denominator
    return total
