"""Packing: weighted groups become flat token batches without padding, with each group's prompt once.

A batch feeds N tokens to the decoder and learns M tokens, each predicted by a fed token. The last token of a
completion predicts nothing, so it is not fed. Episodes without weight are left out. The weights are already
divided by the denominator of the whole step, so the losses of micro-batches of any size add up to the loss of
the step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.episode import Episode
from perilune.errors import RequestError, WorkFailedError
from perilune.learn.replay import pack_routes
from perilune.learn.weights import COMPONENTS, PPO, Surrogate, WeightedGroup, aggregate

T = TypeVar("T")

Pair = tuple[Episode, Episode]
"""Two answers to one prompt; the first is better."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch.

    Attributes:
        token_ids: int64[N].
        positions: int64[N], position of each token in its own sequence.
        cu_seqlens: int64[S + 1], bounds of the sequences: all prompts first, then all completions.
        prefix_of: int64[S], index of the prompt that each completion continues, -1 for a prompt.
        rows: int64[M], index of the fed token that predicts each learned token.
        targets: int64[M], the learned tokens.
        episode_of: int64[M], index of the completion of each learned token.
        episode_ids: the episode id of each completion, by index.
        old_logprobs: float32[M], log-probs of the policy in the denominator of the importance ratio.
        sampler_logprobs: float32[M], log-probs of the policy that sampled; usually the same.
        policy_version: int64[M], version of the weights that sampled each learned token.
        policy_gradient, cross_entropy, reference_kl, entropy: float32[M] weights, or None if all are 0.
        surrogate: the token loss of `policy_gradient`.
        value, returns, old_values: float32[M] weights and targets of a critic, or None.
        reference_logprobs: float32[M], log-probs of the frozen reference, required with `reference_kl`.
        value_clip: clip range of the critic's predictions around `old_values`.
        temperature: sampling temperature; all log-probs are at this temperature.
        prefix_lengths: int64[S], length of the prefix that each completion continues; None for whole prompts.
        routes: int16[N, layers, K], experts to replay (`pack_routes`); None to route all tokens anew.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    prefix_of: Tensor
    rows: Tensor
    targets: Tensor
    episode_of: Tensor
    episode_ids: tuple[str, ...]
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    policy_version: Tensor
    policy_gradient: Tensor | None
    cross_entropy: Tensor | None
    reference_kl: Tensor | None
    entropy: Tensor | None = None
    surrogate: Surrogate = PPO
    value: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    value_clip: float = 0.0
    reference_logprobs: Tensor | None = None
    temperature: float = 1.0
    prefix_lengths: Tensor | None = None
    routes: Tensor | None = None

    def split_by_episode(self, values: Tensor) -> list[tuple[str, NDArray[np.float32]]]:
        """Return the id of each completion with its part of `values`, float32[M] of the learned tokens."""
        lengths = torch.bincount(self.episode_of.cpu()).tolist()
        parts = [part.numpy() for part in torch.split(values.cpu(), lengths)]
        return list(zip(self.episode_ids, parts, strict=True))

    def padded(self) -> Self:
        """Return the batch padded to `round_up_rows` tokens.

        The padding forms short extra sequences; the learned tokens don't change.
        """
        missing = round_up_rows(len(self.token_ids)) - len(self.token_ids)
        if not missing:
            return self
        extra = torch.arange(missing, device=self.token_ids.device) % _PADDING
        ends = len(self.token_ids) + torch.tensor([*range(_PADDING, missing, _PADDING), missing])
        return replace(
            self,
            token_ids=F.pad(self.token_ids, (0, missing)),
            positions=torch.cat([self.positions, extra]),
            cu_seqlens=torch.cat([self.cu_seqlens, ends.to(self.cu_seqlens)]),
            prefix_of=F.pad(self.prefix_of, (0, len(ends)), value=-1),
            prefix_lengths=None
            if self.prefix_lengths is None
            else F.pad(self.prefix_lengths, (0, len(ends))),
        )

    def with_reference(self, logprobs: Tensor) -> Self:
        """Return the batch with the reference policy's log-probs float32[M]."""
        return replace(self, reference_logprobs=logprobs)

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`."""
        if self.token_ids.device == device:
            return self
        moved = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]


_ROWS = 256  # rows are rounded up to a multiple of this number
_PADDING = 16  # length of a padding sequence; a longer one could widen a block of attention


def scatter_to_sampled(episode: Episode, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32[T]: `values` at the tokens that the policy sampled, and 0 at the others."""
    scattered = np.zeros(len(episode.loss_mask), np.float32)
    scattered[episode.loss_mask] = values
    return scattered


def round_up_rows(rows: int) -> int:
    """Round up to a multiple of 256, or below 256 to a power of two.

    The CPU library compiles and keeps one kernel for each number of rows. Without rounding, batches that
    differ by a few tokens would fill hundreds of megabytes within an hour.
    """
    return -(-rows // _ROWS) * _ROWS if rows > _ROWS else 1 << (rows - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """An episode with weights: its final float32[T] weights by component."""

    episode: Episode
    weights: dict[str, NDArray[np.float32]]
    old_logprobs: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_values: NDArray[np.float32]

    @property
    def fed(self) -> int:
        """Number of fed tokens of the completion."""
        return len(self.episode.token_ids) - 1


def pack(
    groups: Iterable[WeightedGroup], token_budget: int, *, temperature: float = 1.0
) -> list[PackedBatch]:
    """Pack all groups of one optimizer step into micro-batches of at most `token_budget` fed tokens.

    A group shares a micro-batch, so that its prompt is fed once, unless the group exceeds the budget. An
    episode longer than the budget has its own micro-batch. The list is empty if no episode has weights.

    Raises:
        WorkFailedError: naming an episode without a prompt token to predict its first token from.
        ValueError: when groups have different surrogates or value clips.
    """
    groups = list(groups)
    denominators = {
        name: sum(group.components[name].denominator for group in groups if name in group.components)
        for name in COMPONENTS
    }
    surrogate, value_clip = _shared_loss(groups)
    chunks = [
        chunk for group in groups for chunk in _chunks(_weighted_items(group, denominators), token_budget)
    ]
    bins = split_by_cost(chunks, lambda chunk: chunk[1], token_budget)
    packed = (_pack_bin([item for items, _ in part for item in items], temperature) for part in bins)
    return [replace(batch, surrogate=surrogate, value_clip=value_clip) for batch in packed]


def split_by_cost(items: Iterable[T], cost: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Yield runs of items that cost at most `budget` together; an item that costs more is alone."""
    run: list[T] = []
    room = budget
    for item in items:
        if run and cost(item) > room:
            yield run
            run, room = [], budget
        run.append(item)
        room -= cost(item)
    if run:
        yield run


def _shared_loss(groups: Sequence[WeightedGroup]) -> tuple[Surrogate, float]:
    """Return the surrogate and the value clip, which must be the same for all groups of a step."""
    surrogates = {group.surrogate for group in groups if group.policy_gradient is not None}
    clips = {group.value.clip for group in groups if group.value is not None}
    if len(surrogates) > 1 or len(clips) > 1:
        raise ValueError(f"groups of one step have different losses: {surrogates or clips}")
    return surrogates.pop() if surrogates else PPO, clips.pop() if clips else 0.0


def _weighted_items(group: WeightedGroup, denominators: dict[str, float]) -> list[_Item]:
    """Return the episodes that have weights, divided by the denominators of the whole step."""
    items = []
    for index, episode in enumerate(group.episodes):
        weights = {
            name: (component.weights[index] / denominators[name]).astype(np.float32)
            for name, component in group.components.items()
            if component.weights[index].any()
        }
        if weights:
            if len(episode.prompt_ids) == 0:
                raise WorkFailedError(
                    f"episode {episode.episode_id} has an empty prompt",
                    remedy="give every task a prompt with at least one token",
                )
            zeros = np.zeros(len(episode.token_ids), np.float32)
            items.append(
                _Item(
                    episode,
                    weights,
                    old_logprobs=group.proximal[index] if group.proximal else episode.logprobs,
                    returns=group.value.returns[index] if group.value else zeros,
                    old_values=group.value.values[index] if group.value else zeros,
                )
            )
    return items


def _chunks(items: list[_Item], token_budget: int) -> Iterable[tuple[list[_Item], int]]:
    """Split a group's items into chunks within the budget, each with its cost in fed tokens."""
    chunk: list[_Item] = []
    cost = 0
    prompts: set[bytes] = set()
    for item in items:
        prompt = item.episode.prompt_ids
        added = item.fed + (0 if prompt.tobytes() in prompts else len(prompt))
        if chunk and cost + added > token_budget:
            yield chunk, cost
            chunk, cost, prompts = [], 0, set()
            added = item.fed + len(prompt)
        chunk.append(item)
        cost += added
        prompts.add(prompt.tobytes())
    if chunk:
        yield chunk, cost


def _pack_bin(items: list[_Item], temperature: float) -> PackedBatch:
    prompts: dict[bytes, int] = {}
    prompt_ids: list[NDArray[np.int32]] = []
    prompt_of: list[int] = []
    for item in items:
        key = item.episode.prompt_ids.tobytes()
        if key not in prompts:
            prompts[key] = len(prompt_ids)
            prompt_ids.append(item.episode.prompt_ids)
        prompt_of.append(prompts[key])
    prompt_lengths = [len(ids) for ids in prompt_ids]
    prompt_ends = np.cumsum(prompt_lengths)
    starts = prompt_ends[-1] + np.concatenate([[0], np.cumsum([item.fed for item in items])])

    completions = [item.episode.token_ids[:-1] for item in items]
    positions = [np.arange(length) for length in prompt_lengths]
    rows, masks = [], []
    for item, prompt, start in zip(items, prompt_of, starts[:-1], strict=True):
        length = prompt_lengths[prompt]
        positions.append(length + np.arange(item.fed))
        predictors = start - 1 + np.arange(item.fed + 1)
        predictors[0] = prompt_ends[prompt] - 1
        masks.append(item.episode.loss_mask)
        rows.append(predictors[item.episode.loss_mask])

    def learned(arrays: Iterable[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
        chosen = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return torch.from_numpy(np.concatenate(chosen).astype(dtype))

    def weights(name: str) -> Tensor | None:
        if not any(name in item.weights for item in items):
            return None
        zeros = [np.zeros(item.fed + 1, np.float32) for item in items]
        return learned(
            (item.weights.get(name, zero) for item, zero in zip(items, zeros, strict=True)), np.float32
        )

    value = weights("value")
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate([*prompt_ids, *completions]).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        cu_seqlens=torch.tensor([0, *prompt_ends.tolist(), *starts[1:].tolist()]),
        prefix_of=torch.tensor([-1] * len(prompt_lengths) + prompt_of),
        rows=torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        targets=learned((item.episode.token_ids for item in items), np.int64),
        episode_of=torch.arange(len(items)).repeat_interleave(torch.tensor([int(m.sum()) for m in masks])),
        episode_ids=tuple(item.episode.episode_id for item in items),
        old_logprobs=learned((item.old_logprobs for item in items), np.float32),
        sampler_logprobs=learned((item.episode.logprobs for item in items), np.float32),
        policy_version=learned((item.episode.policy_version for item in items), np.int64),
        policy_gradient=weights("policy_gradient"),
        cross_entropy=weights("cross_entropy"),
        reference_kl=weights("reference_kl"),
        entropy=weights("entropy"),
        value=value,
        returns=None if value is None else learned((item.returns for item in items), np.float32),
        old_values=None if value is None else learned((item.old_values for item in items), np.float32),
        temperature=temperature,
        routes=pack_routes([item.episode for item in items], prompt_of),
    )


def minibatches(groups: Sequence[WeightedGroup], count: int) -> list[list[WeightedGroup]]:
    """Split the groups of a step into at most `count` minibatches, one optimizer step each.

    Live groups are distributed round-robin, so that every minibatch has some. Each minibatch has its own
    denominators. From the second minibatch on, the policy differs from the one that sampled.

    Returns:
        At least one minibatch, which may be empty.
    """
    ordered = sorted(groups, key=lambda group: group.dead)
    return [part for start in range(count) if (part := ordered[start::count])] or [[]]


def pack_each(episodes: Iterable[Episode], token_budget: int) -> list[PackedBatch]:
    """Pack episodes in order, without sharing prompts, into batches of at most `token_budget` tokens."""
    return pack([_learn_all_tokens((episode,)) for episode in episodes], token_budget)


def pack_pairs(pairs: Iterable[Pair], token_budget: int) -> list[PackedBatch]:
    """Pack the pairs of one step. A pair shares its prompt and is never split, even beyond the budget.

    Raises:
        RequestError: naming a completion without sampled tokens, or a pair with two different prompts.
    """
    pairs = list(pairs)
    for chosen, rejected in pairs:
        for episode in (chosen, rejected):
            if not episode.loss_mask.any():
                raise RequestError(
                    "a completion without sampled tokens cannot be compared",
                    where=episode.episode_id,
                    remedy="remove the pair",
                )
        if not np.array_equal(chosen.prompt_ids, rejected.prompt_ids):
            raise RequestError(
                "the two answers of a pair have different prompts",
                where=chosen.episode_id,
                remedy="pair answers to the same prompt",
            )
    longest = max((len(a.prompt_ids) + len(a.token_ids) + len(b.token_ids) for a, b in pairs), default=0)
    return pack([_learn_all_tokens(pair) for pair in pairs], max(token_budget, longest))


def _learn_all_tokens(episodes: Sequence[Episode]) -> WeightedGroup:
    """Return a group with weight 1 on every sampled token, for objectives that compute their own weights."""
    weights = aggregate(episodes, [1.0] * len(episodes), "token-mean")
    return WeightedGroup(episodes=tuple(episodes), cross_entropy=weights)
