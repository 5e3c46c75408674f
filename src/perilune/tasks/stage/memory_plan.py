"""The memory plan of a stage, the size of its engine, and its peak memory use."""

from __future__ import annotations

import resource
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    base_bytes,
    blocks_bytes,
    cache_bytes,
    get_model_card,
    plan_memory,
)
from perilune.rollout.limits import max_episode_tokens

if TYPE_CHECKING:
    import torch

    from perilune.engine.engine import Engine
    from perilune.engine.openvino_runner import OpenVino
    from perilune.learn.training_settings import LearnerSettings
    from perilune.models.decoder import Decoder
    from perilune.models.narrow import Precision
    from perilune.models.text.tokenizer import Tokenizer

BYTE_VOCABULARY_SIZE = 258  # vocabulary size of `Tokenizer.byte_level`
MIN_TOKEN_BUDGET = 64  # tokens; a step with fewer is mostly overhead
MAX_SLOTS = 256  # samples in flight
MAX_CACHE_BYTES = {"cpu": 4 << 30, "cuda": 32 << 30}  # keys and values of the samples in flight
OTHER_PROCESSES = "rollout processes"  # part of a plan: memory outside the stage's own process
WEIGHTS_COPY = "sent weights"  # part of a plan: a copy of the weights sent to rollout processes
ASSUMED_PROMPT_TOKENS = 256  # tokens of a prompt in the plan, which does not read the tasks
LENGTH_RATIO = {"cpu": 1, "cuda": 4}  # the longest answer divided by the expected one


def model_config(job: Job) -> DecoderConfig:
    """Return the configuration of the recipe's model, shared by all its checkpoints; reads no weights.

    Raises:
        RequestError: when config.json is missing, malformed or describes a model that is not implemented.
    """
    return section_config(job.model)


