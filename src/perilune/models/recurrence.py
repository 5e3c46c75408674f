"""The gated delta rule and short convolutions (Gated DeltaNet; Yang et al., arXiv 2412.06464).

A head keeps a matrix S, float32[Dk, Dv]. Each token multiplies S by a decay, then moves the result of S for
the token's key towards the token's value:

    S <- a S;   S <- S + b k (v - S^T k)^T;   out = S^T q

Prefill, decoding and training all compute one token after the other, so a token has the same bits in all of
them. torch sums over Dk, which is not the last axis. The order of such a sum depends on the sizes of a head
and not on the number of sequences.

N tokens, H heads, S sequences, C channels, K taps of a convolution.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.models.card.layers import STATES_KEPT_EVERY


class DeltaInputs(NamedTuple):
    """Inputs of the rule, float32: q, k [N, H, Dk], v [N, H, Dv], decay a and strength b [N, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor


class Recurrence(Protocol):
    """The recurrent layers of one forward pass. The implementation holds the states of sequences."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Causal convolution of each channel: float[N, C] from float[N, C] with taps float[C, K]."""

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """The outputs float32[N, H, Dv] of the gated delta rule."""


@runtime_checkable
class HasRecurrence(Protocol):
    """An `Attention` for models with recurrent layers."""

    @property
    def recurrence(self) -> Recurrence:
        """The recurrent layers."""


def delta_step(state: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Outputs [S, H, Dv] and new states [S, H, Dk, Dv] of one token of each of S sequences."""
    q, k, v, decay, strength = inputs
    state = state * decay[..., None, None]
    found = (state * k[..., None]).sum(-2)
    change = (v - found) * strength[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (state * q[..., None]).sum(-2), state


def convolve_rows(rows: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """float[N, C]: the sum of the rows int64[N, K] of float[M, C] times float[C, K], in the order of taps."""
    return reduce(torch.add, (rows[taps[:, tap]] * weight[:, tap] for tap in range(weight.shape[1])))


class PackedRecurrence:
    """Recurrent layers over sequences that lie end to end, each of which may continue a prefix of another.

    A prefix is computed once. A sequence can continue it from any position, and starts from the state there.

    Args:
        spans: int64[S, 4], start, length, start of the prefix and length of the prefix of each sequence. They
            cover all tokens, and the prefix of a sequence has no prefix itself.
    """

    def __init__(self, spans: Tensor) -> None:
        self._spans = spans[spans[:, 1] > 0]
        self._taps: dict[int, Tensor] = {}
        continued = self._spans[:, 3] > 0
        roots, rest = self._spans[~continued], self._spans[continued]
        ends = {(start, length) for start, length in rest[:, 2:].tolist()}
        self._roots, self._rest = _Sequences(roots, ends), _Sequences(rest, set())
        rows = torch.cat([self._roots.tokens, self._rest.tokens])
        real = (rows >= 0).nonzero()[:, 0]
        self._row_of = torch.empty(len(real), dtype=torch.int64)
        self._row_of[rows[real]] = real

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        if width not in self._taps:
            self._taps[width] = self._make_taps(width).to(x.device)
        return convolve_rows(torch.cat([x, x.new_zeros(1, x.shape[1])]), self._taps[width], weight)

    def _make_taps(self, width: int) -> Tensor:
        """int64[N, K], the tokens that each token sees, the last of which is its own; N before the first."""
        starts, lengths, prefix_starts, prefixes = self._spans.T
        count = int(lengths.sum())
        taps = torch.empty(count, width, dtype=torch.int64)
        of = torch.repeat_interleave(lengths)
        tokens = torch.cat([torch.arange(s, s + n) for s, n in self._spans[:, :2].tolist()])
        at = (tokens - starts[of])[:, None] + torch.arange(1 - width, 1)
        before = prefixes[of, None] + at
        earlier = torch.where(before >= 0, prefix_starts[of, None] + before, count)
        taps[tokens] = torch.where(at >= 0, starts[of, None] + at, earlier)
        return taps

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        sizes = inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[2]
        zero = inputs.v.new_zeros(self._roots.count, *sizes)
        outs, states = self._roots.scan(inputs, zero)
        if self._rest.count:
            begin = torch.stack([states[key] for key in self._rest.prefixes])
            outs += self._rest.scan(inputs, begin)[0]
        return torch.cat(outs)[self._row_of.to(inputs.v.device)]


class _Sequences:
    """Sequences that are scanned together, the longest first.

    Args:
        spans: as for `PackedRecurrence`.
        ends: (start, length) of the prefixes of these sequences whose final state is needed.

    Attributes:
        prefixes: (start, length) of the prefix of each sequence, in the order of the scan.
        tokens: the token of each row that `scan` returns, or -1 for padding.
    """

    def __init__(self, spans: Tensor, ends: set[tuple[int, int]]) -> None:
        spans = spans[spans[:, 1].argsort(descending=True, stable=True)]
        self.count = len(spans)
        starts, lengths = spans[:, 0], spans[:, 1]
        self.prefixes: list[tuple[int, int]] = [(start, length) for start, length in spans[:, 2:].tolist()]
        longest = int(lengths.max()) if len(spans) else 0
        bounds = sorted({*range(0, longest, STATES_KEPT_EVERY), longest, *(length for _, length in ends)})
        row_of = {start: row for row, start in enumerate(starts.tolist())}
        self._chunks: list[tuple[Tensor, Tensor, dict[tuple[int, int], int]]] = []
        for first, last in pairwise(bounds):
            active = int((lengths > first).sum())
            at = torch.arange(first, last)
            padding = at >= lengths[:active, None]
            tokens = torch.where(padding, starts[:active, None], starts[:active, None] + at)
            kept = {(start, length): row_of[start] for start, length in ends if length == last}
            self._chunks.append((tokens, padding, kept))
        rows = [torch.where(padding, -1, tokens).flatten() for tokens, padding, _ in self._chunks]
        self.tokens = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    def scan(self, inputs: DeltaInputs, state: Tensor) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
        """Outputs [rows, H, Dv] in parts, and the states after the `ends`, from the first states [S, ...]."""
        outs: list[Tensor] = []
        states: dict[tuple[int, int], Tensor] = {}
        for chunk_tokens, chunk_padding, kept in self._chunks:
            tokens, padding = chunk_tokens.to(state.device), chunk_padding.to(state.device)
            chunk = DeltaInputs(*(x[tokens] for x in inputs))
            if padding.any():  # a padding token does not change the state
                chunk = chunk._replace(
                    decay=chunk.decay.masked_fill(padding[..., None], 1.0),
                    strength=chunk.strength.masked_fill(padding[..., None], 0.0),
                )
            state = state[: len(tokens)]
            out, state = _Chunk.apply(state, *chunk)  # type: ignore[no-untyped-call]
            outs.append(out.flatten(0, 1))
            states |= {key: state[row] for key, row in kept.items()}
        return outs, states


class _Chunk(torch.autograd.Function):
    """Outputs [S, T, H, Dv] and last states of T tokens of each sequence, from inputs [S, T, ...].

    Only the first states are saved. The backward pass recomputes the others. With C the change that a
    token makes, b (v - S^T k), and d the gradients, from the last token to the first:

        dS += q do^T;  dq = S do;  dC = dS^T k;  dk = dS C;  db = dC (v - S'^T k);  dv = b dC
        dS' = dS - k (b dC)^T;  dk -= S' (b dC);  da = sum(dS' * S_before);  dS_before = a dS'

    with S' = a S_before, the state after the decay of this token.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state, *chunk)
        outs: list[Tensor] = []
        for token in zip(*(x.unbind(1) for x in chunk), strict=True):
            out, state = delta_step(state, DeltaInputs(*token))
            outs.append(out)
        return torch.stack(outs, dim=1), state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        state, *chunk = ctx.saved_tensors
        tokens = [DeltaInputs(*token) for token in zip(*(x.unbind(1) for x in chunk), strict=True)]
        states = [state]
        for token in tokens:
            states.append(delta_step(states[-1], token)[1])
        gradients: list[tuple[Tensor, ...]] = []
        for token, own in zip(reversed(tokens), reversed(grad_out.unbind(1)), strict=True):
            q, k, v, decay, strength = token
            after, before = states.pop(), states[-1]
            decayed = before * decay[..., None, None]
            error = v - (decayed * k[..., None]).sum(-2)
            grad = grad + q[..., None] * own[..., None, :]
            grad_q = (after * own[..., None, :]).sum(-1)
            grad_change = (grad * k[..., None]).sum(-2)
            grad_v = grad_change * strength[..., None]
            change = error * strength[..., None]
            grad_k = (grad * change[..., None, :]).sum(-1) - (decayed * grad_v[..., None, :]).sum(-1)
            grad = grad - k[..., None] * grad_v[..., None, :]
            grad_decay, grad_strength = (grad * before).sum((-2, -1)), (grad_change * error).sum(-1)
            gradients.append((grad_q, grad_k, grad_v, grad_decay, grad_strength))
            grad = grad * decay[..., None, None]
        stacked = (torch.stack(of_input, dim=1) for of_input in zip(*reversed(gradients), strict=True))
        return grad, *stacked
