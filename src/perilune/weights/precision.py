"""The dtypes in which an engine keeps the weights of a decoder, and in which a learner sends them."""

import torch

from perilune.models.adapters.lora import adapter_pairs
from perilune.models.decoder import Decoder


def engine_dtypes(decoder: Decoder) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor that an engine rounds when it copies the decoder's weights, by name.

    With bfloat16 products these tensors are the matrices and the embeddings. An engine rounds the sum of a
    base and its adapter, so with an adapter no tensor is rounded before it is sent.
    """
    if decoder.precision != "bfloat16" or adapter_pairs(decoder):
        return {}
    return decoder.bfloat16_weights()
