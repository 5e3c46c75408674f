"""What a learner's settings make of a decoder: what is frozen, what learns beside it, how it computes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from perilune.errors import RequestError
from perilune.learn.training_settings import LearnerSettings
from perilune.models.adapters.lora import A, B, attach, linear_maps
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder


def adapt(decoder: Decoder, settings: LearnerSettings, seed: int) -> None:
    """Let `decoder` compute and learn as the settings say; a narrow base was narrowed when it was loaded.

    With LoRA only A and B want a gradient from now on. B is 0: the policy is the base's until the first
    update.

    Raises:
        RequestError: when the model has no map that is to be adapted.
    """
    decoder.compute_in(settings.precision)
    decoder.recompute = settings.activation_checkpointing
    lora = settings.lora
    if lora is None:
        return
    known = {name.rpartition(".")[2] for name, _ in linear_maps(decoder)}
    missing = sorted(set(lora.targets) - known)
    if missing:
        raise RequestError(
            f"no linear map of this model is called {missing[0]}",
            where="lora.targets",
            remedy=f"of these: {', '.join(sorted(known))}",
        )
    attach(decoder, lora.targets, lora.rank, lora.alpha, seed)


def trainable(decoder: Decoder) -> dict[str, nn.Parameter]:
    """The parameters that want a gradient, by name: all, or the adapter's."""
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def frozen_checksum(decoder: Decoder) -> str:
    """Checksum of what no gradient reaches; empty where everything is trained."""
    trained = trainable(decoder)
    frozen = {name: tensor for name, tensor in decoder.state_dict().items() if name not in trained}
    return checksum(frozen) if frozen else ""


def comparable(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether figures of parameters are of the same ones, or both of whole models: then shapes must agree."""
    adapters = any(pair in name.split(".") for name in (*own, *theirs) for pair in (A, B))
    same = own.keys() == theirs.keys() and all(own[name].shape == theirs[name].shape for name in own)
    return same or not adapters
