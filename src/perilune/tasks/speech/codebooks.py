"""Residual vector quantization: codebooks by k-means, each of the residual that the previous ones leave.

Source: SoundStream (Zeghidour et al., arXiv 2107.03312), section III-C, which initializes its codebooks this
way.
"""

import torch
from torch import Tensor, nn

from perilune.speech.quantizer import Quantizer, find_nearest, project_in, project_out

_ROUNDS = 10  # rounds of k-means


@torch.no_grad()
def fit_codebooks(quantizer: Quantizer, latents: Tensor, random: torch.Generator) -> None:
    """Set all codebooks from float[N, codebook_dim] latents. They encode the first half of the dimensions."""
    left = latents
    for part in (quantizer.rvq_first, quantizer.rvq_rest):
        nn.init.eye_(part.input_proj.weight[..., 0])
        nn.init.eye_(part.output_proj.weight[..., 0])
        vectors = project_in(part, left)
        rounded = torch.zeros_like(vectors)
        for book in part.codebooks:
            table = _k_means(vectors - rounded, len(book.cluster_usage), random)
            book.embedding_sum.copy_(table)
            book.cluster_usage.fill_(1.0)
            rounded = rounded + table[find_nearest(table, vectors - rounded)]
        left = left - project_out(part, rounded)


def _k_means(vectors: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Return float[count, D] means (Lloyd's algorithm); an empty cluster takes one of the vectors."""
    means = vectors[torch.randint(len(vectors), (count,), generator=random)]
    for _ in range(_ROUNDS):
        chosen = find_nearest(means, vectors)
        usage = torch.bincount(chosen, minlength=count).to(vectors.dtype)
        sums = torch.zeros_like(means).index_add_(0, chosen, vectors)
        others = vectors[torch.randint(len(vectors), (count,), generator=random)]
        means = torch.where(usage[:, None] > 0, sums / usage.clamp(min=1)[:, None], others)
    return means
