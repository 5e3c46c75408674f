"""A reward model: the decoder with a scalar head on its last hidden state.

It is stored as transformers' `...ForSequenceClassification` with one label (`model.*` and `score.weight`), so
other programs can load it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from perilune.files import read_json, write_json
from perilune.models.checkpoints.loading import load_decoder, load_tokenizer, save_checkpoint
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer


class RewardModel(Decoder):
    """A decoder with a linear map of the last hidden state, `score`, in place of the language model head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.replace(tie_word_embeddings=True))
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> RewardModel:
        """Return a reward model with a copy of the layers of `decoder` and a head of zeros."""
        model = cls(decoder.config)
        weights = {
            name: value.detach().clone()
            for name, value in decoder.state_dict().items()
            if name.startswith("model.")
        }
        body = decoder.model.embed_tokens.weight
        weights["score.weight"] = torch.zeros(1, decoder.config.hidden_size).to(body)
        model.load_state_dict(weights, assign=True)
        return model

    def rewards(self, hidden: Tensor) -> Tensor:
        """Compute scores float[N] of hidden states float[N, d], in float32 at least."""
        scores: Tensor = self.score(hidden)[:, 0]
        return scores.to(torch.promote_types(hidden.dtype, torch.float32))


def save_reward_model(path: Path, model: Decoder, tokenizer: Tokenizer) -> None:
    """Save a checkpoint with a config.json for sequence classification."""
    save_checkpoint(path, model, tokenizer)
    raw = read_json(path / "config.json")
    (name,) = raw["architectures"]
    raw["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification")]
    write_json(path / "config.json", raw | {"id2label": {"0": "reward"}, "label2id": {"reward": 0}})


def load_reward_model(path: Path, device: str | torch.device = "cpu") -> tuple[RewardModel, Tokenizer]:
    """Read the reward model and the tokenizer of a folder.

    Raises:
        RequestError: as `load_checkpoint`, and when `score.weight` is missing.
    """
    tokenizer = load_tokenizer(path)
    return load_decoder(RewardModel, path, device), tokenizer
