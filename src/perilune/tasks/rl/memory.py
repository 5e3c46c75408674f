"""The memory of an rl stage."""

from __future__ import annotations

from perilune.models.config.decoder_config import DecoderConfig
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.memory_plan import StageMemory, stage_memory


def rl_memory(spec: RLSpec, config: DecoderConfig, longest: int, device: str) -> StageMemory:
    """Plan the memory of an rl stage whose episodes have at most `longest` tokens after the prompt."""
    return stage_memory(
        config,
        samples=spec.prompts * spec.samples,
        max_tokens=longest,
        token_budget=spec.token_budget,
        reference=spec.uses_reference,
        learner=spec,
        device=device,
    )
