"""The sampler draws tokens from logits and computes their log-probs.

It inverts the cumulative distribution at a random number that depends only on the request (see `random.py`),
so equal logits give the same token in every batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.constraints import mask_logits
from perilune.engine.request import SamplingParams
from perilune.engine.sequences import Rows, Sequences
from perilune.models.kernels import is_native
from perilune.models.logprobs import gather_logprobs, token_logprobs
from perilune.models.native import ops

_RUN_TOKENS = 128  # divides most vocabulary sizes, so logits need no padding
_NUCLEUS_CANDIDATES = 256  # most likely tokens that are searched for top-p before all tokens are sorted


@dataclass(slots=True, eq=False)
class DrawnTokens:
    """One token of each of D samples.

    Attributes:
        token_ids: int64[D].
        logprobs: float32[D] under the distribution drawn from.
        raw_logprobs: log-probs under the model's own distribution, by index of the sample, if requested.
        top_logprobs: the most likely tokens with their log-probs, by index of the sample, if requested.
            Tokens that the options exclude are missing.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    raw_logprobs: dict[int, float]
    top_logprobs: dict[int, list[tuple[int, float]]]


class Sampler:
    """Draws the next token of each sample with the sample's options."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def draw(
        self,
        logits: Tensor,
        rows: Rows,
        logits_of: NDArray[np.int64] | None,
        masks: Mapping[int, NDArray[np.int32]],
    ) -> DrawnTokens:
        """Draw for each of the samples in `rows`.

        Args:
            logits: float32[R, V]; may be overwritten.
            rows: int64[D].
            logits_of: int64[D], the row of logits of each sample; None when sample i uses row i.
            masks: the tokens that constraints allow, by row, for samples with a constraint.
        """
        if not len(rows):  # the step only computed parts of prompts
            return DrawnTokens(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), {}, {})
        sequences = self._sequences
        uniforms = sequences.uniforms(rows)
        scale = sequences.scale[rows]
        if sequences.plain[rows].all():
            tokens, logprobs = draw_plain(logits, uniforms, scale, logits_of)
            return DrawnTokens(tokens, logprobs, {}, {})
        if logits_of is not None:
            logits = logits[_to_device(logits_of, logits)]
        return self._draw_with_options(logits, rows, scale, uniforms, masks)

    def _draw_with_options(
        self,
        logits: Tensor,
        rows: Rows,
        scale: NDArray[np.float32],
        uniforms: NDArray[np.float64],
        masks: Mapping[int, NDArray[np.int32]],
    ) -> DrawnTokens:
        sequences = self._sequences
        special = np.flatnonzero(~sequences.plain[rows])
        params = [_params(sequences, row) for row in rows[special].tolist()]
        with_raw = [index for index, item in zip(special.tolist(), params, strict=True) if item.raw_logprobs]
        raw = logits[with_raw] if with_raw else None  # a copy

        special_rows = rows[special]
        changed = logits[_to_device(special, logits)]
        changed = self._apply_penalties(changed, special_rows, params, masks)
        changed = _apply_scale(changed, scale[special])
        changed = _truncate(changed, sequences, special_rows)
        logits[_to_device(special, logits)] = changed
        remaining_scale = scale.copy()
        remaining_scale[special] = scale[special] != 0

        tokens, logprobs = draw_plain(logits, uniforms, remaining_scale)
        drawn = DrawnTokens(tokens, logprobs, {}, {})
        if raw is not None:
            raw_logprobs = token_logprobs(raw, _to_device(tokens[with_raw], raw))[0].tolist()
            drawn.raw_logprobs = dict(zip(with_raw, raw_logprobs, strict=True))
        for index, options in zip(special.tolist(), params, strict=True):
            if options.top_logprobs:
                best = logits[index].topk(min(options.top_logprobs, logits.shape[1])).indices
                top, _ = token_logprobs(logits[index].expand(len(best), -1), best)
                likely = zip(best.tolist(), top.tolist(), strict=True)
                drawn.top_logprobs[index] = [(token, value) for token, value in likely if value > -math.inf]
        return drawn

    def _apply_penalties(
        self,
        logits: Tensor,
        rows: Rows,
        params: Sequence[SamplingParams],
        masks: Mapping[int, NDArray[np.int32]],
    ) -> Tensor:
        """Apply penalties, bias, minimum length and constraint to logits float32[B, V]."""
        sequences, device = self._sequences, logits.device
        penalty = sequences.repetition_penalty[rows]
        if (penalty != 1).any():
            width = int(sequences.length[rows].max())
            tokens = sequences.tokens[rows, :width].astype(np.int64)
            tokens = np.where(np.arange(width) < sequences.length[rows][:, None], tokens, tokens[:, :1])
            ids, factor = _to_device(tokens, logits), _to_device(penalty, logits)[:, None]
            scores = logits.gather(1, ids)
            logits = logits.scatter(1, ids, torch.where(scores > 0, scores / factor, scores * factor))
        for index, options in enumerate(params):
            if options.presence_penalty or options.frequency_penalty:
                tokens, counts = np.unique(sequences.sampled_tokens(int(rows[index])), return_counts=True)
                penalties = (options.frequency_penalty * counts + options.presence_penalty).astype(np.float32)
                ids = _to_device(tokens.astype(np.int64), logits)
                logits[index, ids] -= _to_device(penalties, logits)
            if options.logit_bias:
                ids = torch.tensor(list(options.logit_bias), device=device)
                logits[index, ids] += torch.tensor(list(options.logit_bias.values()), device=device)
        for index in np.flatnonzero(sequences.length[rows] < sequences.min_length[rows]).tolist():
            stops = sequences.stop_ids[rows[index]]
            logits[index, _to_device(stops[stops >= 0], logits)] = -torch.inf
        constrained = [index for index, row in enumerate(rows.tolist()) if row in masks]
        if constrained:
            allowed = np.stack([masks[int(rows[index])] for index in constrained])
            logits[constrained] = mask_logits(logits[constrained], allowed)
        return logits


def draw_ahead(sequences: Sequences, logits: Tensor, rows: Rows, ahead: int) -> NDArray[np.int64]:
    """Guess the tokens int64[B] that `Sampler.draw` will draw `ahead` positions after the next token.

    Penalties, biases and constraints are left out: they may depend on the tokens in between.

    Args:
        logits: float32[B, V] of a draft; may be overwritten.
    """
    uniforms, scale = sequences.uniforms(rows, ahead), sequences.scale[rows]
    if not sequences.plain[rows].all():
        logits = _truncate(_apply_scale(logits, scale), sequences, rows)
        scale = (scale != 0).astype(np.float32)
    return draw_plain(logits, uniforms, scale)[0]


def draw_plain(
    logits: Tensor,
    uniforms: NDArray[np.float64],
    scale: NDArray[np.float32],
    logits_of: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw with temperature as the only option, as in most rollouts.

    Args:
        logits: float32[R, V].
        uniforms: float64[D] in [0, 1).
        scale: float32[D], 1 / temperature; 0 takes the most likely token.
        logits_of: int64[D], the row of logits of each draw; None when draw i uses row i.

    Returns:
        tokens int64[D] and their log-probs float32[D].
    """
    if is_native(logits):
        tokens, logprobs = ops.draw(
            logits,
            torch.from_numpy(scale),
            torch.from_numpy(uniforms),
            None if logits_of is None else torch.from_numpy(logits_of),
        )
        return tokens.numpy(), logprobs.numpy()
    if logits_of is not None:
        logits = logits[_to_device(logits_of, logits)]
    distribution = torch.log_softmax(_apply_scale(logits, scale), dim=-1)
    if not scale.any():
        picked = distribution.argmax(-1)
    else:
        picked = draw(distribution, _to_device(uniforms, logits))
        if not scale.all():
            greedy = _to_device(scale == 0, logits)
            picked = torch.where(greedy, distribution.argmax(-1), picked)
    return _to_host(picked, gather_logprobs(distribution, picked))


