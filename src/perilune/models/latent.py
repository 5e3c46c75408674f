"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are projections of one latent vector c per token, k = U c and v = V c. In
addition, all heads share one rotary key. There are two ways to compute attention:

* expanded: project k and v of every token and attend as usual;
* absorbed: since q . (U c) = (U^T q) . c and sum(w V c) = V sum(w c), project queries into the latent space,
  and project the result back. All heads attend to one key [c, rotary key], whose first part is the value.
  The KV cache then holds one vector per token, which is an order of magnitude smaller than the keys and
  values of all heads.

The engine always uses the absorbed form. So does the learner where results are exact (float32 on a CPU), so
that its log-probs equal the engine's bit for bit. Elsewhere the learner uses the expanded form, because its
scores are cheaper: the product of a query and a key has key_size + rotary_size terms instead of
rank + rotary_size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from perilune.models.attention import Attention, AttentionLayer, PackedAttention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Latent
from perilune.models.config.rope import YarnScaling
from perilune.models.kernels import is_exact, rotate
from perilune.models.layers import Projection, RMSNorm, copy_in_place
from perilune.models.narrow import NarrowKind
from perilune.models.products import linear, pack_weight

_EPS = 1e-6  # eps of the norms of latent vectors, which is independent of the model's `rms_norm_eps`


class LatentAttention(nn.Module):
    """Latent attention under the names of DeepSeek's checkpoints."""

    def __init__(self, config: DecoderConfig, latent: Latent, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.sizes = AttentionLayer(layer), config.num_heads, latent
        hidden, bias = config.hidden_size, config.attention_bias
        queries = self.heads * (latent.key_size + latent.rotary_size)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
            self.down_q, self.up_q = None, Projection(self.q_proj)
        else:
            self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _EPS, False)
            self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False)
            self.down_q, self.up_q = Projection(self.q_a_proj), Projection(self.q_b_proj)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.rank + latent.rotary_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, _EPS, False)
        self.kv_b_proj = nn.Linear(
            latent.rank, self.heads * (latent.key_size + latent.value_size), bias=False
        )
        self.o_proj = nn.Linear(self.heads * latent.value_size, hidden, bias=bias)
        self.down_kv, self.out = Projection(self.kv_a_proj_with_mqa), Projection(self.o_proj)
        keys, values = slice(latent.key_size), slice(latent.key_size, None)
        self.project_to_latent = HeadProjection(self.kv_b_proj, self.heads, keys, transposed=True)
        self.project_values = HeadProjection(self.kv_b_proj, self.heads, values)
        scaling = config.rope.scaling
        self.score_scale = scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        sizes = self.sizes
        q = self.up_q(x if self.down_q is None else self.q_a_layernorm(self.down_q(x)))
        q, q_rotary = torch.split(q.view(len(x), self.heads, -1), [sizes.key_size, sizes.rotary_size], dim=-1)
        latent, k_rotary = torch.split(self.down_kv(x), [sizes.rank, sizes.rotary_size], dim=-1)
        latent = self.kv_a_layernorm(latent)[:, None]
        rotary = torch.cat([q_rotary, k_rotary[:, None]], dim=1)
        if sizes.interleaved:  # reorder neighboring pairs into two halves
            rotary = rotary.view(*rotary.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        q_rotary, k_rotary = torch.split(rotate(rotary, cos, sin), [self.heads, 1], dim=1)
        if isinstance(attention, PackedAttention) and not is_exact(x):
            per_head = latent.expand(-1, self.heads, -1)
            keys = self.project_to_latent.apply_transposed(latent[:, 0])
            k = torch.cat([keys, k_rotary.expand(-1, self.heads, -1)], dim=-1)
            q = torch.cat([q, q_rotary], dim=-1) * self.score_scale
            return self.out(attention(q, k, self.project_values(per_head), self.layer).flatten(1))
        q = torch.cat([self.project_to_latent(q), q_rotary], dim=-1)
        # Attention divides scores by the root of the size of these queries, not by that of a head's size.
        q = q * (self.score_scale * (q.shape[-1] / (sizes.key_size + sizes.rotary_size)) ** 0.5)
        k = torch.cat([latent, k_rotary], dim=-1)
        out = attention(q, k, k[..., : sizes.rank], self.layer)
        return self.out(self.project_values(out).flatten(1))


class HeadProjection(Projection):
    """One linear map per head: float[N, H, O] from float[N, H, I].

    Low-precision copies of the model keep these matrices in the model's dtype.

    Args:
        part: a map whose matrix stacks the matrices of the heads.
        rows: which rows of a head's matrix to apply.
        transposed: whether to apply the transpose of these rows.
    """

    def __init__(self, part: nn.Linear, heads: int, rows: slice, *, transposed: bool = False) -> None:
        super().__init__(part, exact=True)
        self._heads, self._rows, self._transposed = heads, rows, transposed
        self._frozen: Tensor | list[Any] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weights = self._matrices()
        if isinstance(weights, Tensor) and not is_exact(x):
            return torch.einsum("nhi,hoi->nho", x, weights)
        return torch.stack([linear(x[:, head], weight) for head, weight in enumerate(weights)], dim=1)

    def apply_transposed(self, x: Tensor) -> Tensor:
        """Apply each head's transposed map: float[N, H, I] from float[N, O]. The bits depend on N."""
        weights = self._matrices()
        assert isinstance(weights, Tensor)
        return torch.einsum("no,hoi->nhi", x, weights)

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        assert isinstance(source, HeadProjection)
        fresh = source.head_matrices().detach()
        if is_exact(fresh):
            self._frozen = [pack_weight(matrix)[0] for matrix in fresh]
        else:
            self._frozen = copy_in_place(self._frozen, fresh.clone(memory_format=torch.contiguous_format))

    def head_matrices(self) -> Tensor:
        """Return the current weights float[H, O, I]."""
        weight = self.get_weight(self.parts[0])
        weight = weight.view(self._heads, -1, weight.shape[1])[:, self._rows]
        return weight.transpose(1, 2) if self._transposed else weight

    def _matrices(self) -> Tensor | list[Any]:
        return self.head_matrices() if self._frozen is None else self._frozen
