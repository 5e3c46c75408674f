"""The model of the preflight: a scaled-down copy (twin) of a run's policy, with a batch of answers."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.data.episode import Episode, unsampled_tokens
from perilune.learn.adaptation import adapt
from perilune.learn.algorithms import StepContext
from perilune.learn.critic import Critic
from perilune.learn.kl_reward import weight_groups
from perilune.learn.signals import SignalModels, compute_signals
from perilune.learn.trainer import CRITIC_PREFIX, Learner
from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.lora import A, B
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.routing import Routing
from perilune.rollout.groups import Groups
from perilune.tasks.rl.spec import RLSpec

_VOCABULARY, _HIDDEN, _EXPERT, _RANK = 32, 32, 16, 4
_LENGTHS = (5, 2, 4, 1)  # lengths of answers in tokens
# The learner's log-probs minus the sampler's, in nats: ratios from 0.5 to 4.5, inside and outside the clips.
_DRIFT = np.array([0.0, 0.08, -0.08, 0.6, -0.6, 1.5])


class Twin:
    """Policy, reference and critic with the run's family, depth, adapter and algorithm.

    Width, vocabulary and rank are small, and products are float32.

    Attributes:
        trained: names of the parameters that must be trained.
        exact, exact_critic: the same policy and critic in float64, without kernels and without a gradient.
        groups: two groups of answers of a sampler that has drifted from the policy.
    """

    def __init__(self, spec: RLSpec, config: DecoderConfig, device: torch.device) -> None:
        self.spec, self.device = spec, device
        small = _scaled_down(config)
        lora = spec.lora and spec.lora.model_copy(
            update={"rank": min(spec.lora.rank, _RANK), "base": "float32"}
        )
        settings = spec.model_copy(update={"lora": lora, "precision": "float32"})
        with torch.random.fork_rng(devices=[]):
            policy, self.reference = Decoder(small), Decoder(small)
            policy.initialize(0)
            self.reference.initialize(1)
            adapt(policy, settings, 0)
            random = torch.Generator().manual_seed(0)
            critic = Critic(small.hidden_size) if "values" in spec.algorithm.needs else None
            fresh = [p for name, p in policy.named_parameters() if B in name.split(".")]
            for parameter in [*fresh, *(critic.parameters() if critic else ())]:  # as after some updates
                parameter.data.normal_(std=0.2, generator=random)
        self.exact, self.exact_critic = copy.deepcopy(policy).double(), copy.deepcopy(critic)
        self.exact.requires_grad_(False)
        if self.exact_critic is not None:
            self.exact_critic.double().requires_grad_(False)
        self.critic = None if critic is None else critic.to(device)
        self.reference.to(device)
        self.trained = [
            name for name, _ in policy.named_parameters() if not lora or {A, B}.intersection(name.split("."))
        ] + [CRITIC_PREFIX + name for name, _ in (critic.named_parameters() if critic else ())]
        self.learner = Learner(policy.to(device), settings, critic=self.critic)
        self.groups = self._make_groups()

    def weight_groups(self, groups: Groups) -> list[WeightedGroup]:
        """Return the token weights that the run's algorithm gives to the groups at the first step."""
        spec = self.spec
        names = set(spec.algorithm.needs)
        if spec.kl and spec.kl_estimator == "k1_reward":
            names.add("reference_logprobs")
        models = SignalModels(self.learner.decoder, self.reference, self.critic)
        signals = compute_signals(
            names, groups, models, token_budget=spec.token_budget, temperature=spec.temperature
        )
        context = StepContext(max(_LENGTHS), spec.kl, spec.kl_estimator, 0, signals)
        return weight_groups(spec.algorithm, groups, context)

    def _make_groups(self) -> Groups:
        """Return two groups; the first answer of each is the right one."""
        random = np.random.default_rng(0)
        samples = max(len(_LENGTHS), self.spec.algorithm.least_samples + 1)
        reward = float(getattr(self.spec.algorithm, "passes_at", 1.0))
        prompts = [random.integers(_VOCABULARY, size=size).astype(np.int32) for size in (2, 3)]
        episodes = [
            _make_episode(f"0/{group}/{sample}", prompt, reward * (sample == 0), random)
            for group, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        current, *_ = plain_figures(self.learner.decoder, None, episodes, self.spec.temperature)
        drifted = current.numpy() - random.choice(_DRIFT, size=len(current))
        drifted = np.split(drifted, np.cumsum([episode.sampled for episode in episodes])[:-1])
        for episode, logprobs in zip(episodes, drifted, strict=True):
            episode.logprobs[episode.loss_mask] = logprobs
        return [tuple(episodes[:samples]), tuple(episodes[samples:])]


def _make_episode(name: str, prompt: np.ndarray, reward: float, random: np.random.Generator) -> Episode:
    length = _LENGTHS[int(name.rpartition("/")[2]) % len(_LENGTHS)]
    mask = np.ones(length, np.bool_)
    mask[1:-1:2] = False  # observed tokens
    return Episode(
        episode_id=name,
        group_id=name.rpartition("/")[0],
        task_id=name.rpartition("/")[0],
        environment="preflight",
        seed=0,
        messages=(),
        prompt_ids=prompt,
        reward=reward,
        **unsampled_tokens(random.integers(_VOCABULARY, size=length).tolist()) | {"loss_mask": mask},
    )


def _scaled_down(config: DecoderConfig) -> DecoderConfig:
    experts = config.experts and replace(
        config.experts,
        count=min(config.experts.count, 4),
        per_token=min(config.experts.per_token, 2),
        intermediate_size=_EXPERT,
        shared_size=_EXPERT if config.experts.shared_size else 0,
        groups=1,
        groups_per_token=1,
    )
    heads = min(config.num_heads, 2)
    return config.replace(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_EXPERT if experts and config.family.shares_expert_width else _HIDDEN,
        num_heads=heads,
        num_kv_heads=heads if config.latent else 1,
        experts=experts,
        delta=config.delta and replace(config.delta, key_heads=1, heads=2, key_size=8, value_size=8),
        initializer_range=_HIDDEN**-0.5,
    )


class Figures(NamedTuple):
    """Figures of the trained tokens, float64[M] each."""

    logprobs: Tensor
    values: Tensor
    entropies: Tensor


class FirstRoutes:
    """Routes of the first forward pass of a mixture of experts, which later passes repeat.

    Otherwise a small change of weights could change a route. The log-probs jump there and have no derivative.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def forced_experts(self, layer: int, rows: int) -> Tensor | None:
        return self._chosen.get(layer)

    def observe(self, layer: int, logits: Tensor, own: Tensor, chosen: Tensor) -> None:
        self._chosen.setdefault(layer, chosen)


@torch.no_grad()
def plain_figures(
    decoder: Decoder,
    critic: Critic | None,
    episodes: Sequence[Episode],
    temperature: float,
    routing: Routing | None = None,
) -> Figures:
    """Return log-probs of the trained tokens of all episodes, and values and entropies before them.

    A plain computation: every sequence has its own prompt, and there are no micro-batches.
    """
    device = next(decoder.parameters()).device
    sequences = [
        np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64) for episode in episodes
    ]
    ends = np.cumsum([0, *map(len, sequences)])
    learned = [
        start + len(episode.prompt_ids) + np.flatnonzero(episode.loss_mask)
        for start, episode in zip(ends[:-1].tolist(), episodes, strict=True)
    ]
    tokens = torch.from_numpy(np.concatenate(sequences)).to(device)
    positions = torch.from_numpy(np.concatenate([np.arange(len(ids)) for ids in sequences])).to(device)
    rows = torch.from_numpy(np.concatenate(learned)).to(device)
    attention = PackedAttention(torch.from_numpy(ends).to(device))
    states = decoder(tokens, positions, attention, routing)[rows - 1]
    logprobs = (decoder.logits(states).double() / temperature).log_softmax(-1)
    values = torch.zeros(len(rows), dtype=torch.float64)
    if critic is not None:
        values = (states.double() @ critic.head.weight.double().T + critic.head.bias.double())[:, 0].cpu()
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return Figures(logprobs.gather(1, tokens[rows, None])[:, 0].cpu(), values, entropies.cpu())
