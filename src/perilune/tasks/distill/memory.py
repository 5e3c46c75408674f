"""The memory of a distill stage."""

from __future__ import annotations

from perilune.models.config.decoder_config import DecoderConfig
from perilune.tasks.distill.spec import DistillSpec
from perilune.tasks.stage.memory_plan import StageMemory, stage_memory


def distill_memory(spec: DistillSpec, config: DecoderConfig, device: str) -> StageMemory:
    """Plan the memory of student and teacher; `config` is the larger model's.

    Raises:
        RequestError: when the answers leave no room for a prompt.
    """
    return stage_memory(
        config,
        samples=spec.prompts * spec.samples,
        max_tokens=spec.max_tokens,
        token_budget=spec.token_budget,
        reference=True,
        learner=spec,
        device=device,
    )
