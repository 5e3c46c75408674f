"""The precision in which an engine keeps the weights of a decoder, and in which they are sent."""

import torch

from perilune.models.adapters.lora import adapter_pairs
from perilune.models.decoder import Decoder


def engine_dtypes(decoder: Decoder) -> dict[str, torch.dtype]:
    """Return the dtypes by name of the tensors that an engine rounds when it copies the decoder's weights.

    With bfloat16 products these are the matrices and the embeddings, in bfloat16. An engine rounds
    the sum of a base and its adapter, so with an adapter neither is rounded before it is sent.
    """
    if decoder.precision != "bfloat16" or adapter_pairs(decoder):
        return {}
    return decoder.bfloat16_weights()
