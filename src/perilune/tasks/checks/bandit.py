"""A bandit that a run's algorithm must learn before the run, with the same code as the run.

A tiny decoder chooses one of a few arms. One arm is rewarded, and must become likely.
"""

import numpy as np
import torch

from perilune.data.episode import Episode, sampled_tokens
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.critic import Critic
from perilune.learn.trainer import Learner
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.rollout.groups import Groups
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.update import PolicyUpdater
from perilune.tasks.stage.publishing import plain_scores

MAX_STEPS = 40  # most training steps
SOLVED_PROBABILITY = 0.4  # of the rewarded arm, above which the bandit counts as solved; about 0.1 at first
_MAX_KL = 0.05  # largest KL coefficient: a larger one would keep the policy from changing
_ARMS = range(2, 10)
_REWARDED = 5
_PROMPT = (1, 0)


def solve_bandit(spec: RLSpec, device: torch.device) -> str:
    """Train on the bandit with a run's settings, and return the result as a sentence.

    The bandit has its own sizes and learning rate, and limits the KL. Algorithm, temperature, off-policy
    corrections, optimizer and the number of updates are those of the run. The run's random numbers are not
    affected.

    Raises:
        WorkFailedError: when the rewarded arm does not become likely.
    """
    sizes = {
        "prompts": 4,
        "samples": max(8, spec.algorithm.least_samples),
        "max_tokens": 2,
        "steps": MAX_STEPS,
    }
    schedule = {"lr": 0.01, "warmup": 0, "final_lr": 1.0}
    own = spec.model_copy(
        update={**sizes, **schedule, "token_budget": 4, "kl": min(spec.kl, _MAX_KL), "curriculum": None}
    )
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU for every device
        policy, reference = _decoder(device), _decoder(device)
        critic = Critic(policy.config.hidden_size).to(device) if "values" in spec.algorithm.needs else None
    learner = Learner(policy, own, critic=critic, critic_lr=getattr(own.algorithm, "critic_lr", None))
    engine = Engine(policy, slots=64, cache_tokens=2048)
    updater = PolicyUpdater(own, learner, reference if spec.uses_reference else None)
    first = probability = _probability(policy, spec.temperature)
    for step in range(MAX_STEPS):
        engine.update_weights(None, learner.version)
        updater.update(_sample(engine, own, step), step)
        probability = _probability(policy, spec.temperature)
        if probability > SOLVED_PROBABILITY:
            return f"preflight: {spec.algorithm.name} solved a bandit in {step + 1} steps"
    raise WorkFailedError(
        f"{spec.algorithm.name} does not learn: in {MAX_STEPS} steps on a bandit of {len(_ARMS)} arms the"
        f" rewarded one went from probability {first:.3f} to {probability:.3f}",
        where="preflight",
        remedy="check the algorithm, off_policy and optimizer settings. If they are the defaults, "
        + REPORT_BUG,
    )


def _decoder(device: torch.device) -> Decoder:
    config = PRESETS["tiny"].replace(
        vocab_size=len(_ARMS) + 2,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        head_dim=8,
        initializer_range=0.05,
    )
    decoder = Decoder(config)
    decoder.initialize(0)
    return decoder.to(device)


def _sample(engine: Engine, spec: RLSpec, step: int) -> Groups:
    """Return the groups of answers. Every arm is a token that ends the answer."""
    params = SamplingParams(spec.max_tokens, spec.temperature, tuple(_ARMS))
    reward = float(getattr(spec.algorithm, "passes_at", 1.0))
    prompts = [Prompt([*_PROMPT], (0, step, index)) for index in range(spec.prompts)]
    return [
        tuple(_episode(answer, f"{step}/{index}/{sample}", reward) for sample, answer in enumerate(group))
        for index, group in enumerate(engine.sample(prompts, spec.samples, params))
    ]


def _episode(answer: Completion, name: str, reward: float) -> Episode:
    return Episode(
        episode_id=name,
        group_id=name.rpartition("/")[0],
        task_id="bandit",
        environment="bandit",
        seed=0,
        messages=(),
        prompt_ids=np.array(_PROMPT, np.int32),
        reward=reward * (answer.token_ids[-1] == _REWARDED),
        **sampled_tokens(answer),
    )


def _probability(decoder: Decoder, temperature: float) -> float:
    """Return the probability that the first token is the rewarded arm."""
    _, (distribution,) = plain_scores(decoder, np.array([*_PROMPT, 0]), 1, temperature, whole=1)
    return float(distribution[_REWARDED].exp())
