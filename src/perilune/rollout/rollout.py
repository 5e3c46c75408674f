"""Episodes in progress: the messages and tokens of each player, and how the episode ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.data.routes import Routes, no_routes
from perilune.data.spans import Span, make_span_id
from perilune.engine.request import Completion
from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.protocol import AgentTurn, Failure, Message, Observation, Outcome, Task
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_continuation
from perilune.verifiers.sessions import RemoteSession


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the policy.

    Attributes:
        start: index of its first token among the player's tokens after the prompt.
        context: all tokens that the engine continued.
    """

    start: int
    context: list[int]
    completion: Completion


@dataclass(slots=True)
class Trajectory:
    """The messages and tokens of one player or sub-agent. Tokens are only ever appended.

    Attributes:
        name: purpose of a sub-agent.
        rounds: for each turn, the round of the rollout in which it was sampled (`Rollout.rounds`).
        is_refused: whether its next turn is impossible: its messages cannot be encoded, the model has no room
            for them, or `episodes.max_turns` is reached. The actions of a sub-agent are then empty.
        is_full: whether a limit prevented its next turn: the model's positions, or `episodes.max_turns`.
        joined: round of the last turn that received its result; -1 if none did.
        opening: the messages of the prompt.
        messages: all messages so far, as text.
        token_ids: tokens after the prompt, both sampled and observed.
    """

    name: str = "agent"
    rounds: list[int] = field(default_factory=list)
    is_refused: bool = False
    is_full: bool = False
    joined: int = -1
    opening: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def begin(self, messages: Sequence[Message], prompt_ids: list[int]) -> None:
        self.opening, self.messages, self.prompt_ids = tuple(messages), [*messages], prompt_ids

    def add_observation(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        """Append the messages since the last turn.

        Raises:
            RequestError: when the chat template refuses them, or the vocabulary lacks a character.
        """
        self.token_ids += encode_continuation(tokenizer, self.opening, messages, self.token_ids[-1])
        self.messages += messages

    def context(self) -> list[int]:
        """Return all tokens so far, with the prompt."""
        return self.prompt_ids + self.token_ids

    def add_completion(self, context: list[int], completion: Completion, text: str) -> None:
        """Append a turn of the policy."""
        self.turns.append(Turn(len(self.token_ids), context, completion))
        self.token_ids += completion.token_ids.tolist()
        self.messages.append({"role": "assistant", "content": text})

    def sampled_values(self, name: str, fill: float, dtype: type[np.generic]) -> NDArray[Any]:
        """Return [T] values of a field of the turns' completions; `fill` on observed tokens."""
        values = np.full(len(self.token_ids), fill, dtype)
        for turn in self.turns:
            part = getattr(turn.completion, name)
            values[turn.start : turn.start + len(part)] = part
        return values

    def top_tokens(self) -> dict[str, Any]:
        """Return the fields `top_ids` and `top_logprobs` of an episode, [T, K]; empty if not recorded."""
        size = max((len(top) for turn in self.turns for top in turn.completion.top_logprobs or ()), default=0)
        if not size:
            return {}
        ids = np.full((len(self.token_ids), size), -1, np.int32)
        logprobs = np.zeros(ids.shape, np.float32)
        for turn in self.turns:
            for position, top in enumerate(turn.completion.top_logprobs or (), turn.start):
                ids[position], logprobs[position] = zip(*top, strict=True)
        return {"top_ids": ids, "top_logprobs": logprobs}

    def routes(self) -> Routes | None:
        """Return the routes of all tokens but the last; None if the engine recorded none.

        A turn has routes of its whole context, but tokens of earlier turns keep the routes of those turns,
        with which the policy sampled. When weights change within a turn, the engine computes the context
        again, so the routes of tokens sampled before the change are unknown, and their rows are missing.
        """
        recorded = [routed for turn in self.turns if (routed := turn.completion.routed_experts) is not None]
        if not recorded:
            return None
        routes = no_routes(len(self.prompt_ids) + len(self.token_ids) - 1, recorded[0])
        known = 0
        for turn in self.turns:
            part, versions = turn.completion.routed_experts, turn.completion.policy_version
            end = len(turn.context) + len(versions) - 1
            if part is not None and len(part) == end:
                routes[known:end] = part[known:]
                older = np.flatnonzero(versions != versions[-1])
                routes[len(turn.context) - 1 + older] = no_routes(1, part)
            known = end
        return routes

    def span(self, span_id: str) -> Span:
        """Return the span of this agent. A player's has no messages and tokens: its episode has them.

        Args:
            span_id: "0" for player 0, "0.2" for its sub-agent "2".
        """
        mask, is_sub_agent = self.mask(), "." in span_id
        sampled = int(mask.sum())
        return Span(
            span_id=span_id,
            name=self.name,
            rounds=tuple(self.rounds),
            joined=self.joined,
            prompt_tokens=len(self.prompt_ids) + len(self.token_ids) - sampled,
            tokens=sampled,
            policy_version=int(self.turns[-1].completion.policy_version[-1]) if self.has_sampled else -1,
            messages=tuple(self.messages) if is_sub_agent else (),
            token_ids=tuple(self.context()) if is_sub_agent else (),
            loss_mask=(*(False for _ in self.prompt_ids), *mask.tolist()) if is_sub_agent else (),
            finish_reason=self.finish_reason if is_sub_agent else "",
        )

    @property
    def finish_reason(self) -> FinishReason:
        """How a sub-agent's last turn ended; "length" if it has no turn, or a limit prevented the next."""
        return "length" if self.is_full or not self.turns else self.turns[-1].completion.finish_reason

    @property
    def has_sampled(self) -> bool:
        """True if its last turn has a token."""
        return bool(self.turns) and len(self.turns[-1].completion.token_ids) > 0

    def mask(self) -> NDArray[np.bool_]:
        """Return bool[T], True on tokens that the policy sampled."""
        sampled = np.zeros(len(self.token_ids), np.bool_)
        for turn in self.turns:
            sampled[turn.start : turn.start + len(turn.completion.token_ids)] = True
        return sampled


@dataclass(frozen=True, slots=True, eq=False)
class DueTurn:
    """A turn to sample.

    Attributes:
        agent: id of the sub-agent; "" for the player to move in its first context.
        max_tokens: most tokens to sample; None for the limit of the sampling parameters.
        number: index of the action among all actions of the episode.
        is_own: whether the player itself takes the turn, in its first or a later context.
        received: the sub-agents whose results the turn receives.
    """

    rollout: Rollout
    agent: str
    trajectory: Trajectory
    messages: tuple[Message, ...]
    max_tokens: int | None
    number: int
    is_own: bool
    received: tuple[Trajectory, ...] = ()

    @property
    def is_first(self) -> bool:
        """True for the first turn of the episode, which all episodes of a group sample from one prompt."""
        return not self.number and not self.agent

    @property
    def key(self) -> tuple[int, int, int]:
        """Key of the turn's random numbers; no other turn of a run has the same key.

        The first turns of a group are sampled together under the key of the rollout: seed (64 bits), step and
        task (32 bits each). In later turns, the turn takes the upper 10 bits of the step, and the sample the
        upper 12 bits of the task. Further bits of the turn change the highest 16 bits of the seed.
        """
        seed, step, index = self.rollout.key
        high, turn = divmod(self.number, 1024)
        seed ^= high % (1 << 16) << 48
        return seed, turn << 22 | step % (1 << 22), (self.rollout.sample % 4096) << 20 | index % (1 << 20)


class SampledTurn(NamedTuple):
    """One sampled turn: the tokens that the engine continued, its completion, and the text."""

    context: list[int]
    completion: Completion
    text: str


@dataclass(slots=True, eq=False)
class Rollout:
    """One episode of all players.

    Attributes:
        key: (seed, step, index of the task in the step).
        sample: index of the episode among those of its task.
        agents: the trajectories of sub-agents, by player and id.
        due: the turns to sample next, of the player to move and of sub-agents.
        rounds: number of rounds so far. In a round, all turns that are due are sampled together.
        player_turns: turns of players so far, in all their contexts; without those of sub-agents.
        opponents: players whose turns the opponents' engine samples.
        finish_reason: "length" when a limit ended the episode.
        failure: the error that ended the episode; it then has no score.
    """

    task: Task
    key: tuple[int, int, int]
    sample: int
    session: RemoteSession
    players: int
    trajectories: list[Trajectory] = field(init=False)
    totals: EpisodeTotals = field(init=False)
    agents: dict[tuple[int, str], Trajectory] = field(default_factory=dict)
    due: list[DueTurn] = field(default_factory=list)
    rounds: int = 0
    player_turns: int = 0
    opponents: frozenset[int] = frozenset()
    finish_reason: FinishReason = "stop"
    failure: Failure | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.trajectories = [Trajectory() for _ in range(self.players)]
        self.totals = EpisodeTotals(self.players)

    @property
    def observation(self) -> Observation:
        """The observation of the player to move."""
        assert isinstance(self.session.result, Observation)
        return self.session.result

    @property
    def is_opponents_turn(self) -> bool:
        return self.observation.player in self.opponents

    @property
    def own_players(self) -> list[int]:
        """The players whose turns the policy samples."""
        return [player for player in range(self.players) if player not in self.opponents]

    @property
    def actions(self) -> list[str]:
        """The actions of all players and sub-agents, in order."""
        return self.session.actions

    @property
    def is_single_turn(self) -> bool:
        return not self.session.is_held

    def take(self, sampled: Mapping[DueTurn, SampledTurn]) -> list[str]:
        """Append the sampled turns; return the action of each due turn, "" for one that was not sampled."""
        for turn in self.due:
            if result := sampled.get(turn):
                turn.trajectory.add_completion(result.context, result.completion, result.text)
                turn.trajectory.rounds.append(self.rounds)
                for sub_agent in turn.received:
                    sub_agent.joined = self.rounds
                if turn.is_own:
                    self.player_turns += 1
                    self.finish_reason = result.completion.finish_reason
                if result.completion.finish_reason == "aborted":
                    self.fail("model", "sampling of the turn was aborted")
        self.rounds += 1
        return [sampled[turn].text if turn in sampled else "" for turn in self.due]

    @property
    def has_finished_turn(self) -> bool:
        """False if a limit cut off the player's own turn of the last round."""
        return not self.due[0].is_own or self.finish_reason == "stop"

    def fail(self, boundary: str, reason: str) -> None:
        """End the episode without a score."""
        self.failure, self.is_over = Failure(boundary, reason), True

    def truncate(self) -> None:
        """End the episode with the score so far."""
        self.finish_reason, self.is_over = "length", True

    def advance(self) -> None:
        """Record the result of the session's last step."""
        result = self.session.result
        if isinstance(result, Failure):
            self.fail(result.boundary, result.reason)
            return
        self.totals.add(result)
        if result.truncated:
            self.finish_reason = "length"
        self.is_over = result.done
        self.due = [
            DueTurn(
                self,
                turn.agent,
                self._trajectory(turn),
                turn.messages,
                turn.max_tokens,
                number,
                turn.is_own,
                self._received(turn),
            )
            for number, turn in enumerate(result.due, len(self.actions))
        ]

    def _trajectory(self, turn: AgentTurn) -> Trajectory:
        player = self.observation.player
        if not turn.agent:
            return self.trajectories[player]
        return self.agents.setdefault((player, turn.agent), Trajectory(turn.name))

    def _received(self, turn: AgentTurn) -> tuple[Trajectory, ...]:
        """Return the sub-agents whose results a turn receives; one that was never due is left out."""
        found = (self.agents.get((self.observation.player, agent)) for agent in turn.results)
        return tuple(trajectory for trajectory in found if trajectory is not None)

    def sub_agents(self, player: int) -> dict[str, Trajectory]:
        """Return the trajectories of a player's sub-agents by id, in the order in which they began."""
        return {agent: trajectory for (owner, agent), trajectory in self.agents.items() if owner == player}

    def spans(self, player: int) -> tuple[Span, ...]:
        """Return the spans of a player and its sub-agents; none if it had no sub-agent."""
        sub_agents = self.sub_agents(player)
        if not sub_agents:
            return ()
        by_id = {"": self.trajectories[player], **sub_agents}
        return tuple(node.span(make_span_id(player, agent)) for agent, node in by_id.items())

    def outcome(self, player: int) -> Outcome:
        return self.totals.score(player) if self.failure is None else self.failure


@dataclass(frozen=True, slots=True, eq=False)
class AgentRollout:
    """One agent's part of a rollout, which becomes an episode.

    Attributes:
        agent: a sub-agent of the player; "" for the player itself.
    """

    rollout: Rollout
    player: int
    agent: str = ""

    @property
    def trajectory(self) -> Trajectory:
        """The agent's messages and tokens."""
        rollout = self.rollout
        return rollout.agents[self.player, self.agent] if self.agent else rollout.trajectories[self.player]

    @property
    def outcome(self) -> Outcome:
        """The score of the player, or the failure."""
        return self.rollout.outcome(self.player)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the player and its sub-agents; a sub-agent's episode has none."""
        return () if self.agent else self.rollout.spans(self.player)

    @property
    def group_id(self) -> str:
        """Id of the agent's group: "step/index", then "/p1" for player 1, then "/agents" for sub-agents."""
        _, step, index = self.rollout.key
        player = f"/p{self.player}" if self.player else ""
        return f"{step}/{index}{player}{'/agents' if self.agent else ''}"

    @property
    def episode_id(self) -> str:
        """Id of the episode: group id, "/", sample; for a sub-agent, then "." and its id."""
        return f"{self.group_id}/{self.rollout.sample}{'.' if self.agent else ''}{self.agent}"
