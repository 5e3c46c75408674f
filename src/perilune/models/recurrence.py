"""The gated delta rule and short convolutions (Gated DeltaNet; Yang et al., arXiv 2412.06464).

A head keeps a state, the matrix S float32[Dk, Dv]. Each token multiplies S by the decay a, and then, with
strength b, changes S so that S^T k, the value stored under the token's key k, moves towards its value v:

    S <- a S;   S <- S + b k (v - S^T k)^T;   out = S^T q

Prefill, decoding and training all compute one token after the other, so a token has the same bits in all of
them. This costs little: the C kernels keep S in the processor's cache, and a token takes a few percent of the
time of its projections. Without the C kernels, torch computes the sequences of a batch in parallel.

N tokens, H value heads, KH query and key heads (H is a multiple of KH), S sequences, C channels, K width of
the convolution (taps).
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.models.card.layers import STATE_INTERVAL
from perilune.models.kernels import is_native, sigmoid
from perilune.models.native import delta


class DeltaInputs(NamedTuple):
    """Inputs of the rule, float32: q, k [N, KH, Dk], v [N, H, Dv], decay a and strength b [N, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor


class Recurrence(Protocol):
    """The recurrent layers of one forward pass. Implementations hold the states of sequences."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Apply `convolve` to float[N, C] with weights float[C, K]."""

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """Return the outputs float32[N, H, Dv] of the gated delta rule."""


@runtime_checkable
class HasRecurrence(Protocol):
    """An `Attention` for models with recurrent layers."""

    @property
    def recurrence(self) -> Recurrence:
        """The recurrent layers."""


def convolve(x: Tensor, before: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """Compute the SiLU of each channel's causal convolution: float[N, C], in float32 at least.

    Args:
        x: float[N, C].
        before: float[rows, C], inputs before those of `x`, without gradient.
        taps: int64[N, K], the rows that each token reads, its own last; from N on, the rows of `before`.
        weight: float[C, K].
    """
    if is_native(x):
        return _Convolve.apply(x, before, taps, weight)  # type: ignore[no-any-return,no-untyped-call]
    rows = torch.cat([x, before])
    mixed = reduce(torch.add, (rows[taps[:, tap]] * weight[:, tap] for tap in range(weight.shape[1])))
    mixed = mixed.to(torch.promote_types(x.dtype, torch.float32))
    return mixed * sigmoid(mixed)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(x, *rest)
        return delta.convolve(x, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = delta.convolve_backward(grad, *ctx.saved_tensors)
        return grad_x, None, None, grad_weight


class Pieces:
    """Parts of sequences, each of which continues another part or begins a sequence.

    Args:
        rows: int64[P, 4] on the CPU. For each piece: its first token, its number of tokens, the row of the
            state before it (-1 for zeros), and the row of the state after it. A piece comes after the piece
            that it continues.
    """

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self.rows, self._device = rows.contiguous(), device

    @cached_property
    def waves(self) -> list[_Wave]:
        """Groups of pieces that do not continue each other, in the order of the scan."""
        depth: dict[int, int] = {}
        waves: dict[int, list[int]] = defaultdict(list)
        for row, (_, _, begin, end) in enumerate(self.rows.tolist()):
            waves[depth.get(begin, 0)].append(row)
            depth[end] = depth.get(begin, 0) + 1
        return [_Wave(self.rows[waves[level]], self._device) for level in sorted(waves)]


class _Wave:
    """Pieces that torch scans in parallel, padded to the longest.

    Attributes:
        begins, ends: int64[S], rows of the states; -1 for zeros.
        tokens: int64[S, T].
        padding: bool[S, T].
    """

    def __init__(self, pieces: Tensor, device: torch.device) -> None:
        starts, lengths, begins, ends = pieces.T
        offset = torch.arange(int(lengths.max()))
        self.tokens = (starts[:, None] + offset.minimum(lengths[:, None] - 1)).to(device)
        self.padding = (offset >= lengths[:, None]).to(device)
        self.begins, self.ends = begins.to(device), ends.to(device)

    def first_states(self, states: Tensor) -> Tensor:
        """Return the states [S, H, Dk, Dv] before the pieces."""
        return states[self.begins.clamp(min=0)].masked_fill_((self.begins < 0)[:, None, None, None], 0.0)

    def split_steps(self, inputs: DeltaInputs) -> list[DeltaInputs]:
        """Return the inputs of each of T steps, with one query and key per value head."""
        shared = inputs.v.shape[1] // inputs.q.shape[1]
        q, k, v, decay, strength = (x[self.tokens] for x in inputs)
        q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
        # A padding token does not change the state.
        decay = decay.masked_fill(self.padding[..., None], 1.0)
        strength = strength.masked_fill(self.padding[..., None], 0.0)
        steps = zip(*(x.unbind(1) for x in (q, k, v, decay, strength)), strict=True)
        return [DeltaInputs(*step) for step in steps]

    def add_steps(self, to: Tensor, steps: list[Tensor]) -> None:
        """Write values [S, ...] of each step to the rows of their tokens in `to`.

        Gradients of queries and keys are summed over the value heads that share them.
        """
        real = ~self.padding
        values = torch.stack(steps, dim=1)[real]
        to[self.tokens[real]] = values.view(len(values), *to.shape[1:-1], -1, to.shape[-1]).sum(-2)


def _delta_step(state: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return outputs [S, H, Dv] and new states [S, H, Dk, Dv] for one token of each of S sequences.

    torch sums over Dk, which is not the last axis. The order of such a sum depends on the sizes of a head
    and not on the number of sequences.
    """
    q, k, v, decay, strength = inputs
    state = state * decay[..., None, None]
    recalled = (state * k[..., None]).sum(-2)
    change = (v - recalled) * strength[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (state * q[..., None]).sum(-2), state


def scan(inputs: DeltaInputs, states: Tensor, pieces: Pieces) -> Tensor:
    """Return the outputs [N, H, Dv] of the gated delta rule, zero for tokens outside all pieces.

    Args:
        states: [rows, H, Dk, Dv], which pieces read at their start and write at their end.
    """
    if is_native(inputs.v):
        return delta.scan(inputs, states, pieces.rows)
    out = torch.zeros_like(inputs.v)
    for wave in pieces.waves:
        state, outs = wave.first_states(states), []
        for step in wave.split_steps(inputs):
            step_out, state = _delta_step(state, step)
            outs.append(step_out)
        wave.add_steps(out, outs)
        states[wave.ends] = state
    return out


class _Scan(torch.autograd.Function):
    """`scan` with its gradient, which keeps the last state of each piece and recomputes the others."""

    @staticmethod
    def forward(ctx: Any, pieces: Pieces, *inputs: Tensor) -> Tensor:
        named = DeltaInputs(*inputs)
        states = named.v.new_empty(len(pieces.rows), named.v.shape[1], named.q.shape[2], named.v.shape[2])
        out = scan(named, states, pieces)
        ctx.pieces = pieces
        ctx.save_for_backward(states, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, *saved = ctx.saved_tensors
        inputs = DeltaInputs(*saved)
        if is_native(inputs.v):
            return None, *delta.scan_backward(grad, inputs, states, ctx.pieces.rows)
        grads, grad_states = [torch.zeros_like(x) for x in inputs], torch.zeros_like(states)
        for wave in reversed(ctx.pieces.waves):
            grad_steps = grad[wave.tokens].masked_fill(wave.padding[..., None, None], 0.0).unbind(1)
            step_grads, start_grads = _steps_backward(
                wave.first_states(states), wave.split_steps(inputs), grad_steps, grad_states[wave.ends]
            )
            for total, steps in zip(grads, zip(*step_grads, strict=True), strict=True):
                wave.add_steps(total, list(steps))
            continued = wave.begins >= 0
            grad_states.index_add_(0, wave.begins[continued], start_grads[continued])
        return None, *grads


def _steps_backward(
    state: Tensor, steps: list[DeltaInputs], grad_out: tuple[Tensor, ...], grad: Tensor
) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Return the gradients of the inputs of each step, and of the first state.

    With C the change that a token makes, b (v - S^T k), and d the gradients, from the last token on:

        dS += q do^T;  dq = S do;  dC = dS^T k;  dk = dS C;  db = dC (v - S'^T k);  dv = b dC
        dS' = dS - k (b dC)^T;  dk -= S' (b dC);  da = sum(dS' * S_before);  dS_before = a dS'

    with S' = a S_before, the state after the decay of this token.
    """
    states = [state]
    for step in steps:
        states.append(_delta_step(states[-1], step)[1])
    gradients: list[tuple[Tensor, ...]] = []
    for step, grad_step in zip(reversed(steps), reversed(grad_out), strict=True):
        q, k, v, decay, strength = step
        after, before = states.pop(), states[-1]
        decayed = before * decay[..., None, None]
        error = v - (decayed * k[..., None]).sum(-2)
        grad = grad + q[..., None] * grad_step[..., None, :]
        grad_q = (after * grad_step[..., None, :]).sum(-1)
        grad_change = (grad * k[..., None]).sum(-2)
        grad_v = grad_change * strength[..., None]
        change = error * strength[..., None]
        grad_k = (grad * change[..., None, :]).sum(-1) - (decayed * grad_v[..., None, :]).sum(-1)
        grad = grad - k[..., None] * grad_v[..., None, :]
        grad_decay, grad_strength = (grad * before).sum((-2, -1)), (grad_change * error).sum(-1)
        gradients.append((grad_q, grad_k, grad_v, grad_decay, grad_strength))
        grad = grad * decay[..., None, None]
    return gradients[::-1], grad


class PackedRecurrence:
    """Recurrent layers over concatenated sequences, each of which may continue a prefix of another.

    A prefix is computed once. A sequence can continue the prefix from any position, and starts with its state
    there.

    Args:
        spans: int64[S, 4], start, length, start of the prefix and length of the prefix of each sequence. They
            cover all tokens, and the prefix of a sequence has no prefix itself.
    """

    def __init__(self, spans: Tensor, device: torch.device) -> None:
        self._spans, self._device = spans[spans[:, 1] > 0], device
        self._taps: dict[int, Tensor] = {}
        self._pieces = Pieces(self._cut_pieces(), device)

    def _cut_pieces(self) -> Tensor:
        """Return the rows of `Pieces`, which end where a state is needed. State rows are piece numbers."""
        rows: list[tuple[int, int, int, int]] = []
        spans = self._spans.tolist()
        ends = {(prefix_start, prefix) for _, _, prefix_start, prefix in spans if prefix}
        reached: dict[tuple[int, int], int] = {}
        for start, length, prefix_start, prefix in sorted(spans, key=lambda span: span[3] > 0):
            begin = reached[prefix_start, prefix] if prefix else -1
            needed = {end for parent, end in ends if parent == start and not prefix}
            for first, last in pairwise(sorted({*range(0, length, STATE_INTERVAL), length, *needed})):
                rows.append((start + first, last - first, begin, len(rows)))
                begin = len(rows) - 1
                if not prefix:
                    reached[start, last] = begin
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        if width not in self._taps:
            self._taps[width] = self._make_taps(width).to(self._device)
        return convolve(x, x.new_zeros(1, x.shape[1]), self._taps[width], weight)

    def _make_taps(self, width: int) -> Tensor:
        """Return int64[N, K]: the tokens that each token reads, its own last; N where a sequence has none."""
        starts, lengths, prefix_starts, prefixes = self._spans.T
        count = int(lengths.sum())
        taps = torch.empty(count, width, dtype=torch.int64)
        sequence = torch.repeat_interleave(lengths)
        tokens = torch.cat([torch.arange(s, s + n) for s, n in self._spans[:, :2].tolist()])
        offset = (tokens - starts[sequence])[:, None] + torch.arange(1 - width, 1)
        before = prefixes[sequence, None] + offset
        earlier = torch.where(before >= 0, prefix_starts[sequence, None] + before, count)
        taps[tokens] = torch.where(offset >= 0, starts[sequence, None] + offset, earlier)
        return taps

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        out: Tensor = _Scan.apply(self._pieces, *inputs)  # type: ignore[no-untyped-call]
        return out
