"""Publishing weights from the learner to the engine, with checks that the engine uses them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.trainer import Learner
from perilune.models.adapters.lora import adapter_pairs, base_state, without_adapter
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder
from perilune.models.routing import Routing
from perilune.rollout.groups import Groups, flatten
from perilune.tasks.stage.rounding import plain_rounding, rounding_of

Tokens = NDArray[np.int64]
RANDOM_LAYER_HINT = (
    "it has dropout or another random layer, so the policy that learns is not the one that samples"
)
MISSING_ADAPTER_HINT = "the base weights alone: the adapter did not reach the engine"
_LOGIT_ROWS = 128  # rows of logits at a time
_PROBE_TOKENS = 16  # tokens scored to compare the engine's weights with the learner's


class Publisher:
    """Copies the learner's weights to the engine and records every version.

    Args:
        learner: must not have trained yet in this attempt.
        reference: the policy before training, if the stage uses it.

    Raises:
        WorkFailedError: when the reference is not the policy that training started from.

    Attributes:
        published: checksum of the weights by policy version.
    """

    def __init__(self, engine: Engine, learner: Learner, reference: Decoder | None = None) -> None:
        self.published: dict[int, str] = {}
        self._engine, self._learner, self._reference = engine, learner, reference
        self._expected = self._start = None if reference is None else checksum(reference.state_dict())
        ids = np.arange(_PROBE_TOKENS + 1) * 7919 % learner.decoder.config.vocab_size
        self._probe = ids[: learner.decoder.config.max_position_embeddings]
        self._check_reference()

    def _check_reference(self) -> None:
        if self._start is None:
            return
        weights = checksum(base_state(self._learner.decoder))  # a new adapter changes nothing
        start = weights if self._learner.version == 0 else self._learner.memory.get("start", self._start)
        self._learner.memory["start"] = start
        if start != self._start:
            message = f"the reference policy has checksum {self._start}, and training started from {start}"
            raise WorkFailedError(message, where="reference", remedy=REPORT_BUG)

    def accept_reference(self) -> None:
        """Expect the reference's current weights from now on, because the stage has changed them."""
        assert self._reference is not None
        self._expected = checksum(self._reference.state_dict())

    def publish(self) -> None:
        """Make the engine sample with the learner's current weights.

        Raises:
            WorkFailedError: when the engine then holds or computes with other weights; when the reference
                policy has changed.
        """
        version, decoder = self._learner.version, self._learner.decoder
        self.published[version] = checksum(decoder.state_dict())
        self._learner.ranks.check_same(f"weights of version {version}", self.published[version])
        self._engine.update_weights(None, version)
        used = (self._engine.version, self._engine.checksum)
        if used != (version, self.published[version]):
            raise self._error(
                f"the learner published version {version} with checksum {self.published[version]}, and the"
                f" engine has version {used[0]} with {used[1]}: its weights are stale, or another model's"
            )
        rounding = plain_rounding(decoder)
        gaps = self._probe_gaps(decoder)
        if not rounding.allows(gaps):
            if is_nondeterministic(decoder, self._probe):
                raise self._error(
                    f"the learner's forward pass gives other log-probs each time: {RANDOM_LAYER_HINT}"
                )
            alone = bool(adapter_pairs(decoder)) and rounding.allows(
                self._probe_gaps(without_adapter(decoder))
            )
            raise self._error(
                f"on {_PROBE_TOKENS} fixed tokens engine and learner differ by {np.abs(gaps).max():.3g} nats:"
                f" the engine took version {version} and computes with"
                f" {MISSING_ADAPTER_HINT if alone else 'other weights'}"
            )
        if self._reference is not None and checksum(self._reference.state_dict()) != self._expected:
            raise self._error("the reference policy has changed: it is being trained")

    def _error(self, message: str) -> WorkFailedError:
        return WorkFailedError(message, where=f"version {self._learner.version}", remedy=REPORT_BUG)

    def check_versions(self, groups: Groups) -> Groups:
        """Return the groups, after checking that published versions sampled all their tokens.

        Raises:
            WorkFailedError: naming the first episode with another version.
        """
        for episode in flatten(groups):
            unknown = {*np.unique(episode.policy_version[episode.loss_mask]).tolist()} - self.published.keys()
            if unknown:
                raise WorkFailedError(
                    f"episode {episode.episode_id} was sampled by version {min(unknown)}, which the learner"
                    " never published",
                    remedy=REPORT_BUG,
                )
        return groups

    def _probe_gaps(self, decoder: Decoder) -> NDArray[np.float64]:
        """Return the log-probs of fixed tokens by `decoder`, minus those by the engine, in nats."""
        head, rest = self._probe[:1], self._probe[1:]
        (from_engine,) = self._engine.score([head.tolist()], [rest.tolist()])
        from_decoder = plain_logprobs(decoder, self._probe, len(rest))
        return from_decoder.cpu().double().numpy() - from_engine


def is_nondeterministic(decoder: Decoder, ids: Tokens) -> bool:
    """Return whether two forward passes over int64[T] tokens differ by more than rounding."""
    first, second = (plain_logprobs(decoder, ids, len(ids) - 1) for _ in range(2))
    return not rounding_of(decoder).allows((first - second).cpu().double().numpy())


def plain_logprobs(decoder: Decoder, ids: Tokens, count: int) -> Tensor:
    """Return float32[count] log-probs of the last `count` of int64[T] tokens."""
    return plain_scores(decoder, ids, count, 1.0)[0]


@torch.no_grad()
def plain_scores(  # noqa: PLR0917
    decoder: Decoder,
    ids: Tokens,
    count: int,
    temperature: float,
    routing: Routing | None = None,
    whole: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the last `count` of int64[T] tokens, and of the vocabulary at the first of them.

    A plain computation for checks: one sequence, without packing, row selection or the log-prob kernels. It
    shares the decoder's layers with the code that it checks.

    Args:
        whole: number of tokens for which to return the distribution; at most `count` and `_LOGIT_ROWS`.

    Returns:
        float32[count], and float32[whole, V].
    """
    device = next(decoder.parameters()).device
    tokens = torch.as_tensor(np.asarray(ids, np.int64), device=device)
    bounds = torch.tensor([0, len(tokens)], device=device)
    states = decoder(tokens, torch.arange(len(tokens), device=device), PackedAttention(bounds), routing)
    states, targets = states[-count - 1 : -1], tokens[-count:]
    chosen: list[Tensor] = []
    first = states.new_empty(0)
    for part, part_targets in zip(
        torch.split(states, _LOGIT_ROWS), torch.split(targets, _LOGIT_ROWS), strict=True
    ):
        logprobs = (decoder.logits(part).float() / (temperature or 1.0)).log_softmax(-1)
        if not chosen:
            first = logprobs[:whole].clone()
        chosen.append(logprobs.gather(1, part_targets[:, None])[:, 0])
    return torch.cat(chosen), first
