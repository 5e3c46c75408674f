"""A canary: before a long run, its algorithm must solve a bandit with the very code that the run will use.

A tiny decoder pulls one of a few arms, of which one is rewarded; engine, algorithm, packing, losses and
optimizer are the run's own. Two things are asked: the first gradient is the one that can be written down by
hand, and the rewarded arm becomes likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import WorkFailedError
from perilune.learn.algorithms import StepContext
from perilune.learn.batch import pack
from perilune.learn.checks import DEFECT
from perilune.learn.critic import Critic
from perilune.learn.signals import observe
from perilune.learn.trainer import Learner
from perilune.learn.weights import GroupWeights
from perilune.models.attention import PackedAttention
from perilune.models.config import PRESETS
from perilune.models.decoder import Decoder
from perilune.tasks.policy_update import update_policy
from perilune.tasks.rollouts import Groups
from perilune.watchdog import Waiting

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.tasks.rl import RLSpec

LONG = 20  # steps from which a run is worth a canary
STEPS = 40  # that it may take
SOLVED = 0.4  # probability of the rewarded arm, which begins at about 0.1
_KL = 0.05  # at most: a strong one rightly holds the policy where it was
_TOLERANCE = 1e-2  # of the gradient, relative to its norm
_ARMS = range(2, 10)
_REWARDED = 5
_PROMPT = (1, 0)


def send_canary(workspace: Workspace, spec: RLSpec, device: torch.device, first: int) -> None:
    """Have the bandit solved before a long run whose first step is `first`; one that goes on had it solved.

    Raises:
        WorkFailedError: as `solve_bandit`.
    """
    if first == 0 and spec.steps >= LONG and workspace.leads:
        with Waiting("canary"):
            workspace.log(solve_bandit(spec, device))


def solve_bandit(spec: RLSpec, device: torch.device) -> str:
    """Learn the bandit under a run's settings; say how it went. Random numbers of the run are left alone.

    Its sizes and learning rate are its own; algorithm, temperature, corrections, KL, optimizer and updates a
    step are the run's.

    Raises:
        WorkFailedError: when the gradient is not that of the weights, or the arm is not found.
    """
    own = spec.model_copy(
        update={
            "prompts": 4, "samples": max(8, spec.algorithm.least_samples), "max_tokens": 2, "steps": STEPS,
            "lr": 0.01, "warmup": 0, "final_lr": 1.0, "token_budget": 4, "kl": min(spec.kl, _KL),
        }
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, wherever they go
        policy, reference = _decoder(device), _decoder(device)
        critic = Critic(policy.config.hidden_size).to(device) if "values" in spec.algorithm.needs else None
    learner = Learner(policy, own, critic=critic)
    engine = Engine(policy, slots=64, cache_tokens=2048)
    first = chance = _chance(policy, spec.temperature)
    checked = critic is not None  # whose loss has a gradient of its own
    for step in range(STEPS):
        engine.update_weights(None, learner.version)
        groups = _pull(engine, own, step)
        checked = checked or _check_gradient(own, learner, groups, reference)
        uses_reference = spec.kl > 0 or "deviation" in spec.algorithm.needs
        update_policy(own, learner, groups, step, reference if uses_reference else None)
        chance = _chance(policy, spec.temperature)
        if checked and chance > SOLVED:
            return f"canary: {spec.algorithm.name} solved a bandit in {step + 1} steps"
    raise WorkFailedError(
        f"{spec.algorithm.name} does not learn: in {STEPS} steps on a bandit of {len(_ARMS)} arms the"
        f" rewarded one went from probability {first:.3f} to {chance:.3f}",
        where="canary",
        remedy="see what the run's algorithm, off_policy and optimizer settings leave to learn from; with"
        " the defaults " + DEFECT,
    )


def _decoder(device: torch.device) -> Decoder:
    config = PRESETS["tiny"].replace(
        vocab_size=len(_ARMS) + 2, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
        head_dim=8, initializer_range=0.05,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(0)
    return decoder.to(device)


def _pull(engine: Engine, spec: RLSpec, step: int) -> Groups:
    """Groups of answers; every arm is a token that ends its answer."""
    params = SamplingParams(spec.max_tokens, spec.temperature, tuple(_ARMS))
    worth = float(getattr(spec.algorithm, "passes_at", 1.0))
    prompts = [Prompt([*_PROMPT], (0, step, index)) for index in range(spec.prompts)]
    return [
        tuple(_episode(one, f"{step}/{index}/{sample}", worth) for sample, one in enumerate(group))
        for index, group in enumerate(engine.sample(prompts, spec.samples, params))
    ]


def _episode(one: Completion, name: str, worth: float) -> Episode:
    return Episode(
        episode_id=name,
        group_id=name.rpartition("/")[0],
        task_id="canary",
        environment="canary",
        seed=0,
        messages=(),
        prompt_ids=np.array(_PROMPT, np.int32),
        token_ids=one.token_ids,
        loss_mask=np.ones(len(one.token_ids), np.bool_),
        logprobs=one.logprobs,
        policy_version=one.policy_version,
        finish_reason="stop",
        reward=worth * (one.token_ids[-1] == _REWARDED),
    )


@torch.no_grad()
def _chance(decoder: Decoder, temperature: float) -> float:
    """Probability that the first token is the rewarded arm."""
    return float(_logits(decoder, _PROMPT, temperature)[-1].softmax(-1)[_REWARDED])


def _logits(decoder: Decoder, ids: Sequence[int], temperature: float) -> Tensor:
    """float32[T, V] of one sequence by itself."""
    device = next(decoder.parameters()).device
    tokens = torch.tensor(ids, device=device)
    bounds = torch.tensor([0, len(tokens)], device=device)
    states = decoder(tokens, torch.arange(len(tokens), device=device), PackedAttention(bounds))
    return decoder.logits(states).float() / temperature


def _check_gradient(spec: RLSpec, learner: Learner, groups: Groups, reference: Decoder) -> bool:
    """Compare the learner's gradient, over several micro-batches, with one written out.

    Of the policy that sampled all ratios are 1, so that under every surrogate the gradient is -sum of weight
    * gradient of log-prob / denominator.

    Returns:
        whether there was enough to compare.

    Raises:
        WorkFailedError: when they differ.
    """
    decoder = learner.decoder
    signals = observe(
        spec.algorithm.needs, groups, decoder, token_budget=spec.token_budget,
        temperature=spec.temperature, reference=reference,
    )  # fmt: skip
    weighed = spec.algorithm.weigh(groups, StepContext(spec.max_tokens, 0.0, spec.kl_estimator, 0, signals))
    batches = pack(weighed, spec.token_budget, temperature=spec.temperature)
    if len(batches) < 2:
        return False
    parameters = dict(decoder.named_parameters())
    right = torch.autograd.grad(
        _plain_loss(decoder, weighed, spec.temperature), list(parameters.values()), allow_unused=True
    )
    learner.forward_backward(batches)
    pairs = [
        (theirs, torch.zeros_like(theirs) if one.grad is None else one.grad)
        for one, theirs in zip(parameters.values(), right, strict=True)
        if theirs is not None
    ]
    for parameter in parameters.values():
        parameter.grad = None
    size = _norm([theirs for theirs, _ in pairs])
    found = _norm([mine for _, mine in pairs])
    if _norm([mine - theirs for theirs, mine in pairs]) > _TOLERANCE * size:
        raise WorkFailedError(
            f"the gradient is not that of the weights: its norm is {found:.4g}, and by hand {size:.4g}"
            f" ({found / max(size, 1e-30):.3g} times: scaled twice, or not at all, over the micro-batches?)",
            where="canary",
            remedy=DEFECT,
        )
    return True


def _plain_loss(decoder: Decoder, groups: Sequence[GroupWeights], temperature: float) -> Tensor:
    """-sum of weight * log-prob / denominator, one episode at a time."""
    parts = [one.policy_gradient for one in groups]
    denominator = sum(part.denominator for part in parts if part is not None)
    terms = []
    for group, part in zip(groups, parts, strict=True):
        for episode, weights in zip(group.episodes, part.weights if part else (), strict=bool(part)):
            ids = [*episode.prompt_ids.tolist(), *episode.token_ids.tolist()]
            logits = _logits(decoder, ids, temperature)[len(episode.prompt_ids) - 1 : -1]
            targets = torch.tensor(ids[len(episode.prompt_ids) :], device=logits.device)[:, None]
            logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0]
            terms.append((torch.from_numpy(weights).to(logits.device) * logprobs).sum())
    return -torch.stack(terms).sum() / denominator


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in tensors])))
