"""The environment protocol: tasks, sessions, observations, transcripts and scores.

An `Environment` yields tasks and opens a `Session` on one of them. A session shows an `Observation` to the
player whose turn it is and takes that player's action as text, until the observation is `done`:

    session = environment.reset(task, seed=0)
    while not session.observation.done:
        action = policy(task.prompt, session.observation.messages)
        session.step(action)
    session.close()

A `Transcript` records the actions of an episode, and `Environment.score` computes the reward from it. Task,
actions and seed determine the episode: the same transcript has the same outcome in any process, at any time.

Derive your environment from `SingleTurn` (a prompt and a score) or from `MultiTurn` (a generator that plays
the episode). Both implement the protocol, and `perilune.verifiers.conformance` tests it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from perilune.errors import RequestError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}"""

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance.

    Attributes:
        task_id: a stable digest of the problem. It alone determines the split, so no task is in both splits.
        prompt: the opening messages, which every player sees before its first observation. A text raises
            RequestError.
        data: JSON-serializable values that playing and scoring need, such as the answer.
        difficulty: a number that grows with the difficulty; None if unknown.
    """

    task_id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]
    difficulty: float | None = None

    def __post_init__(self) -> None:
        prompt, task_id = cast("Any", self.prompt), cast("Any", self.task_id)
        if not isinstance(task_id, str):
            raise RequestError(
                f"the id of task {task_id!r} is not a text",
                where="environment",
                remedy=f"Task('{task_id}', ...)",
            )
        if isinstance(prompt, str):
            what = f"the prompt of task {self.task_id} is a text, not messages"
            raise RequestError(what, where="environment", remedy='write ({"role": "user", "content": text},)')


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A turn that an agent of the player is due to take.

    Attributes:
        agent: "" for the player itself. Sub-agents have ids of numbers, "2" for the third that the player
            started, "2.0" for the first that this one started. Each has a context of its own.
        messages: messages that the agent has not seen yet. The first ones of a sub-agent are its prompt.
        name: purpose of the sub-agent in spans, such as "ask".
        max_tokens: most tokens of the turn; None for as many as a turn of the player may have.
        continues: whether the player itself continues in this context. Limits then apply as in its first one.
        results: ids of the sub-agents of this agent whose results the turn receives, in its messages or in
            what code made of them. Spans record it; it changes nothing else.
    """

    agent: str
    messages: tuple[Message, ...]
    name: str = "agent"
    max_tokens: int | None = None
    continues: bool = False
    results: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """True for a turn of the player, in whichever context."""
        return self.continues or not self.agent


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of the last action, and the new messages for the player whose turn it is.

    Attributes:
        messages: messages that this player has not seen yet. The first observation follows the task's prompt,
            and may hold messages of the role "assistant" that the policy did not write. Empty when done.
        player: index of the player whose turn it is, from 0. Players who move simultaneously act one after
            another; none of them sees the others' actions before all have acted.
        rewards: one reward per player for the last action. Empty means 0 for every player.
        terms: named parts of the reward, summed over the episode. They are reported and not optimized.
        metrics: further figures. The last value of each name is kept.
        done: whether the episode has ended.
        truncated: whether a limit ended it, not a rule of the environment.
        legal: all legal actions; None if they cannot be listed.
        info: JSON-serializable values for logs.
        turns: turns that may be sampled at the same time, if sub-agents are due or the turn has more than
            messages; `messages` is then empty.
            The next actions are theirs, in this order; the player's own is the first. A limit on tokens never
            ends the episode in a turn of a true sub-agent: the action is what was sampled, and is empty if
            there was no room for any.
    """

    messages: tuple[Message, ...] = ()
    player: int = 0
    rewards: tuple[float, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    truncated: bool = False
    legal: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[AgentTurn] = ()

    @property
    def due(self) -> Sequence[AgentTurn]:
        """The turns to sample next: `turns`, or the player's own."""
        if self.done:
            return ()
        return self.turns or (AgentTurn("", self.messages),)


@dataclass(frozen=True, slots=True)
class Transcript:
    """The actions of an episode, sufficient to replay it.

    Attributes:
        text: the last action without special tokens. In a single-turn environment it is the answer.
        finished: False if the token limit cut off the last action before an end-of-sequence token.
        earlier: all actions before the last one, of all players and sub-agents, in order.
        seed: seed of the session.
        player: index of the player whose score is requested.
        cut_off: indices of the actions in `earlier` that the token limit cut off.
    """

    text: str
    finished: bool = True
    earlier: tuple[str, ...] = ()
    seed: int = 0
    player: int = 0
    cut_off: tuple[int, ...] = ()

    @property
    def actions(self) -> tuple[str, ...]:
        """All actions in order."""
        return (*self.earlier, self.text)

    def is_finished(self, index: int) -> bool:
        """Return False if the token limit cut off the action at this index of `actions`."""
        return index not in self.cut_off if index < len(self.earlier) else self.finished


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of a scored transcript.

    Attributes:
        reward: the number that training maximizes.
        terms: named parts of the reward.
        metrics: further figures. "strategy/NAME": 1.0 names the strategy that the environment recognized.
    """

    reward: float
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """The outcome of an episode that could not be scored. It is counted and left out of its group.

    Attributes:
        boundary: the component that failed: "environment", "verifier", "model" or "sandbox".
    """

    boundary: str
    reason: str


Outcome = Score | Failure


class EpisodeFailedError(Exception):
    """Raise it in a session to name the component that failed. Any other exception blames the environment."""

    def __init__(self, boundary: str, reason: str) -> None:
        super().__init__(f"{boundary}: {reason}")
        self.failure = Failure(boundary, reason)


class Session(Protocol):
    """One episode in progress.

    Attributes:
        observation: the latest observation.
    """

    observation: Observation

    def step(self, action: str, finished: bool = True) -> Observation:
        """Apply the action of the player whose turn it is, and return the next observation.

        Args:
            finished: False if a limit cut the action off. The episode is then done.
        """

    def close(self) -> None:
        """Release the session's resources. It may be called before the episode is done, and repeatedly."""


class Environment(Protocol):
    """A family of tasks and the rules by which they are played and scored.

    Attributes:
        id: name of the environment in episodes, such as "reasoning_gym/chain_sum".
        players: number of players.
        max_turns: maximum number of actions in an episode, of all players together. Turns of sub-agents do
            not count; the environment limits their number.
        confined: True if sessions only compute, so that the scorer's process may deny them everything else.
            False if they start processes, write files or use the network. Such an environment must itself
            confine the code that it runs.
    """

    id: str
    players: int
    max_turns: int
    confined: bool

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct tasks of a split, in an order that `seed` determines. May be infinite."""

    def reset(self, task: Task, seed: int) -> Session:
        """Open a session on `task`. `seed` determines every random draw of the episode."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Score a transcript: the total that a session with the same actions gives `transcript.player`.

        A pure function. It may be slow or run untrusted code, so call it through `perilune.verifiers.Scorer`.
        """

    def close(self) -> None:
        """Release the resources that the sessions share. It may be called repeatedly."""
