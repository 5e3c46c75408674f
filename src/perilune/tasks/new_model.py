"""new_model: a new model from a preset besides the recipe's model, for example a larger teacher."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from perilune.bundle.job import PRESET, Job, Preset
from perilune.bundle.plugin import Consumes
from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.models.config.decoder_config import PRESETS
from perilune.tasks.stage.new_tokenizer import is_trained, new_tokenizer
from perilune.tasks.stage.stage import Stage


class NewModelSpec(Frozen):
    """Fields of a new_model stage."""

    preset: Preset = Field(description=PRESET)
    data: Annotated[str | None, Consumes("dataset", files=True)] = Field(
        None, description="traces, or a file of your own, that `tokenizer: bpe` is trained on"
    )


class NewModel(Stage[NewModelSpec]):
    """Writes a checkpoint of an untrained model."""

    name = "new_model"
    spec = NewModelSpec
    produces = "checkpoint"

    def describe(self, spec: NewModelSpec, job: Job) -> Mapping[str, object]:
        """Return the shape of the model.

        Raises:
            RequestError: when there is data, and no tokenizer to train.
        """
        if spec.data is not None and not is_trained(job.model):
            message = "only `tokenizer: bpe` of the recipe's model is trained on it"
            raise RequestError(message, where="data", remedy="remove it, or set model.tokenizer to bpe")
        config = PRESETS[spec.preset]
        return {"model": f"{config.num_layers} layers of width {config.hidden_size}"}

    def execute(self, spec: NewModelSpec, workspace: Workspace) -> dict[str, Any]:
        from perilune.models.checkpoints.loading import new_model, save_checkpoint

        data = workspace.input("data") if workspace.has_input("data") else None
        tokenizer = new_tokenizer(workspace.job.model, data)
        decoder = new_model(spec.preset, tokenizer, workspace.job.seed)
        save_checkpoint(workspace.root / self.output, decoder, tokenizer)
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        workspace.log(f"{parameters:,} parameters")
        return {"kind": "model", "preset": spec.preset, "parameters": parameters}


plugin = NewModel()
