"""Apply a learner's settings to a decoder: adapters, frozen weights, precision and recomputation."""

from collections.abc import Mapping

from torch import Tensor, nn

from perilune.learn.training_settings import LearnerSettings
from perilune.models.adapters.lora import A, B, attach_adapter
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder


def adapt(decoder: Decoder, settings: LearnerSettings, seed: int) -> None:
    """Prepare `decoder` for training: its precision, its recomputation, and an adapter.

    Loading the decoder has already converted a base of lower precision.

    With LoRA only A and B receive gradients. B starts at 0, so the policy equals the base until the first
    update.

    Raises:
        RequestError: as `LoRASettings.check`.
    """
    decoder.set_precision(settings.precision)
    decoder.recompute = settings.activation_checkpointing
    lora = settings.lora
    if lora is None:
        return
    lora.check(decoder.config)
    attach_adapter(decoder, lora.targets, lora.rank, lora.alpha, seed)


def trainable(decoder: Decoder) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: all parameters, or those of the adapter."""
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def frozen_checksum(decoder: Decoder) -> str:
    """Return the checksum of the frozen tensors; empty if all tensors are trained."""
    trained = trainable(decoder)
    frozen = {name: tensor for name, tensor in decoder.state_dict().items() if name not in trained}
    return checksum(frozen) if frozen else ""


def has_same_parameters(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of moments belong to the same parameters, or both to whole models."""
    adapters = any(pair in name.split(".") for name in (*own, *theirs) for pair in (A, B))
    same = own.keys() == theirs.keys() and all(own[name].shape == theirs[name].shape for name in own)
    return same or not adapters
