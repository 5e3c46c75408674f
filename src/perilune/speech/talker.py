"""The talker and the code predictor: text and earlier frames to the next frame of codes.

The talker is a decoder over frames. The input of a position is the sum of a text embedding and the embeddings
of a frame's Q codes, and its logits predict the first code of the next frame. The code predictor is a smaller
decoder over the codes of one frame: from the talker's hidden state and the codes so far it predicts the next
code, Q - 1 times. N positions or frames, d hidden size, V vocabulary, Q codes of a frame.
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.models.attention import Attention, PackedAttention
from perilune.models.decoder import Decoder
from perilune.models.layers import Projection
from perilune.speech.config import SpeechConfig


class TextProjection(nn.Module):
    """Two linear maps from text embeddings to the talker's inputs."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        inner = config.text_hidden_size
        self.linear_fc1 = nn.Linear(inner, inner)
        self.linear_fc2 = nn.Linear(inner, config.talker.hidden_size)
        self.first, self.second = Projection(self.linear_fc1), Projection(self.linear_fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(x)))


class CodePredictor(nn.Module):
    """Codes 1 to Q - 1 of a frame from the talker's hidden state and code 0.

    Attributes:
        decoder: the layers. Its own embeddings are unused, because each code has its own embedding table and
            head.
        embeddings: table i is for code i + 1, in the talker's hidden size; the talker uses it, too.
        heads: head i predicts code i + 1.
        projection: from the talker's hidden size to the predictor's; None if the sizes are equal.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        codes, hidden = config.predictor.vocab_size, config.predictor.hidden_size
        self.decoder = Decoder(config.predictor.replace(vocab_size=1, tie_word_embeddings=True))
        rest = range(config.code_groups - 1)
        self.embeddings = nn.ModuleList(nn.Embedding(codes, config.talker.hidden_size) for _ in rest)
        self.heads = nn.ModuleList(nn.Linear(hidden, codes, bias=False) for _ in rest)
        self.projection = (
            nn.Linear(config.talker.hidden_size, hidden) if hidden != config.talker.hidden_size else None
        )
        self.into = None if self.projection is None else Projection(self.projection)
        self.out = [Projection(head) for head in self.heads]  # type: ignore[arg-type]

    def hidden(self, inputs: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return hidden states float[N, p] of inputs float[N, d] at int64[N] positions in their frames."""
        projected = inputs if self.into is None else self.into(inputs)
        return self.decoder(positions, positions, attention, inputs=projected)  # type: ignore[no-any-return]

    def forward(self, hidden: Tensor, first: Tensor, codes: Tensor) -> Tensor:
        """Return logits float[N, Q - 1, codes] of codes 1 to Q - 1, each given the codes before it.

        Args:
            hidden: float[N, d], the talker's hidden state before each frame.
            first: float[N, d], the talker's embedding of code 0.
            codes: int64[N, Q], of which codes 1 to Q - 2 are read.
        """
        frames, groups = codes.shape
        tables = list(self.embeddings)[: groups - 2]
        later = [table(codes[:, i]) for i, table in enumerate(tables, 1)]
        inputs = torch.stack([hidden, first, *later], dim=1).flatten(0, 1)
        bounds = torch.arange(frames + 1) * groups
        positions = torch.arange(groups, device=codes.device).repeat(frames)
        out = self.hidden(inputs, positions, PackedAttention(bounds)).view(frames, groups, -1)
        return torch.stack([head(out[:, i]) for i, head in enumerate(self.out, 1)], dim=1)


class Talker(nn.Module):
    """The decoder that predicts the first code of each frame, with its embeddings and the code predictor.

    Attributes:
        decoder: its vocabulary is the codec's tokens: codes, languages, speakers and marks.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config.talker)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config)
        self.predictor = CodePredictor(config)

    @property
    def device(self) -> torch.device:
        return self.text_embedding.weight.device

    def embed_text(self, token_ids: Tensor) -> Tensor:
        """float[N, d] of int64[N] text tokens."""
        return self.text_projection(self.text_embedding(token_ids))  # type: ignore[no-any-return]

    def embed_codec(self, token_ids: Tensor) -> Tensor:
        """float[N, d] of int64[N] codec tokens: first codes, languages, speakers, marks."""
        return self.decoder.model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def embed_frames(self, codes: Tensor) -> Tensor:
        """float[N, d], the summed embeddings of int64[N, Q] frames."""
        rest = [table(codes[:, i]) for i, table in enumerate(self.predictor.embeddings, 1)]
        return torch.stack([self.embed_codec(codes[:, 0]), *rest], dim=1).sum(1)

    def forward(self, inputs: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return hidden states float[N, d] of input embeddings float[N, d]."""
        return self.decoder(positions, positions, attention, inputs=inputs)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float[N, V] of the first code of the frame after each hidden state."""
        return self.decoder.logits(hidden)

    @torch.no_grad()
    def frozen(self) -> Talker:
        """Return a copy for inference, with weights in the fastest layout. The engine copies the decoder."""
        copy = deepcopy(self).requires_grad_(False)
        predictor, text = copy.predictor, copy.text_projection
        predictor.decoder = predictor.decoder.frozen_copy()
        for part in (*predictor.out, predictor.into, text.first, text.second):
            if part is not None:
                part.freeze(part, None)
        return copy

    def initialize(self, seed: int) -> None:
        """Draw new weights: normal with the decoder's `initializer_range` as standard deviation, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        deviation = self.config.talker.initializer_range
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith(".bias"):
                    parameter.zero_()
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
