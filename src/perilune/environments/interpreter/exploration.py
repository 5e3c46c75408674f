"""Agents that explore a context with code, and ask sub-agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field, model_validator

from perilune.environments.builtin.tool_calls import Answer
from perilune.environments.core.agents import AgentProgram, gather
from perilune.environments.core.long_context import Glimpse, make_glimpse
from perilune.environments.core.protocol import AgentTurn, Message
from perilune.environments.interpreter import actions, asks, prompts
from perilune.environments.interpreter.interpreter import (
    BlockResult,
    CodeRunner,
    Interpreter,
    InvalidCallError,
    Result,
)
from perilune.frozen import Frozen


class ExplorationSettings(Frozen):
    """The fields of an environment section for agents that explore a context."""

    prompt: prompts.Style = Field(
        "natural", description="compact: a few characters, for tiny models; an answer begins with ';'"
    )
    tool: prompts.Tool = Field(
        "python",
        description="python: the agent writes code, which may ask the model; ask: the agent asks the"
        " model one question at a time about a range of lines, and each answer enters the"
        " agent's context",
    )
    turns: int = Field(8, ge=1, le=64, description="maximum turns of each agent that explores")
    depth: int = Field(
        1,
        ge=0,
        le=4,
        description="how deep asks (questions of an agent to the model) may be nested. 0: no asks; 1:"
        " each ask is a single turn; 2: a sub-agent that gets a context with its question may"
        " explore this context, and its own asks are single turns; and so on",
    )
    asks: int = Field(4096, ge=1, le=10_000_000, description="maximum asks of an episode")
    calls_per_block: int = Field(
        8,
        ge=1,
        le=1000,
        description="maximum calls of ask and ask_all in a block of code; an ask_all counts as one call",
    )
    ask_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of the answer to a single-turn ask; null: the stage's max_tokens",
    )

    @model_validator(mode="after")
    def _can_ask(self) -> ExplorationSettings:
        if self.tool == "ask" and not self.depth:
            raise ValueError("tool: ask needs a depth of at least 1")
        return self

    def render_opening(self, context: Glimpse, question: str, depth: int) -> str:
        """Return the first message of an agent below which sub-agents may be nested so deep."""
        return prompts.render_opening(self.prompt, self.tool, context, question, depth)


@dataclass(slots=True)
class Agent:
    """An agent that explores.

    Attributes:
        agent_id: "" for the player.
        depth: how deep the agents that it asks may be nested.
        children: number of the agents that it asked so far.
        answered: ids of those whose answers its next turn receives.
    """

    agent_id: str
    context: str
    depth: int
    children: int = 0
    answered: list[str] = field(default_factory=list)

    def next_child_id(self) -> str:
        self.children += 1
        return f"{self.agent_id}.{self.children - 1}".lstrip(".")

    def take_answered(self) -> tuple[str, ...]:
        """Return `answered` and empty it."""
        answered, self.answered = tuple(self.answered), []
        return answered


class Exploration:
    """The agents of one episode.

    Args:
        max_output_chars: characters of a block's output that an agent sees.

    Attributes:
        counts: metrics: blocks of code, asks, asks with an empty answer (unanswered), agents that explored
            a context of their own, and killed blocks by cause (contained/...).
    """

    def __init__(self, code: CodeRunner, settings: ExplorationSettings, max_output_chars: int) -> None:
        self._code, self._settings, self._max_output_chars = code, settings, max_output_chars
        self.counts = dict.fromkeys(("blocks", "asks", "unanswered", "agents"), 0.0)

    @property
    def strategy(self) -> str:
        """The strategy: "guess", "code", "one ask" or "many asks"."""
        ask_count = int(self.counts["asks"])
        without_asks = "code" if self.counts["blocks"] else "guess"
        return {0: without_asks, 1: "one ask"}.get(ask_count, "many asks")

    def explore(self, agent: Agent, messages: Sequence[Message]) -> AgentProgram[str | None]:
        """Return the answer of an agent; None if it does not answer within its turns.

        Args:
            messages: its prompt; none for the player, whose prompt is the task's.
        """
        functions = asks.FUNCTIONS if agent.depth else ()
        interpreter = Interpreter(self._code, {"C": agent.context}, functions, self._settings.calls_per_block)
        style = self._settings.prompt
        for _ in range(self._settings.turns):
            results = agent.take_answered()
            (text,) = yield [AgentTurn(agent.agent_id, tuple(messages), "explore", results=results)]
            action = actions.parse_action(text, self._settings.tool, style)
            if isinstance(action, Answer):
                return action.text
            if isinstance(action, actions.Code):
                block = yield from self._run(agent, interpreter, action.text)
                if block.answer is not None:
                    return block.answer
                output = prompts.render_output(style, block, self._max_output_chars)
            elif isinstance(action, actions.Ask):
                output = yield from self._ask(agent, action)
            else:
                output = f"error: {action.reason}\n"
            messages = [{"role": "tool", "content": output}]
        return None

    def _run(self, agent: Agent, interpreter: Interpreter, code: str) -> AgentProgram[BlockResult]:
        self._increment("blocks")
        running = interpreter.run(code)
        try:
            call = next(running)
            while True:
                try:
                    answers = yield from self._answer_all(agent, asks.parse_questions(call))
                    result = Result(answers[0] if call.function == "ask" else answers)
                except InvalidCallError as error:
                    result = Result(error=str(error))
                call = running.send(result)
        except StopIteration as end:
            block: BlockResult = end.value
        if block.cause:
            self._increment(f"contained/{block.cause}")
        return block

    def _ask(self, agent: Agent, action: actions.Ask) -> AgentProgram[str]:
        try:
            question = asks.Question(action.question(agent.context))
            (answer,) = yield from self._answer_all(agent, [question])
        except InvalidCallError as error:
            return f"error: {error}\n"
        return f"={answer}\n" if self._settings.prompt == "compact" else answer[: self._max_output_chars]

    def _answer_all(self, agent: Agent, questions: Sequence[asks.Question]) -> AgentProgram[list[str]]:
        """Return the answers of sub-agents, which work at the same time."""
        remaining = self._settings.asks - int(self.counts["asks"])
        if len(questions) > remaining:
            raise InvalidCallError(
                f"{len(questions)} asks are needed, and {remaining} of {self._settings.asks} are left in this"
                " episode"
            )
        self._increment("asks", len(questions))
        children = [agent.next_child_id() for _ in questions]
        answers = yield from gather(
            [
                self._answer(child, agent.depth - 1, question)
                for child, question in zip(children, questions, strict=True)
            ]
        )
        agent.answered += children
        self._increment("unanswered", sum(not answer for answer in answers))
        return answers

    def _answer(self, child: str, depth: int, question: asks.Question) -> AgentProgram[str]:
        """Return the answer of a sub-agent, which explores its context if `depth` is not 0."""
        if question.context and depth:
            self._increment("agents")
            text = self._settings.render_opening(make_glimpse(question.context), question.text, depth)
            reply = yield from self.explore(Agent(child, question.context, depth), [_user_message(text)])
            return reply or ""
        text = "\n".join(filter(None, (question.context, question.text)))
        (answer,) = yield [AgentTurn(child, (_user_message(text),), "ask", self._settings.ask_tokens)]
        return answer

    def _increment(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}
