"""The memory of a stage: the plan before it starts, the engine's share of it, and the peak that was used."""

from __future__ import annotations

import resource
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from perilune.bundle.job import Job
from perilune.environments.core.episode_settings import episode_settings
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.memory import (
    BLOCK,
    MemoryPlan,
    MemorySavings,
    adapter_parameters,
    blocks_bytes,
    cache_bytes,
    plan_memory,
)
from perilune.rollout.limits import episode_tokens

if TYPE_CHECKING:
    import torch

    from perilune.engine.engine import Engine
    from perilune.learn.training_settings import LearnerSettings
    from perilune.models.decoder import Decoder

LEAST_BUDGET = 64  # tokens; with fewer, a step is mostly overhead
SLOTS = 256  # most samples in flight
CACHE_BYTES = {"cpu": 4 << 30, "cuda": 32 << 30}  # room for their keys and values
PROMPT_TOKENS = 256  # assumed of a prompt: tasks are not looked at before the work starts


def model_config(job: Job) -> DecoderConfig:
    """Shape of the recipe's model, which every checkpoint of the recipe shares; no weights are read.

    Raises:
        RequestError: when its config.json is missing, malformed or not implemented.
    """
    if job.model.get("preset"):
        return PRESETS[job.model["preset"]]
    file = Path(job.model["path"]) / "config.json"
    return DecoderConfig.from_hf(read_json(file), where=str(file))


def planned_tokens(section: Mapping[str, Any], max_tokens: int, config: DecoderConfig | None) -> int:
    """`episode_tokens` for the environment of a recipe, as far as the model, if known, has positions."""
    found = episode_tokens(make_environment(section), episode_settings(section), max_tokens)
    if config is None or found <= max_tokens:
        return found
    return max(max_tokens, min(found, config.max_position_embeddings - 1))


def slots_for(config: DecoderConfig, max_tokens: int, device: str) -> int:
    """How many samples the engine may have in flight on a device of that type ("auto" counts as "cpu").

    A constant of the recipe, not of the memory that happens to be free, so that a run can be repeated.
    """
    room = CACHE_BYTES["cuda" if device == "cuda" else "cpu"]
    length = _length(config, max_tokens)
    fitting = bisect_right(range(1, SLOTS + 1), room, key=lambda slots: cache_bytes(config, slots, length))
    return max(1, fitting)


@dataclass(frozen=True, slots=True)
class StageMemory(MemoryPlan):
    """The memory of a stage.

    Attributes:
        token_budget: of the stage; 0 where it does not learn.
        replan: the plan with another token budget.
    """

    token_budget: int
    replan: Callable[[int], MemoryPlan]

    def fitting(self, available: int) -> str:
        """The largest token budget that fits into so many bytes, or else what takes less memory."""
        less = range(LEAST_BUDGET, self.token_budget)
        fits = bisect_right(less, available, key=lambda budget: self.replan(budget).total)
        if fits:
            return f"lower token_budget to {less[fits - 1]}"
        return "train an adapter (lora: {}), set activation_checkpointing: true, or use a smaller model"


class EngineRoom(TypedDict):
    """What the engine is given: most samples in flight, and tokens of all of them together in its cache."""

    slots: int
    cache_tokens: int


def engine_room(config: DecoderConfig, max_tokens: int, device: str) -> EngineRoom:
    """Room for `slots_for` samples of the length that is planned, and for one of the longest in any case.

    A prompt that is longer than planned leaves less for others.
    """
    slots = slots_for(config, max_tokens, device)
    planned = slots * -(-_length(config, max_tokens) // BLOCK) * BLOCK
    room = CACHE_BYTES["cuda" if device == "cuda" else "cpu"]
    counts = range(1, 1 - (-config.max_position_embeddings // BLOCK))
    one = BLOCK * bisect_right(counts, room, key=lambda count: blocks_bytes(config, 1 + count, slots))
    return EngineRoom(slots=slots, cache_tokens=max(planned, min(config.max_position_embeddings, one)))


def make_engine(decoder: Decoder, max_tokens: int) -> Engine:
    """An engine for episodes of at most `max_tokens` after the prompt, on the decoder's device."""
    from perilune.engine.engine import Engine

    device = next(decoder.parameters()).device
    return Engine(decoder, **engine_room(decoder.config, max_tokens, device.type))


def stage_memory(
    config: DecoderConfig,
    *,
    samples: int = 0,
    max_tokens: int = 0,
    token_budget: int = 0,
    reference: bool = False,
    learner: LearnerSettings | None = None,
    device: str = "cpu",
) -> StageMemory:
    """Memory of a stage that samples `samples` answers, learns from `token_budget` tokens at once, or both.

    A trace or an answer with its prompt is taken to be as long as the model allows, but at most
    `PROMPT_TOKENS` longer than `max_tokens`.

    Raises:
        RequestError: when the answers leave no room for a prompt.
    """
    require_room(config, max_tokens)
    length = _length(config, max_tokens)
    slots = min(samples, slots_for(config, max_tokens, device))

    def planned(budget: int) -> MemoryPlan:
        return plan_memory(
            config,
            sampling=(slots, length) if samples else None,
            learning=(budget, min(length, budget)) if budget else None,
            reference=reference,
            savings=_savings(config, learner),
        )

    found = planned(token_budget)
    return StageMemory(found.persistent, found.transient, token_budget, planned)


def sampling_memory(job: Job, max_tokens: int, samples: int) -> StageMemory:
    """Memory of a stage that samples `samples` answers in the recipe's environment."""
    config = model_config(job)
    longest = planned_tokens(job.environment, max_tokens, config)
    return stage_memory(config, samples=samples, max_tokens=longest, device=job.resources.device)


def _savings(config: DecoderConfig, learner: LearnerSettings | None) -> MemorySavings:
    if learner is None:
        return MemorySavings()
    lora = learner.lora
    adapter = None if lora is None else adapter_parameters(config, lora.rank, lora.targets)
    base = "float32" if lora is None else lora.base
    return MemorySavings(adapter, base, learner.activation_checkpointing)


def _length(config: DecoderConfig, max_tokens: int) -> int:
    return min(PROMPT_TOKENS + max_tokens, config.max_position_embeddings)


def require_room(config: DecoderConfig, max_tokens: int) -> None:
    """Refuse answers that leave no room for a prompt.

    Raises:
        RequestError: naming the key.
    """
    if max_tokens >= config.max_position_embeddings:
        raise RequestError(
            f"max_tokens is {max_tokens}, and the model has {config.max_position_embeddings} positions for"
            " prompt and answer together",
            where="max_tokens",
            remedy="lower max_tokens",
        )


def memory_figures(plan: MemoryPlan, device: torch.device) -> dict[str, int]:
    """What was planned, and the most that was held so far: resident memory, or the GPU's own.

    The second depends on the machine and the moment; comparisons leave it out.
    """
    if device.type == "cuda":
        import torch

        on_device = plan.total - plan.persistent["process"]
        return {"planned_bytes": on_device, "peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"planned_bytes": plan.total, "peak_bytes": peak_resident()}


def peak_resident() -> int:
    """Largest resident size of this process so far, in bytes."""
    if sys.platform == "linux":  # where getrusage also counts what the process was before it called exec
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