def section_config(model: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of the recipe's model section, as `model_config` does."""
    if model.get("preset"):
        preset = PRESETS[model["preset"]]
        sizes = {"bytes": BYTE_VOCABULARY_SIZE, "bpe": model.get("vocab_size")}
        return preset.replace(vocab_size=sizes.get(model.get("tokenizer") or "") or preset.vocab_size)
    file = Path(model["path"]) / "config.json"
    return DecoderConfig.from_hf(read_json(file), where=str(file))


def planned_episode_tokens(section: Mapping[str, Any], max_tokens: int, config: DecoderConfig | None) -> int:
    """Return `max_episode_tokens` of the recipe's environment, limited by the model's positions if known."""
    tokens = max_episode_tokens(make_environment(section), episode_settings(section), max_tokens)
    if config is None or tokens <= max_tokens:
        return tokens
    return max(max_tokens, min(tokens, config.max_position_embeddings - 1))


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The device and precision of a stage, which determine the size of its cache.

    Attributes:
        device: "cuda"; everything else counts as "cpu".
        precision: of matrix products. On a GPU, the cache has this precision too.
    """

    device: str = "cpu"
    precision: Precision = "float32"

    @property
    def gpu(self) -> Precision | None:
        """The precision of products on a GPU; None on a CPU."""
        return self.precision if self.device == "cuda" else None

    @property
    def kind(self) -> str:
        """The device's key in the tables of this module."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def bytes(self) -> int:
        """The most bytes of the cache."""
        return MAX_CACHE_BYTES[self.kind]

    @property
    def item_bytes(self) -> int:
        return 2 if self.kind == "cuda" and self.precision == "bfloat16" else 4


def max_slots(config: DecoderConfig, max_tokens: int, cache: CacheSettings) -> int:
    """Return the most samples in flight: as many samples of the expected length as fit in the cache.

    On a CPU the expected length is the longest one. On a GPU it is a quarter of the longest; when longer
    samples fill the cache, the latest samples wait and are computed again. The number depends on the recipe
    and not on the free memory, so that a run can be repeated.
    """
    length = _sample_tokens(config, max_tokens // LENGTH_RATIO[cache.kind])

    def needed(count: int) -> int:
        return cache_bytes(config, count, length, cache.item_bytes)

    return max(1, bisect_right(range(1, MAX_SLOTS + 1), cache.bytes, key=needed))


@dataclass(frozen=True, slots=True)
class StageMemory(MemoryPlan):
    """The memory plan of a stage.

    Attributes:
        token_budget: tokens of a forward pass in training; 0 for a stage that doesn't train.
        replan: computes the plan for another token budget.
        slots: most samples in flight; 0 for a stage that doesn't sample.
    """

    token_budget: int
    replan: Callable[[int], MemoryPlan]
    slots: int = 0

    def fitting(self, available: int) -> str:
        """Return advice to fit into `available` bytes: a lower token budget, or settings that save more."""
        budgets = range(MIN_TOKEN_BUDGET, self.token_budget)
        available -= self.total - self.replan(self.token_budget).total  # parts that a stage has added
        fits = bisect_right(budgets, available, key=lambda budget: self.replan(budget).total)
        if fits:
            return f"lower token_budget to {budgets[fits - 1]}"
        return "train an adapter (lora: {}), set activation_checkpointing: true, or use a smaller model"


class EngineSize(TypedDict):
    """The most samples in flight, and the tokens that the cache holds for all of them together."""

    slots: int
    cache_tokens: int


def engine_size(
    config: DecoderConfig, max_tokens: int, cache: CacheSettings, samples: int | None = None
) -> EngineSize:
    """Return the engine size for samples of the planned length.

    If possible, the cache also has room for one sample that fills all positions of the model. A prompt longer
    than planned leaves less room for other samples.

    Args:
        samples: most samples that the stage has at a time; None if unknown.
    """
    slots = min(max_slots(config, max_tokens, cache), samples or MAX_SLOTS)
    blocks = -(-_sample_tokens(config, max_tokens) // BLOCK)
    wanted = max(slots * blocks, -(-config.max_position_embeddings // BLOCK))

    def needed(count: int) -> int:
        return blocks_bytes(config, 1 + count, slots, cache.item_bytes)

    fitting = BLOCK * bisect_right(range(1, 1 + wanted), cache.bytes, key=needed)
    full = min(config.max_position_embeddings, fitting)
    return EngineSize(
        slots=slots, cache_tokens=max(min(slots * blocks * BLOCK, max(fitting, blocks * BLOCK)), full)
    )


def make_engine(
    decoder: Decoder,
    max_tokens: int,
    tokenizer: Tokenizer,
    *,
    samples: int | None = None,
    record_routes: bool = False,
    backend: OpenVino | None = None,
) -> Engine:
    """Return an engine for episodes of at most `max_tokens` after the prompt, on the decoder's device.

    Args:
        tokenizer: for stop texts.
        samples: most samples that the stage has at a time; None if unknown.
        backend: computes the steps; None for Perilune's own runner.

    Raises:
        RequestError: when the backend cannot compute the model, or `record_routes` is set for a model whose
            routes cannot be recorded.
    """
    from perilune.engine.engine import Engine
    from perilune.engine.select_runner import fastest_runner

    cache = CacheSettings(next(decoder.parameters()).device.type, decoder.precision)
    size = engine_size(decoder.config, max_tokens, cache, samples)
    engine = Engine(decoder, tokenizer=tokenizer, runner=backend or fastest_runner, **size)
    if record_routes:
        engine.record_routes()
    return engine


def plan_stage_memory(
    config: DecoderConfig,
    *,
    samples: int = 0,
    max_tokens: int = 0,
    token_budget: int = 0,
    reference: bool = False,
    learner: LearnerSettings | None = None,
    cache: CacheSettings = CacheSettings(),
) -> StageMemory:
    """Return the memory plan of a stage that samples, trains, or both.

    The plan assumes that prompt and answer together have `ASSUMED_PROMPT_TOKENS` + `max_tokens` tokens, or as
    many as the model has positions if these are fewer.

    Args:
        samples: answers sampled together; 0 for a stage that doesn't sample.
        token_budget: tokens of a forward pass in training; 0 for a stage that doesn't train.
        reference: whether a frozen copy of the policy is kept.
        learner: the settings of a stage that trains; None for one that only samples.
        cache: the device of the stage, and the precision of its products.

    Raises:
        RequestError: when the answers leave no room for a prompt, or the adapter does not fit the model.
    """
    require_prompt_room(config, max_tokens)
    if learner is not None and learner.lora is not None:
        learner.lora.check(config)
    length = _sample_tokens(config, max_tokens)
    slots = min(samples, max_slots(config, max_tokens, cache))

    def planned(budget: int) -> MemoryPlan:
        plan = plan_memory(
            config,
            sampling=(slots, length) if samples else None,
            learning=(budget, min(length, budget)) if budget else None,
            reference=reference,
            savings=_savings(config, learner),
            gpu=cache.gpu,
        )
        return (
            _add_gpu_engine(plan, config, max_tokens, cache, slots)
            if cache.kind == "cuda" and samples
            else plan
        )

    plan = planned(token_budget)
    return StageMemory(plan.persistent, plan.transient, token_budget, planned, slots)


def _add_gpu_engine(
    plan: MemoryPlan, config: DecoderConfig, max_tokens: int, cache: CacheSettings, slots: int
) -> MemoryPlan:
    """Return the plan with the engine on a GPU: the whole cache, and matrices in the precision of products.

    On a GPU the cache is preallocated. On a CPU, its untouched pages take no memory.
    """
    blocks = 1 + engine_size(config, max_tokens, cache, slots)["cache_tokens"] // BLOCK
    persistent = {**plan.persistent, "cache": blocks_bytes(config, blocks, slots, cache.item_bytes)}
    if cache.precision == "bfloat16":
        card = get_model_card(config)
        head = cache.item_bytes * card.table_parameters if card.tied else 0
        persistent["engine"] = base_bytes(config, "bfloat16") + head
    return replace(plan, persistent=persistent)


def sampling_plan(samples: int) -> Callable[[DecoderConfig, int, str], StageMemory]:
    """Return a function that plans the memory of a stage that only samples.

    The function takes the model's configuration, the tokens of the longest episode, and the type of device.

    Args:
        samples: most answers that the stage samples at a time.
    """

    def plan(config: DecoderConfig, longest: int, device: str) -> StageMemory:
        cache = CacheSettings(device)
        return plan_stage_memory(config, samples=samples, max_tokens=longest, cache=cache)

    return plan


def plan_sampling_memory(
    job: Job, max_tokens: int, samples: int, precision: Precision = "float32"
) -> StageMemory:
    """Return the memory plan of a stage that samples `samples` answers in the recipe's environment."""
    config = model_config(job)
    max_episode_tokens = planned_episode_tokens(job.environment, max_tokens, config)
    cache = CacheSettings(job.resources.device, precision)
    return plan_stage_memory(config, samples=samples, max_tokens=max_episode_tokens, cache=cache)


def _savings(config: DecoderConfig, learner: LearnerSettings | None) -> MemorySavings:
    if learner is None:
        return MemorySavings()
    lora = learner.lora
    adapter = None if lora is None else adapter_parameters(config, lora.rank, lora.targets)
    base = "float32" if lora is None else lora.base
    return MemorySavings(adapter, base, learner.activation_checkpointing)


def _sample_tokens(config: DecoderConfig, max_tokens: int) -> int:
    return min(ASSUMED_PROMPT_TOKENS + max_tokens, config.max_position_embeddings)


def require_prompt_room(config: DecoderConfig, max_tokens: int) -> None:
    """Check that the answers leave room for a prompt.

    Raises:
        RequestError: when they don't.
    """
    if max_tokens >= config.max_position_embeddings:
        raise RequestError(
            f"{max_tokens} is too many: the model has {config.max_position_embeddings} positions for prompt"
            " and answer together",
            where="max_tokens",
            remedy=f"lower it below {config.max_position_embeddings}, and leave room for the prompt",
        )


def memory_figures(plan: MemoryPlan, device: torch.device) -> dict[str, int]:
    """Return the planned and the peak bytes of this process: of GPU memory on a GPU, else of resident memory.

    The peak depends on the machine and its load, so comparisons of runs ignore it.
    """
    planned = plan.total - plan.persistent.get(OTHER_PROCESSES, 0)
    if device.type == "cuda":
        import torch

        on_device = planned - plan.persistent["process"]
        return {"planned_bytes": on_device, "peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"planned_bytes": planned, "peak_bytes": peak_resident_bytes()}


def peak_resident_bytes() -> int:
    """Return the peak resident size of this process, in bytes."""
    if sys.platform == "linux":  # getrusage would include the peak of the parent before exec
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
