"""new_model: fresh weights of a preset, beside the recipe's own model; a larger teacher, for instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.models.config.decoder_config import PRESETS

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class NewModelSpec(Frozen):
    """Fields of a new_model stage."""

    preset: Literal["tiny", "small"] = Field(description="built-in architecture")


class NewModel:
    """A checkpoint of an untrained model."""

    name = "new_model"
    spec = NewModelSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Its shape."""
        config = PRESETS[NewModelSpec.model_validate(job.spec).preset]
        return {"model": f"{config.num_layers} layers of width {config.hidden_size}"}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Draw the weights from the recipe's seed."""
        from perilune.models.checkpoints.loading import new_model, save_checkpoint
        from perilune.models.text.tokenizer import Tokenizer

        spec = NewModelSpec.model_validate(workspace.job.spec)
        tokenizer = Tokenizer.characters()
        decoder = new_model(spec.preset, tokenizer, workspace.job.seed)
        save_checkpoint(workspace.root / self.output, decoder, tokenizer)
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        workspace.log(f"{parameters:,} parameters")
        return {"kind": "model", "preset": spec.preset, "parameters": parameters}


plugin = NewModel()
