"""new_model: a new model from a preset besides the recipe's model, for example a larger teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.models.config.decoder_config import PRESETS
from perilune.tasks.stage.stage import Stage

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class NewModelSpec(Frozen):
    """Fields of a new_model stage."""

    preset: Literal["tiny", "small"] = Field(description="built-in architecture")


class NewModel(Stage[NewModelSpec]):
    """Writes a checkpoint of an untrained model."""

    name = "new_model"
    spec = NewModelSpec
    produces = "checkpoint"

    def describe(self, spec: NewModelSpec, job: Job) -> Mapping[str, object]:
        """The shape of the model."""
        config = PRESETS[spec.preset]
        return {"model": f"{config.num_layers} layers of width {config.hidden_size}"}

    def execute(self, spec: NewModelSpec, workspace: Workspace) -> dict[str, Any]:
        """Initialise the weights from the recipe's seed."""
        from perilune.models.checkpoints.loading import new_model, save_checkpoint
        from perilune.models.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.for_new_model(workspace.job.model)
        decoder = new_model(spec.preset, tokenizer, workspace.job.seed)
        save_checkpoint(workspace.root / self.output, decoder, tokenizer)
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        workspace.log(f"{parameters:,} parameters")
        return {"kind": "model", "preset": spec.preset, "parameters": parameters}


plugin = NewModel()
