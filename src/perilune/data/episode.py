"""Episodes: the data structure that passes from engine to verifier, learner, metrics and report.

Shapes: P prompt tokens, T tokens after the prompt (sampled, or inserted by the environment).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from perilune.data.spans import Span
from perilune.environments.core.protocol import Failure, Outcome, Task

if TYPE_CHECKING:
    from perilune.models.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "aborted"]


class SampledTokens(Protocol):
    """The fields of an engine's completion that an episode uses."""

    @property
    def token_ids(self) -> NDArray[np.int32]: ...

    @property
    def logprobs(self) -> NDArray[np.float32]: ...

    @property
    def policy_version(self) -> NDArray[np.int32]: ...

    @property
    def finish_reason(self) -> FinishReason: ...


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One rollout of a policy in one task, token by token.

    An episode whose verifier failed has `failure` set and no `reward`. It is left out of its group instead of
    counting as a reward of 0.

    Attributes:
        episode_id: unique within a run: "{step}/{group}/{sample}", or "{step}/{group}/p{player}/{sample}" for
            all players except the first.
        group_id: shared by episodes of the same prompt, step and player.
        task_id: the task, stable across runs and machines.
        environment: id of the environment, e.g. "reasoning_gym/basic_arithmetic".
        seed: seed of sampling.
        messages: the conversation as text: ({"role", "content"}, ...).
        prompt_ids: int32[P].
        token_ids: int32[T], all turns after the prompt, including sampled end-of-sequence tokens and the
            tokens of the environment between two turns.
        loss_mask: bool[T], False at tokens that the policy did not sample (tool output).
        logprobs: float32[T], of the sampling policy at its temperature; 0 at masked tokens.
        policy_version: int32[T], version of the weights that sampled each token; -1 at masked tokens.
        reward: None when the verifier failed.
        reward_terms: named parts of the reward.
        step_rewards: float32[T] or None, process rewards: the reward of a segment at its last token, NaN at
            other tokens.
        top_ids: int32[T, K] or None, the K likeliest tokens where each token was sampled, likeliest first; -1
            at masked tokens.
        top_logprobs: float32[T, K] or None, their log-probs; 0 at masked tokens.
        reference_logprobs: float32[T] or None, of the frozen reference in training with a KL; 0 at masked
            tokens.
        finish_reason: "stop" (end-of-sequence or stop token), "length" (a limit on tokens or turns) or
            "aborted".
        failure: "" or "boundary: reason", boundary in {environment, verifier, model, sandbox}.
        metrics: further figures; "strategy/NAME": 1.0 marks the strategy that the environment recognized.
        routed_experts: uint8 or uint16 [P + T - 1, layers, experts per token], the experts that computed the
            prompt and all tokens but the last (`perilune.data.routes`); None if no routes were recorded.
        spans: of the player and its sub-agents; empty if it had none.
        expected: a right answer of the task, for people who read the episode; "" if the environment states
            none. Prompts never contain it.
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
    spans: tuple[Span, ...] = ()
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    expected: str = ""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_version"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{self.episode_id}: {name} has {len(getattr(self, name))} of {length} tokens"
                )
        for top in (self.top_ids, self.top_logprobs):
            if top is not None and len(top) != length:
                raise ValueError(f"{self.episode_id}: likeliest tokens at {len(top)} of {length} tokens")
        rows = len(self.prompt_ids) + length - 1
        if self.routed_experts is not None and len(self.routed_experts) != rows:
            raise ValueError(f"{self.episode_id}: routes of {len(self.routed_experts)} of {rows} tokens")
        if self.failure and self.reward is not None:
            raise ValueError(f"{self.episode_id}: a failed episode has no reward")

    @classmethod
    def from_completion(
        cls,
        task: Task,
        completion: SampledTokens | str,
        tokenizer: Tokenizer,
        outcome: Outcome | None = None,
        *,
        group_id: str = "",
        sample: int = 0,
        environment: str = "",
    ) -> Self:
        """Return the episode of one completion of a task's prompt.

        Args:
            completion: what the engine sampled. A string is an answer to imitate: it gets an end-of-sequence
                token, log-probs of 0 and policy version -1.
            tokenizer: of the policy.
            outcome: the verifier's score or failure, if it has judged the completion.
            group_id: shared by all completions of the same prompt in the same step; the task's id by default.
            sample: number of the completion in its group.
            environment: id of the environment.

        Raises:
            RequestError: when a text has a character that the tokenizer cannot encode.
        """
        group_id = group_id or task.task_id
        if isinstance(completion, str):
            text = completion
            tokens = unsampled_tokens(tokenizer.encode_completion(text))
        else:
            text = tokenizer.decode(completion.token_ids.tolist())
            tokens = sampled_tokens(completion)
        metrics = {} if task.difficulty is None else {"difficulty": float(task.difficulty)}
        return cls(
            episode_id=f"{group_id}/{sample}",
            group_id=group_id,
            task_id=task.task_id,
            environment=environment,
            seed=0,
            messages=(*task.prompt, {"role": "assistant", "content": text}),
            prompt_ids=np.array(tokenizer.encode_prompt(task.prompt), np.int32),
            metrics=outcome_metrics(outcome) | metrics,
            **tokens,
            **outcome_fields(outcome),
        )

    @property
    def player(self) -> int:
        """The index of the player: 1 in the group "12/3/p1", 0 in "12/3"."""
        last = self.group_id.removesuffix("/agents").rpartition("/")[2]
        return int(last[1:]) if last.startswith("p") else 0

    @property
    def is_sub_agent(self) -> bool:
        """True for the part of a trained sub-agent, False for that of a player."""
        return self.group_id.endswith("/agents")

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens or turns ended it."""
        return self.finish_reason == "length"

    @property
    def text(self) -> str:
        """The last message of the policy, without special tokens."""
        answers = (turn["content"] for turn in reversed(self.messages) if turn["role"] == "assistant")
        return next(answers, "")

    @property
    def opening(self) -> tuple[Mapping[str, str], ...]:
        """The messages of the prompt, before the policy's first message."""
        if self.loss_mask.all():  # one turn; the prompt may contain messages of the assistant
            return self.messages[:-1] if len(self.loss_mask) else self.messages
        places = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.messages[: places[-int(self.metrics.get("turns", len(places)))]]

    def runs(self) -> list[tuple[bool, int, int]]:
        """Return the runs of equal values in the loss mask as (is the policy's, start, end)."""
        ends = [0, *(1 + np.flatnonzero(np.diff(self.loss_mask))).tolist(), len(self.loss_mask)]
        return [(bool(self.loss_mask[start]), start, end) for start, end in pairwise(ends) if end > start]

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.loss_mask.sum())


