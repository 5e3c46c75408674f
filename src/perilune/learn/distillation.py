"""Distillation on the student's own tokens: losses and diagnostics.

p and q are the distributions of student and teacher over the next token, after the student's tokens. M is the
number of learned tokens, V the size of the vocabulary.

    reverse_kl    policy gradient with A_t = -coefficient * stop_gradient(log p - log q) at the sampled token
    reverse_topk  KL(p' || q') on the k likeliest tokens of p, both renormalized on them (arXiv 2604.13016)
    forward_topk  sum over the k likeliest tokens of q of q (log q - log p), not renormalized (verl)
    gkd           beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p; beta 0 is KL(q || p) and
                  beta 1 KL(p || q), which the formula does not cover (arXiv 2306.13649, eq. 2)

reverse_kl needs a policy gradient, because the expected gradient of log p - log q at sampled tokens is 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.learn.batch import PackedBatch, pack_each, split_by_cost
from perilune.learn.losses import MAX_LOG_RATIO
from perilune.learn.trainer import Learner, predicting_states
from perilune.models.decoder import Decoder
from perilune.models.logprobs import compute_in_row_chunks, gather_logprobs, log_distribution
from perilune.models.memory import DISTILLATION_ROW

DistillationKind = Literal["reverse_kl", "reverse_topk", "forward_topk", "gkd"]


@dataclass(frozen=True, slots=True)
class Distillation:
    """A distillation loss and its constants.

    Attributes:
        k: number of tokens in the top-k losses and the overlap figures.
        beta: beta of gkd, from 0 (forward KL) to 1 (reverse KL).
        coefficient: coefficient of log q - log p in the advantages of reverse_kl.
        temperature: sampling temperature; both distributions use it.
    """

    kind: DistillationKind
    k: int = 16
    beta: float = 0.5
    coefficient: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class DistillationBatch:
    """One micro-batch, packed for the student and for the teacher.

    Attributes:
        student, teacher: the same episodes in the same order, with the same learned tokens. Prompts may
            differ.
        advantages: float32[episodes], from the task's reward; 0 without a task reward.
    """

    student: PackedBatch
    teacher: PackedBatch
    advantages: Tensor


def split_chunks(
    episodes: Sequence[Episode],
    teacher_prompts: Sequence[Sequence[int]],
    token_budget: int,
    *,
    advantages: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Iterator[DistillationBatch]:
    """Split a step's episodes into micro-batches of at most `token_budget` tokens for student and teacher.

    Episodes without sampled tokens, such as those that failed before their first turn, are left out.

    Args:
        teacher_prompts: the tokens of the prompts that the teacher sees instead of the episodes' prompts.
        advantages: one for each episode, from the task's reward; None for 0.
    """
    gains = [0.0] * len(episodes) if advantages is None else advantages
    items = [
        (episode, replace(episode, prompt_ids=np.asarray(prompt, np.int32)), gain)
        for episode, prompt, gain in zip(episodes, teacher_prompts, gains, strict=True)
        if episode.loss_mask.any()
    ]

    def cost(item: tuple[Episode, Episode, float]) -> int:
        student, teacher, _ = item
        return max(len(student.prompt_ids), len(teacher.prompt_ids)) + len(student.token_ids)

    for batch in split_by_cost(items, cost, token_budget):
        yield _pack_batch(batch, temperature)


def _pack_batch(items: Sequence[tuple[Episode, Episode, float]], temperature: float) -> DistillationBatch:
    def packed(episodes: Sequence[Episode]) -> PackedBatch:
        (batch,) = pack_each(episodes, sum(len(e.prompt_ids) + len(e.token_ids) for e in episodes))
        return replace(batch, temperature=temperature)

    student, teacher = packed([s for s, _, _ in items]), packed([t for _, t, _ in items])
    if not torch.equal(student.targets, teacher.targets):
        raise AssertionError("the batches of student and teacher have different learned tokens")
    return DistillationBatch(student, teacher, torch.tensor([gain for *_, gain in items]))


def distill(
    learner: Learner, teacher: Decoder, parts: Iterable[DistillationBatch], loss: Distillation, tokens: int
) -> dict[str, float]:
    """Add the gradient of one step to the learner's parameters.

    Args:
        tokens: number of learned tokens in the step, over which the loss is a mean.

    Returns:
        loss, tokens, and the means of the `Diagnostics` over the step.
    """
    parts = list(parts)
    by_episodes = {part.student.episode_ids: part for part in parts}
    # Models of a family may pad the same vocabulary to different sizes.
    size = min(teacher.config.vocab_size, learner.decoder.config.vocab_size)

    def of_rows(
        hidden: Tensor, states: Tensor, targets: Tensor, old_logprobs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            q = log_distribution(teacher.logits(states)[:, :size], loss.temperature)
        p = log_distribution(learner.trained.logits(hidden)[:, :size], loss.temperature)
        losses = token_losses(p, q, targets, old_logprobs, advantages, loss)
        with torch.no_grad():  # last, so that the backward pass does not recompute the diagnostics
            return losses, *diagnostics(p.detach(), q, targets, loss.k)

    def objective(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        part = by_episodes[batch.episode_ids]
        with torch.no_grad():
            states = predicting_states(teacher, part.teacher.to(hidden.device))
        advantages = part.advantages.to(hidden.device)[batch.episode_of]
        columns = (hidden, states, batch.targets, batch.old_logprobs, advantages)
        logits = DISTILLATION_ROW * teacher.config.vocab_size
        losses, *figures = compute_in_row_chunks(of_rows, columns, logits)
        sums = {name: figure.sum() for name, figure in zip(Diagnostics._fields, figures, strict=True)}
        return losses.sum() / tokens, sums

    totals = learner.forward_backward_custom([part.student for part in parts], objective)
    return _means(totals, loss.k)


def token_losses(  # noqa: PLR0917
    p: Tensor, q: Tensor, targets: Tensor, old_logprobs: Tensor, advantages: Tensor, loss: Distillation
) -> Tensor:
    """Compute the loss of each token, float[M].

    Args:
        p, q: float[M, V] log-probs of student and teacher; the teacher's carry no gradient.
        targets: int64[M], the tokens that were sampled.
        old_logprobs: float[M], log-probs of the targets by the policy that sampled them.
        advantages: float[M], from the task's reward, for reverse_kl.
    """
    if loss.kind == "forward_topk":
        return forward_topk(p, q, loss.k)
    if loss.kind == "reverse_topk":
        return reverse_topk(p, q, loss.k)
    if loss.kind == "gkd":
        return generalized_jsd(p, q, loss.beta)
    gain = advantages - loss.coefficient * (old_logprobs - gather_logprobs(q, targets))
    ratio = (gather_logprobs(p, targets) - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -ratio * gain.detach()


def forward_topk(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return the sum of q (log q - log p) over the k likeliest tokens of q, float[M], at least 0."""
    best, indices = q.topk(min(k, q.shape[-1]), dim=-1)
    return (best.exp() * (best - p.gather(-1, indices))).sum(-1).clamp(min=0)


