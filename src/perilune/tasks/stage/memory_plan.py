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
from perilune.rollout.limits import episode_tokens

if TYPE_CHECKING:
    import torch

    from perilune.engine.engine import Engine
    from perilune.engine.openvino_runner import OpenVino
    from perilune.learn.training_settings import LearnerSettings
    from perilune.models.decoder import Decoder
    from perilune.models.narrow import Precision
    from perilune.models.text.tokenizer import Tokenizer

BYTE_TOKENS = 258  # of `Tokenizer.byte_level`
LEAST_BUDGET = 64  # tokens; a step with fewer is mostly overhead
SLOTS = 256  # most samples in flight
CACHE_BYTES = {"cpu": 4 << 30, "cuda": 32 << 30}  # most memory for their keys and values
OTHER_PROCESSES = "rollout processes"  # part of a plan that the stage's own process does not hold
SENT = "sent weights"  # part of a plan: the copy of the weights that rollout processes have
PROMPT_TOKENS = 256  # assumed length of a prompt: the plan doesn't read the tasks
EXPECTED_SHARE = {"cpu": 1, "cuda": 4}  # the longest answer divided by the expected one


def model_config(job: Job) -> DecoderConfig:
    """The configuration of the recipe's model, shared by all its checkpoints; reads no weights.

    Raises:
        RequestError: when config.json is missing, malformed or describes a model that is not implemented.
    """
    return section_config(job.model)


def section_config(model: Mapping[str, Any]) -> DecoderConfig:
    """As `model_config`, from the recipe's model section."""
    if model.get("preset"):
        preset = PRESETS[model["preset"]]
        sizes = {"bytes": BYTE_TOKENS, "bpe": model.get("vocab_size")}
        return preset.replace(vocab_size=sizes.get(model.get("tokenizer") or "") or preset.vocab_size)
    file = Path(model["path"]) / "config.json"
    return DecoderConfig.from_hf(read_json(file), where=str(file))