def _to_device(array: NDArray[Any], like: Tensor) -> Tensor:
    """Copy an array to the device of `like`. Pinned memory avoids waiting for the GPU's other work."""
    tensor = torch.from_numpy(array)
    if like.device.type != "cuda":
        return tensor.to(like.device)
    return tensor.pin_memory().to(like.device, non_blocking=True)


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Copy both in one transfer, so that a step waits for the GPU once. float64 represents both exactly."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), logprobs.numpy()
    stacked = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
    return stacked[0].astype(np.int64), stacked[1].astype(np.float32)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution.

    Args:
        logprobs: float32[B, V].
        uniform: float64[B] in [0, 1).

    Returns:
        int64[B], the drawn tokens; the last token where log-probs are NaN.

    A token of probability zero is never drawn. Sums are float64, so that rounding moves no boundary by more
    than the resolution of the uniform numbers.
    """
    if logprobs.device.type == "cuda":
        return _draw_in_two_steps(logprobs, uniform)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return token.clamp_(max=logprobs.shape[-1] - 1)


def _draw_in_two_steps(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Compute `draw` with shorter cumulative sums: first select a run of tokens, then a token of this run."""
    count = logprobs.shape[-1]
    if count % _RUN_TOKENS:
        logprobs = F.pad(logprobs, (0, -count % _RUN_TOKENS), value=-torch.inf)
    probabilities = logprobs.exp().view(len(logprobs), -1, _RUN_TOKENS)
    runs = probabilities.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold = uniform[:, None] * runs[:, -1:]
    run = torch.searchsorted(runs, threshold, right=True).clamp_(max=runs.shape[-1] - 1)
    before = F.pad(runs, (1, 0)).gather(-1, run)
    sums = probabilities.take_along_dim(run[:, :, None], dim=1)[:, 0].cumsum(-1, dtype=torch.float64) + before
    # Sums in another order may differ in the last bit. Then the last token of positive probability is drawn.
    last = _RUN_TOKENS - (sums >= sums[:, -1:]).sum(-1)
    token = torch.minimum(torch.searchsorted(sums, threshold, right=True)[:, 0], last)
    return (run[:, 0] * _RUN_TOKENS + token).clamp_(max=count - 1)


