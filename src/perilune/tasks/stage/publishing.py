"""Weights go from the learner to the engine: every version has a checksum, and arrival is checked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.trainer import Learner
from perilune.models.adapters.lora import base_of, base_state, pairs_of
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder
from perilune.rollout.groups import Groups

# In nats; past this the sampler and the learner are not the same policy. On a CPU the gap is zero.
GAP_LIMIT = {"cpu": 1e-4, "cuda": 1e-2}
# The same where products round to bfloat16. Were every one of their roundings another, log-probs of the tiny
# model would differ by 0.05; sums in another order turn a few of them over. On a CPU the gap is 0 here too.
BFLOAT16_LIMIT = {"cpu": 0.02, "cuda": 0.1}
PLAIN_LIMIT = 1e-3  # at least, where one side was computed by `plain_logprobs`: its sums have another order
RANDOM = "it has dropout or another random layer, and the policy that learns is not the one that samples"
ALONE = "alone: the adapter did not reach it"
_PROBE = 16  # tokens that are scored to see with which weights the engine computes


def gap_limit(decoder: Decoder) -> float:
    """The largest difference in nats that counts as rounding, on the decoder's device, in its precision."""
    limits = BFLOAT16_LIMIT if decoder.precision == "bfloat16" else GAP_LIMIT
    return limits.get(next(decoder.parameters()).device.type, max(limits.values()))


def plain_limit(decoder: Decoder) -> float:
    """The same against `plain_logprobs`."""
    return max(PLAIN_LIMIT, gap_limit(decoder))


class Publisher:
    """Gives the engine the learner's weights, and knows which versions there have been.

    Args:
        learner: in the state that the first step begins with.
        reference: the policy that training began with, where it is used.

    Raises:
        WorkFailedError: when the reference is another policy.

    Attributes:
        published: checksum of the weights by policy version.
    """

    def __init__(self, engine: Engine, learner: Learner, reference: Decoder | None = None) -> None:
        self.published: dict[int, str] = {}
        self._engine, self._learner, self._reference = engine, learner, reference
        self._start = None if reference is None else checksum(reference.state_dict())
        ids = np.arange(_PROBE + 1) * 7919 % learner.decoder.config.vocab_size
        self._probe = ids[: learner.decoder.config.max_position_embeddings]
        self._check_reference()

    def _check_reference(self) -> None:
        if self._start is None:
            return
        weights = checksum(base_state(self._learner.decoder))  # an adapter begins with nothing
        began = weights if self._learner.version == 0 else self._learner.memory.get("start", self._start)
        self._learner.memory["start"] = began
        if began != self._start:
            raise WorkFailedError(
                f"the reference policy has checksum {self._start}, and training began with {began}",
                where="reference",
                remedy=REPORT_BUG,
            )

    def publish(self) -> None:
        """Have the engine sample with the learner's present weights.

        Raises:
            WorkFailedError: when the engine then has, or computes with, other weights; when the reference
                policy has changed.
        """
        version, decoder = self._learner.version, self._learner.decoder
        self.published[version] = checksum(decoder.state_dict())
        self._learner.ranks.check_same(f"weights of version {version}", self.published[version])
        self._engine.update_weights(None, version)
        taken = (self._engine.version, self._engine.checksum)
        if taken != (version, self.published[version]):
            raise WorkFailedError(
                f"the learner published version {version} with checksum {self.published[version]}, and the"
                f" engine has version {taken[0]} with {taken[1]}: its weights are stale, or another model's",
                where=f"version {version}",
                remedy=REPORT_BUG,
            )
        gap = self._probe_gap(decoder)
        if not gap <= plain_limit(decoder):
            if is_random(decoder, self._probe):
                raise WorkFailedError(
                    f"the learner's forward pass gives other log-probs each time: {RANDOM}",
                    where=f"version {version}",
                    remedy=REPORT_BUG,
                )
            alone = bool(pairs_of(decoder)) and self._probe_gap(base_of(decoder)) <= plain_limit(decoder)
            raise WorkFailedError(
                f"on {_PROBE} fixed tokens engine and learner differ by {gap:.3g} nats: the engine took"
                f" version {version} and computes with {f'the base {ALONE}' if alone else 'other weights'}",
                where=f"version {version}",
                remedy=REPORT_BUG,
            )
        if self._reference is not None and checksum(self._reference.state_dict()) != self._start:
            raise WorkFailedError(
                "the reference policy has changed: it is being trained",
                where=f"version {version}",
                remedy=REPORT_BUG,
            )

    def checked(self, groups: Groups) -> Groups:
        """The groups, every token of which was sampled by a version that was published.

        Raises:
            WorkFailedError: naming the first episode of another.
        """
        for episode in (one for group in groups for one in group):
            unknown = {*np.unique(episode.policy_version[episode.loss_mask]).tolist()} - self.published.keys()
            if unknown:
                raise WorkFailedError(
                    f"episode {episode.episode_id} was sampled by version {min(unknown)}, which the learner"
                    " never published",
                    remedy=REPORT_BUG,
                )
        return groups

    def _probe_gap(self, decoder: Decoder) -> float:
        head, rest = self._probe[:1], self._probe[1:]
        (theirs,) = self._engine.score([head.tolist()], [rest.tolist()])
        mine = plain_logprobs(decoder, self._probe, len(rest), 1.0)
        return float((mine.cpu() - torch.from_numpy(theirs)).abs().max())


def is_random(decoder: Decoder, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    """Whether two forward passes over int64[T] tokens differ by more than rounding."""
    one, other = (plain_logprobs(decoder, ids, len(ids) - 1, 1.0) for _ in range(2))
    return float((one - other).abs().max()) > gap_limit(decoder)


def plain_logprobs(
    decoder: Decoder, ids: np.ndarray[tuple[int], np.dtype[np.int64]], count: int, temperature: float
) -> Tensor:
    """Log-probs float32[count] of the last `count` of int64[T] tokens, as `plain_distributions`."""
    found = plain_distributions(decoder, ids, count, temperature)
    tokens = torch.as_tensor(np.asarray(ids, np.int64)[-count:], device=found.device)
    return found.gather(1, tokens[:, None])[:, 0]


@torch.no_grad()
def plain_distributions(
    decoder: Decoder, ids: np.ndarray[tuple[int], np.dtype[np.int64]], count: int, temperature: float
) -> Tensor:
    """Log-probs float32[count, V] that the last `count` of int64[T] tokens are drawn from.

    Written out for checks, one sequence by itself: it shares the decoder's layers with what is checked, but
    not packing, rows or the log-prob kernels.
    """
    device = next(decoder.parameters()).device
    tokens = torch.as_tensor(np.asarray(ids, np.int64), device=device)
    bounds = torch.tensor([0, len(tokens)], device=device)
    states = decoder(tokens, torch.arange(len(tokens), device=device), PackedAttention(bounds))
    return (decoder.logits(states[-count - 1 : -1]).float() / (temperature or 1.0)).log_softmax(-1)
