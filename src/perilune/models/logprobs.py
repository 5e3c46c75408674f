"""Log-probs of tokens, for both the engine and the learner."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from perilune.models.kernels import is_native
from perilune.models.memory import MAX_LOGITS_PER_CHUNK, MAX_LOGITS_PER_CHUNK_ON_GPU
from perilune.models.native import ops

_ROW_MULTIPLE = 256  # a multiple of the number of rows that matrix units of processors compute at a time


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits float[N, V] by the temperature, in float32 at least. Temperature 0 (greedy) counts as 1.

    The largest logit is subtracted before the division. Otherwise a temperature of 1e-6 would turn the
    rounding errors of large logits into whole nats.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature in (0, 1):
        return logits
    return (logits - logits.detach().amax(-1, keepdim=True)) * (1 / temperature)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Compute log-probs [N, V] of all tokens, in float32 at least. Temperature 0 (greedy) counts as 1."""
    return F.log_softmax(apply_temperature(logits, temperature), dim=-1)


def gather_logprobs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """Return float32[N]: the entry of each row of float32[N, V] at int64[N]."""
    return logprobs.gather(-1, token_ids[:, None])[:, 0]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target and the entropy (nats) of each distribution.

    Args:
        logits: float[N, V].
        targets: int64[N].
        temperature: divides the logits, as in sampling; 0 (greedy) counts as 1.

    Returns:
        log-probs float32[N], differentiable, and entropies float32[N], without gradient.
    """
    temperature = temperature or 1.0
    if is_native(logits):
        return _NativeLogprobs.apply(logits, targets, temperature)  # type: ignore[no-any-return,no-untyped-call]
    scaled = apply_temperature(logits.float(), temperature)
    return _TorchLogprobs.apply(scaled, targets)  # type: ignore[no-any-return,no-untyped-call]


class _NativeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, normalizers, entropy = ops.token_logprobs(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, normalizers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        gradient = ops.token_logprobs_backward(gradients[0], logits, targets, ctx.temperature, normalizers)
        return gradient, None, None


class _TorchLogprobs(torch.autograd.Function):
    """The forward pass computes one softmax, which the backward pass reuses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        picked = gather_logprobs(logprobs, targets)
        probabilities = logprobs.exp()
        entropy = logprobs.mul_(probabilities).sum(1).neg_()
        ctx.save_for_backward(probabilities, targets)
        ctx.mark_non_differentiable(entropy)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probabilities, targets = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        out = probabilities * -gradient
        out.scatter_add_(1, targets.unsqueeze(1), gradient)
        return out, None


def compute_in_row_chunks(
    of_rows: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], logits_per_row: int
) -> tuple[Tensor, ...]:
    """Compute `of_rows(*columns)`, in chunks of rows when the logits would be large.

    N V logits and their gradient take gigabytes, although only one number per row is needed. In chunks,
    memory grows with N and with V but not with their product. In exchange, training recomputes the logits in
    the backward pass, and the head takes about two thirds longer. Rows do not depend on each other, so the
    values are the same as without chunks. The gradient of the head is the sum over the chunks.

    Args:
        of_rows: maps tensors with n rows to tensors with n rows.
        columns: tensors with N rows, such as hidden states float[N, d] and targets int64[N].
        logits_per_row: number of logits that `of_rows` computes for a row: V for one distribution.
    """
    first = columns[0]
    limit = MAX_LOGITS_PER_CHUNK_ON_GPU if first.device.type == "cuda" else MAX_LOGITS_PER_CHUNK
    rows = max(1, limit // logits_per_row)
    rows = rows // _ROW_MULTIPLE * _ROW_MULTIPLE or rows
    if len(first) <= rows:
        return of_rows(*columns)
    training = torch.is_grad_enabled()
    parts = [
        checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False)
        if training
        else of_rows(*part)
        for part in zip(*(torch.split(column, rows) for column in columns), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