def planned_tokens(section: Mapping[str, Any], max_tokens: int, config: DecoderConfig | None) -> int:
    """`episode_tokens` for the environment of a recipe, limited by the model's positions if it is known."""
    tokens = episode_tokens(make_environment(section), episode_settings(section), max_tokens)
    if config is None or tokens <= max_tokens:
        return tokens
    return max(max_tokens, min(tokens, config.max_position_embeddings - 1))


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The device of a stage and the precision of its products: what its cache and its training take.

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
        """The most memory that the cache may take."""
        return CACHE_BYTES[self.kind]

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the cache."""
        return 2 if self.kind == "cuda" and self.precision == "bfloat16" else 4


def slots_for(config: DecoderConfig, max_tokens: int, room: CacheRoom) -> int:
    """The most samples in flight: as many of the expected length as fit.

    On a CPU the expected length is the longest. On a GPU it is a quarter of it; when longer samples fill the
    cache, the latest ones wait and are computed again. The number depends on the recipe and not on the free
    memory, so that a run can be repeated.
    """
    length = _length(config, max_tokens // EXPECTED_SHARE[room.kind])

    def needed(count: int) -> int:
        return cache_bytes(config, count, length, room.item_bytes)

    return max(1, bisect_right(range(1, SLOTS + 1), room.bytes, key=needed))


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
        """How to fit into `available` bytes: a lower token budget, or settings that save more."""
        budgets = range(LEAST_BUDGET, self.token_budget)
        fits = bisect_right(budgets, available, key=lambda budget: self.replan(budget).total)
        if fits:
            return f"lower token_budget to {budgets[fits - 1]}"
        return "train an adapter (lora: {}), set activation_checkpointing: true, or use a smaller model"


class EngineSize(TypedDict):
    """The most samples in flight, and the tokens that the cache holds for all of them together."""

    slots: int
    cache_tokens: int


def engine_size(
    config: DecoderConfig, max_tokens: int, room: CacheRoom, samples: int | None = None
) -> EngineSize:
    """Room for the samples of the planned length, as far as it fits, and for one of the model's full length.

    A prompt longer than planned leaves less room for other samples.

    Args:
        samples: most samples that the stage has at a time; None if unknown.
    """
    slots = min(slots_for(config, max_tokens, room), samples or SLOTS)
    one = -(-_length(config, max_tokens) // BLOCK)
    wanted = max(slots * one, -(-config.max_position_embeddings // BLOCK))

    def needed(count: int) -> int:
        return blocks_bytes(config, 1 + count, slots, room.item_bytes)

    fitting = BLOCK * bisect_right(range(1, 1 + wanted), room.bytes, key=needed)
    full = min(config.max_position_embeddings, fitting)
    return EngineSize(
        slots=slots, cache_tokens=max(min(slots * one * BLOCK, max(fitting, one * BLOCK)), full)
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
    """An engine for episodes of at most `max_tokens` after the prompt, on the decoder's device.

    Args:
        tokenizer: for stop texts.
        samples: most samples that the stage has at a time; None if unknown.
        backend: what computes the steps, by default Perilune.

    Raises:
        RequestError: when the backend cannot compute the model, or `record_routes` is set for a model whose
            routes cannot be recorded.
    """
    from perilune.engine.engine import Engine
    from perilune.engine.select_runner import fastest_runner

    room = CacheRoom(next(decoder.parameters()).device.type, decoder.precision)
    size = engine_size(decoder.config, max_tokens, room, samples)
    engine = Engine(decoder, tokenizer=tokenizer, runner=backend or fastest_runner, **size)
    if record_routes:
        engine.record_routes()
    return engine


def stage_memory(
    config: DecoderConfig,
    *,
    samples: int = 0,
    max_tokens: int = 0,
    token_budget: int = 0,
    reference: bool = False,
    learner: LearnerSettings | None = None,
    cache: CacheRoom = CacheRoom(),
) -> StageMemory:
    """The memory plan of a stage that samples, trains, or both.

    An answer with its prompt is assumed to be as long as the model allows, but at most `PROMPT_TOKENS` longer
    than `max_tokens`.

    Args:
        samples: answers sampled together; 0 for a stage that doesn't sample.
        token_budget: tokens of a forward pass in training; 0 for a stage that doesn't train.
        reference: whether a frozen copy of the policy is kept.
        cache: the device of the stage, and the precision of its products.

    Raises:
        RequestError: when the answers leave no room for a prompt, or the adapter does not fit the model.
    """
    require_prompt_room(config, max_tokens)
    if learner is not None and learner.lora is not None:
        learner.lora.check(config)
    length = _length(config, max_tokens)
    slots = min(samples, slots_for(config, max_tokens, cache))

    def planned(budget: int) -> MemoryPlan:
        plan = plan_memory(
            config,
            sampling=(slots, length) if samples else None,
            learning=(budget, min(length, budget)) if budget else None,
            reference=reference,
            savings=_savings(config, learner),
            gpu=cache.gpu,
        )
        return _on_gpu(plan, config, max_tokens, cache, slots) if cache.kind == "cuda" and samples else plan

    plan = planned(token_budget)
    return StageMemory(plan.persistent, plan.transient, token_budget, planned, slots)


def _on_gpu(
    plan: MemoryPlan, config: DecoderConfig, max_tokens: int, room: CacheRoom, slots: int
) -> MemoryPlan:
    """The plan with the engine that a GPU has: a cache of `engine_size`, allocated whole at the start, and
    matrices in the precision of products. (On a CPU, pages of the cache that nothing touches take no memory.)
    """
    blocks = 1 + engine_size(config, max_tokens, room, slots)["cache_tokens"] // BLOCK
    held = {**plan.persistent, "cache": blocks_bytes(config, blocks, slots, room.item_bytes)}
    if room.precision == "bfloat16":
        card = get_model_card(config)
        head = room.item_bytes * card.table_parameters if card.tied else 0
        held["engine"] = base_bytes(config, "bfloat16") + head
    return replace(plan, persistent=held)


def sampling_memory(job: Job, max_tokens: int, samples: int, precision: Precision = "float32") -> StageMemory:
    """The memory plan of a stage that samples `samples` answers in the recipe's environment."""
    config = model_config(job)
    longest = planned_tokens(job.environment, max_tokens, config)
    cache = CacheRoom(job.resources.device, precision)
    return stage_memory(config, samples=samples, max_tokens=longest, cache=cache)


def _savings(config: DecoderConfig, learner: LearnerSettings | None) -> MemorySavings:
    if learner is None:
        return MemorySavings()
    lora = learner.lora
    adapter = None if lora is None else adapter_parameters(config, lora.rank, lora.targets)
    base = "float32" if lora is None else lora.base
    return MemorySavings(adapter, base, learner.activation_checkpointing)


def _length(config: DecoderConfig, max_tokens: int) -> int:
    return min(PROMPT_TOKENS + max_tokens, config.max_position_embeddings)


def require_prompt_room(config: DecoderConfig, max_tokens: int) -> None:
    """Check that the answers leave room for a prompt.

    Raises:
        RequestError: when they don't.
    """
    if max_tokens >= config.max_position_embeddings:
        raise RequestError(
            f"max_tokens is {max_tokens}, and the model has {config.max_position_embeddings} positions for"
            " prompt and answer together",
            where="max_tokens",
            remedy="lower max_tokens",
        )


def memory_figures(plan: MemoryPlan, device: torch.device) -> dict[str, int]:
    """The planned and the peak bytes, of resident memory or of the GPU.

    Both are of this process alone. The peak depends on the machine and its load, so comparisons of runs
    ignore it.
    """
    planned = plan.total - plan.persistent.get(OTHER_PROCESSES, 0)
    if device.type == "cuda":
        import torch

        on_device = planned - plan.persistent["process"]
        return {"planned_bytes": on_device, "peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"planned_bytes": planned, "peak_bytes": peak_resident()}


def peak_resident() -> int:
    """Peak resident size of this process, in bytes."""
    if sys.platform == "linux":  # getrusage would include the peak of the parent before exec
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
