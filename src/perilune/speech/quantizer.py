"""Residual vector quantizers: codebooks that encode latents of the codec, one after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.speech.config import CodecConfig
from perilune.speech.streaming import Taps

_MIN_USAGE = 1e-5  # avoids a division by 0


class Codebook(nn.Module):
    """Entries as running sums and counts of the vectors assigned to them."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, dim))
        self.frozen: Tensor | None = None

    def table(self) -> Tensor:
        """float[codes, dim]."""
        if self.frozen is not None:
            return self.frozen
        return self.embedding_sum / self.cluster_usage.clamp(min=_MIN_USAGE)[:, None]


class ResidualQuantizer(nn.Module):
    """Codebooks whose entries are summed, then projected. Only the encoder uses `input_proj`."""

    def __init__(self, count: int, config: CodecConfig) -> None:
        super().__init__()
        dim = config.codebook_dim // 2
        self.codebooks = [Codebook(config.codebook_size, dim) for _ in range(count)]
        levels = nn.ModuleList(nn.ModuleDict({"_codebook": book}) for book in self.codebooks)
        self.vq = nn.ModuleDict({"layers": levels})
        self.input_proj = nn.Conv1d(config.codebook_dim, dim, 1, bias=False)
        self.output_proj = nn.Conv1d(dim, config.codebook_dim, 1, bias=False)
        self.project = Taps(self.output_proj)

    def forward(self, codes: Tensor) -> Tensor:
        rows, tables = codes.flatten(0, 1), [codebook.table() for codebook in self.codebooks]
        embedded = torch.stack([table[rows[:, i]] for i, table in enumerate(tables)]).sum(0)
        return self.project(embedded).view(*codes.shape[:2], -1)


class Quantizer(nn.Module):
    """Q codebooks: the first by itself, the others as a residual quantizer.

    Attributes:
        codebooks: the Q codebooks, in order.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(1, config)
        self.rvq_rest = ResidualQuantizer(config.codebooks - 1, config)
        self.codebooks = [*self.rvq_first.codebooks, *self.rvq_rest.codebooks]

    def forward(self, codes: Tensor) -> Tensor:
        """float[B, T, codebook_dim] of int64[B, T, Q] codes."""
        return self.rvq_first(codes[..., :1]) + self.rvq_rest(codes[..., 1:])  # type: ignore[no-any-return]


@torch.no_grad()
def quantize(quantizer: Quantizer, latents: Tensor) -> Tensor:
    """Return codes int64[..., Q] of float[..., codebook_dim]. Each codebook encodes the residual so far."""
    codes, residual = [], latents.flatten(0, -2)
    for part in (quantizer.rvq_first, quantizer.rvq_rest):
        vectors, decoded = project_in(part, residual), torch.zeros(())
        for book in part.codebooks:
            table = book.table()
            codes.append(find_nearest(table, vectors - decoded))
            decoded = decoded + table[codes[-1]]
        residual = residual - project_out(part, decoded)
    return torch.stack(codes, dim=1).view(*latents.shape[:-1], -1)


def project_in(part: ResidualQuantizer, latents: Tensor) -> Tensor:
    """float[N, codebook_dim / 2] of float[N, codebook_dim], the space of the part's codebooks."""
    return F.linear(latents, part.input_proj.weight[..., 0])


def project_out(part: ResidualQuantizer, entries: Tensor) -> Tensor:
    """Return float[N, codebook_dim] of float[N, codebook_dim / 2], the reverse of `project_in`."""
    return F.linear(entries, part.output_proj.weight[..., 0])


def find_nearest(table: Tensor, vectors: Tensor) -> Tensor:
    """int64[N], the entry of float[K, D] that is nearest to each of float[N, D]."""
    return torch.cdist(vectors, table).argmin(1)
