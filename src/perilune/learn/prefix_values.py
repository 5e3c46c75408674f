"""Values of prefixes without training: the policy's log-prob of the right answer after each prefix.

V(prefix) = mean over the right answer's tokens of log P(token | prompt, prefix, lead, answer so far). The
text `lead` makes the policy answer at once; its own log-prob is not counted. One forward pass computes the
values of all prefixes of many episodes. It feeds each episode once, and lead and answer once per prefix.
Prefixes that several episodes share are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.episode import Episode
from perilune.learn.batch import PackedBatch, split_by_cost
from perilune.learn.trainer import token_logprobs
from perilune.models.decoder import Decoder

Key = tuple[bytes, bytes, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The prefixes of one episode whose values are computed.

    Attributes:
        prefixes: lengths in tokens, increasing, each below T.
        endings: tokens of lead and answer, for each form of the answer.
        answers: number of final tokens of each ending that belong to the answer.
    """

    episode: Episode
    prefixes: Sequence[int]
    endings: Sequence[Sequence[int]]
    answers: Sequence[int]

    def key(self, prefix: int) -> Key:
        """Return the key of a prefix; prefixes with equal keys have the same value."""
        completion = self.episode.token_ids[:prefix]
        return self.episode.prompt_ids.tobytes(), completion.tobytes(), tuple(map(tuple, self.endings))

    @property
    def fed(self) -> int:
        """Number of tokens that the probe feeds."""
        endings = sum(len(ending) - 1 for ending in self.endings) * len(self.prefixes)
        return len(self.episode.prompt_ids) + max(self.prefixes, default=0) + endings


def prefix_values(
    decoder: Decoder, probes: Sequence[Probe], *, token_budget: int, temperature: float = 1.0
) -> list[NDArray[np.float64]]:
    """Compute V of each prefix, float64[prefixes], for each probe.

    The probabilities of several forms of the answer are added. The log of the sum is divided by the length of
    the first form.
    """
    known: dict[Key, float] = {}
    fresh = []
    for probe in probes:
        new = {key: prefix for prefix in probe.prefixes if (key := probe.key(prefix)) not in known}
        known |= dict.fromkeys(new, 0.0)
        if new:
            fresh.append(replace(probe, prefixes=list(new.values())))
    for batch in split_by_cost(fresh, lambda probe: probe.fed, token_budget):
        packed = _pack(batch, temperature)
        logprobs = token_logprobs(decoder, packed).cpu().numpy().astype(np.float64)
        start = 0
        for probe in batch:
            totals = np.empty((len(probe.prefixes), len(probe.endings)))
            for index in np.ndindex(totals.shape):
                count = probe.answers[index[1]]
                totals[index] = logprobs[start : start + count].sum()
                start += count
            combined = np.logaddexp.reduce(totals, axis=1) if len(probe.endings) > 1 else totals[:, 0]
            values = np.minimum(combined, 0.0) / probe.answers[0]
            known |= dict(zip(map(probe.key, probe.prefixes), values.tolist(), strict=True))
    return [np.array([known[probe.key(prefix)] for prefix in probe.prefixes]) for probe in probes]


def _pack(probes: Sequence[Probe], temperature: float) -> PackedBatch:
    """Pack the episodes up to their last prefix, then the endings, each continuing a prefix."""
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    for probe in probes:
        completion = probe.episode.token_ids[: max(probe.prefixes, default=0)]
        tokens.append(np.concatenate([probe.episode.prompt_ids, completion]).astype(np.int64))
        positions.append(np.arange(len(tokens[-1])))
        lengths.append(len(tokens[-1]))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    end = int(starts[-1])
    prefix_of, before = [-1] * len(probes), [0] * len(probes)
    rows: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    for index, probe in enumerate(probes):
        for prefix in probe.prefixes:
            past = len(probe.episode.prompt_ids) + prefix
            for ending, answer in zip(probe.endings, probe.answers, strict=True):
                fed = len(ending) - 1
                predictors = np.concatenate([[starts[index] + past - 1], end + np.arange(fed)])
                rows.append(predictors[-answer:])
                targets.append(np.asarray(ending[-answer:], np.int64))
                if fed:
                    tokens.append(np.asarray(ending[:-1], np.int64))
                    positions.append(past + np.arange(fed))
                    lengths.append(fed)
                    prefix_of.append(index)
                    before.append(past)
                end += fed
    zeros = torch.zeros(sum(map(len, targets)))
    return PackedBatch(
        token_ids=_tensor(tokens),
        positions=_tensor(positions),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        prefix_of=torch.tensor(prefix_of),
        prefix_lengths=torch.tensor(before),
        rows=_tensor(rows),
        targets=_tensor(targets),
        episode_of=torch.zeros(len(zeros), dtype=torch.int64),
        episode_ids=(),
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        policy_version=torch.zeros(len(zeros), dtype=torch.int64),
        policy_gradient=None,
        cross_entropy=None,
        reference_kl=None,
        temperature=temperature,
    )


def _tensor(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))