def reverse_topk(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return KL(p' || q') in nats, float[M], with both renormalized on the k likeliest tokens of p."""
    best, indices = p.topk(min(k, p.shape[-1]), dim=-1)
    a, b = best.log_softmax(-1), q.gather(-1, indices).log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def generalized_jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Return the divergence of GKD in nats, float[M].

    Raises:
        RequestError: when beta is outside 0 to 1.
    """
    if not 0 <= beta <= 1:
        raise RequestError(f"beta is {beta:g}, not between 0 and 1")
    if beta in (0, 1):
        a, b = (q, p) if beta == 0 else (p, q)
        return _kl(a, b)
    middle = torch.logaddexp(q + np.log(beta), p + np.log1p(-beta))
    return beta * _kl(q, middle) + (1 - beta) * _kl(p, middle)


class Diagnostics(NamedTuple):
    """Figures that compare student and teacher, each with one entry per token, [M].

    With S_p and S_q the k likeliest tokens of each, and O their intersection:

    * overlap_ratio |O| / k; overlap_mass_student, _teacher: mass of p and of q on O, of the full vocabulary
    * overlap_tokens: whether O has a token; the two advantages are 0 where it has none
    * overlap_advantage: sum over O of p'(log q' - log p') / |O|, renormalized on O; equals
      -KL(p' || q') / |O| <= 0 (arXiv 2604.13016, eq. 7). Its size depends on k.
    * overlap_advantage_verl: verl's quantity of the same name, mean over O of -q (log q - log p); any sign
    * topk_mass_student, _teacher: mass of p and of q on S_q
    * entropy of p; entropy_gap: |H(q) - H(p)|; entropy_gap_topk: the same of each renormalized on its own k
      tokens
    * reverse_kl: log p - log q of the sampled token
    """

    overlap_ratio: Tensor
    overlap_tokens: Tensor
    overlap_advantage: Tensor
    overlap_advantage_verl: Tensor
    overlap_mass_student: Tensor
    overlap_mass_teacher: Tensor
    topk_mass_student: Tensor
    topk_mass_teacher: Tensor
    entropy: Tensor
    entropy_gap: Tensor
    entropy_gap_topk: Tensor
    reverse_kl: Tensor


def diagnostics(p: Tensor, q: Tensor, targets: Tensor, k: int) -> Diagnostics:
    """Compare student and teacher; p and q are float[M, V] log-probs, and targets the sampled tokens."""
    k = min(k, p.shape[-1])
    best_p, indices_p = p.topk(k, dim=-1)
    best_q, indices_q = q.topk(k, dim=-1)
    shared = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, indices_p, True)
    shared &= torch.zeros_like(shared).scatter_(-1, indices_q, True)
    count = shared.sum(-1)
    overlaps = count > 0
    size = count.clamp(min=1)
    lowest = torch.finfo(p.dtype).min
    p_bar = torch.where(shared, p, lowest).log_softmax(-1)
    q_bar = torch.where(shared, q, lowest).log_softmax(-1)
    advantage = torch.where(shared, p_bar.exp() * (q_bar - p_bar), 0).sum(-1) / size
    verl = torch.where(shared, -q.exp() * (q - p), 0).sum(-1) / size
    entropies = [_entropy(p), _entropy(q)]
    topk = [_entropy(best_p.log_softmax(-1)), _entropy(best_q.log_softmax(-1))]
    return Diagnostics(
        overlap_ratio=count / k,
        overlap_tokens=overlaps,
        overlap_advantage=torch.where(overlaps, advantage, 0),
        overlap_advantage_verl=torch.where(overlaps, verl, 0),
        overlap_mass_student=torch.where(shared, p.exp(), 0).sum(-1),
        overlap_mass_teacher=torch.where(shared, q.exp(), 0).sum(-1),
        topk_mass_student=p.gather(-1, indices_q).exp().sum(-1),
        topk_mass_teacher=best_q.exp().sum(-1),
        entropy=entropies[0],
        entropy_gap=(entropies[1] - entropies[0]).abs(),
        entropy_gap_topk=(topk[1] - topk[0]).abs(),
        reverse_kl=gather_logprobs(p, targets) - gather_logprobs(q, targets),
    )


def _means(totals: Mapping[str, float], k: int) -> dict[str, float]:
    """Divide sums by the number of tokens that they are defined on."""
    figures = {"loss": totals.get("loss", 0.0), "tokens": totals.get("tokens", 0.0), "overlap_k": float(k)}
    overlapping = totals.get("overlap_tokens", 0.0)
    for name, value in totals.items():
        if name in ("loss", "tokens", "overlap_tokens"):
            continue
        count = overlapping if name.startswith("overlap_advantage") else figures["tokens"]
        if count:
            figures[name] = value / count
    return figures


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b) of float[M, V] log-probs; a token of probability 0 adds nothing."""
    terms = a.exp() * (a - b)
    return torch.where(a.isneginf(), 0, terms).sum(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    return -torch.where(logprobs.isneginf(), 0, logprobs.exp() * logprobs).sum(-1)
