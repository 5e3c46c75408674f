"""Episode: the one data structure that flows from engine to verifier, learner, metrics and report.

Shapes: P prompt tokens, T generated (or tool-given) tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One attempt of a policy at one task, token by token.

    A reward is a score or a recorded failure: an episode whose verifier failed has
    `failure` set and no `reward`, and leaves its group instead of counting as zero.

    Attributes:
        episode_id: unique within a run: "{step}/{group}/{sample}", or "{step}/{group}/p{player}/{sample}" for
            players but the first.
        group_id: episodes that answer the same prompt in the same step, as the same player, share it.
        task_id: the problem instance, stable across runs and machines.
        environment: id of the environment, e.g. "reasoning_gym/basic_arithmetic".
        seed: seed of the random numbers that sampled it.
        messages: the conversation as text, a view of the tokens: ({"role", "content"}, ...).
        prompt_ids: int32[P].
        token_ids: int32[T], what followed the prompt, turn by turn, with the end-of-sequence tokens that were
            reached; what the environment said between two turns is among them.
        loss_mask: bool[T], False on tokens the policy did not choose (tool output).
        logprobs: float32[T], of the sampling policy, after temperature; 0 where it did not choose.
        policy_version: int32[T], version of the weights that sampled each token; -1 where none did.
        reward: what the episode is worth, or None when the verifier failed.
        reward_terms: the named parts of the reward.
        step_rewards: float32[T] or None, process rewards: at the last token of each segment what it earned,
            NaN at the others.
        finish_reason: "stop" (end-of-sequence or stop token), "length" (a limit on tokens or turns) or
            "aborted".
        failure: "" or "boundary: reason", boundary in {environment, verifier, model, sandbox}.
        metrics: further figures; "strategy/NAME": 1.0 marks the strategy an environment recognised.
        routed_experts: uint8 or uint16 [T, layers, experts a token], or None for dense models.
    """

    episode_id: str
    group_id: str
    task_id: str
    environment: str
    seed: int
    messages: tuple[Mapping[str, str], ...]
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    finish_reason: FinishReason
    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    step_rewards: NDArray[np.float32] | None = None
    failure: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    routed_experts: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_version"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{self.episode_id}: {name} has {len(getattr(self, name))} of {length} tokens"
                )
        if self.failure and self.reward is not None:
            raise ValueError(f"{self.episode_id}: a failed episode has no reward")

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it off."""
        return self.finish_reason == "length"

    @property
    def text(self) -> str:
        """What the policy wrote last, without special tokens."""
        said = (one["content"] for one in reversed(self.messages) if one["role"] == "assistant")
        return next(said, "")

    @property
    def opening(self) -> tuple[Mapping[str, str], ...]:
        """The messages of the prompt, before the policy's first word."""
        if self.loss_mask.all():  # one turn; a prompt may hold examples of the assistant's
            return self.messages[:-1] if len(self.loss_mask) else self.messages
        first = next(place for place, one in enumerate(self.messages) if one["role"] == "assistant")
        return self.messages[:first]

    @property
    def sampled(self) -> int:
        """How many tokens the policy chose."""
        return int(self.loss_mask.sum())