def _params(sequences: Sequences, row: int) -> SamplingParams:
    entry = sequences.entries[row]
    assert entry is not None
    return entry.request.params


def _apply_scale(logits: Tensor, scale: NDArray[np.float32]) -> Tensor:
    """Compute `apply_temperature` for rows with scales 1 / temperature float32[B]; 0 (greedy) counts as 1."""
    changed = (scale != 0) & (scale != 1)
    if not changed.any():
        return logits
    factor, is_changed = (_to_device(x, logits)[:, None] for x in (scale, changed))
    return torch.where(is_changed, (logits - logits.amax(-1, keepdim=True)) * factor, logits)


def _truncate(logits: Tensor, sequences: Sequences, rows: Rows) -> Tensor:
    """Return scaled logits float32[B, V] with -inf for tokens that top-k, top-p and min-p exclude."""
    k, p, share = sequences.top_k[rows], sequences.top_p[rows], sequences.min_p[rows]
    vocab_size = logits.shape[1]
    limited = np.flatnonzero((k > 0) & (k < vocab_size))
    if len(limited):
        selected = _to_device(limited, logits)
        part = logits[selected]
        best = part.topk(int(k[limited].max())).values
        threshold = best.gather(1, _to_device(k[limited] - 1, logits)[:, None])
        logits[selected] = part.masked_fill(part < threshold, -torch.inf)
    nucleus = np.flatnonzero(p < 1)
    if len(nucleus):
        selected = _to_device(nucleus, logits)
        part = logits[selected]
        threshold = _nucleus_threshold(part, _to_device(p[nucleus], logits)[:, None])
        logits[selected] = part.masked_fill(part < threshold, -torch.inf)
    if (share > 0).any():
        floor = np.log(share, out=np.full_like(share, -np.inf), where=share > 0)  # 0 excludes no token
        threshold = _to_device(floor, logits)[:, None]
        logits = logits.masked_fill(logits < logits.max(-1, keepdim=True).values + threshold, -torch.inf)
    return logits


def _nucleus_threshold(logits: Tensor, p: Tensor) -> Tensor:
    """Return float32[B, 1], the smallest logit of the smallest set of tokens with total probability p."""
    count = min(_NUCLEUS_CANDIDATES, logits.shape[1])
    while True:
        best = logits.topk(count).values
        mass = (best - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        if count == logits.shape[1] or bool((mass[:, -1:] >= p).all()):
            break
        count = logits.shape[1]
    last = (mass < p).sum(-1, keepdim=True).clamp_(max=count - 1)
    return best.gather(1, last)
