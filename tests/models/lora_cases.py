"""Decoders with LoRA adapters for the tests of LoRA."""

import torch
from torch import Tensor

from perilune.models.adapters.lora import BaseKind, adapter_pairs, attach_adapter, convert_base
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.decoder import Decoder

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY = PRESETS["tiny"].replace(num_layers=2)
TOKENS = torch.arange(40) * 7 % 98


def make(config: DecoderConfig = TINY, base: BaseKind = "float32", rank: int = 4, seed: int = 0) -> Decoder:
    """A decoder with a trained adapter: B is not zero."""
    decoder = Decoder(config)
    decoder.initialize(seed)
    convert_base(decoder, base)
    attach_adapter(decoder, TARGETS, rank, alpha=8.0, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, b in adapter_pairs(decoder).values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    bounds = torch.tensor([0, 25, 40])
    positions = torch.cat([torch.arange(25), torch.arange(15)])
    return decoder.logits(decoder(TOKENS, positions, PackedAttention(bounds)))