def sampled_tokens(completion: SampledTokens) -> dict[str, Any]:
    """Return the token fields of an episode with a single completion."""
    return {
        "token_ids": completion.token_ids,
        "loss_mask": np.ones(len(completion.token_ids), np.bool_),
        "logprobs": completion.logprobs,
        "policy_version": completion.policy_version,
        "finish_reason": completion.finish_reason,
    }


def unsampled_tokens(token_ids: Sequence[int] | NDArray[np.int32]) -> dict[str, Any]:
    """Return the token fields of an episode that no policy sampled: no log-probs, and version -1."""
    count = len(token_ids)
    return {
        "token_ids": np.asarray(token_ids, np.int32),
        "loss_mask": np.ones(count, np.bool_),
        "logprobs": np.zeros(count, np.float32),
        "policy_version": np.full(count, -1, np.int32),
        "finish_reason": "stop",
    }


def outcome_fields(outcome: Outcome | None) -> dict[str, Any]:
    """Return the reward and its terms, or the failure, as fields of an episode."""
    if outcome is None:
        return {}
    if isinstance(outcome, Failure):
        return {"failure": f"{outcome.boundary}: {outcome.reason}"}
    return {"reward": outcome.reward, "reward_terms": dict(outcome.terms)}


def outcome_metrics(outcome: Outcome | None) -> dict[str, float]:
    """Return the metrics of a score; empty for a failure."""
    return {} if outcome is None or isinstance(outcome, Failure) else dict(outcome.metrics)
