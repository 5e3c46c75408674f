"""How agents explore contexts with code, and ask sub-agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from perilune.environments.builtin.tool_calls import Answer
from perilune.environments.core.agents import AgentProgram, together
from perilune.environments.core.long_context import Glimpse, glimpse_of
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
    """The fields of an environment section that say how agents explore."""

    prompt: prompts.Style = Field(
        "natural", description="compact: a few characters, for tiny models; an answer begins with ';'"
    )
    tool: prompts.Tool = Field(
        "python",
        description="python: code, which may ask; ask: single asks about a range of lines, whose answers"
        " enter the agent's context",
    )
    turns: int = Field(8, ge=1, le=64, description="maximum turns of each agent that explores")
    depth: int = Field(
        1,
        ge=0,
        le=4,
        description="how deep asks may be nested. 0: no asks; 1: asks are single turns; 2: an ask with a"
        " context of its own explores it with code, and so on",
    )
    asks: int = Field(4096, ge=1, le=10_000_000, description="maximum asks of an episode")
    calls: int = Field(
        8, ge=1, le=1000, description="maximum calls of ask and ask_all in a block, one after another"
    )
    ask_tokens: int | None = Field(
        None, ge=1, description="maximum tokens of the answer to an ask; null: the stage's max_tokens"
    )

    @model_validator(mode="after")
    def _can_ask(self) -> ExplorationSettings:
        if self.tool == "ask" and not self.depth:
            raise ValueError("tool: ask needs a depth of at least 1")
        return self

    def opening(self, context: Glimpse, question: str, depth: int) -> str:
        """The first message of an agent below which sub-agents may be nested so deep."""
        return prompts.opening(self.prompt, self.tool, context, question, depth)


@dataclass(slots=True)
class Agent:
    """An agent that explores.

    Attributes:
        agent: its id; "" for the player.
        depth: how deep the agents that it asks may be nested.
        children: agents that it has asked.
    """

    agent: str
    context: str
    depth: int
    children: int = 0

    def child(self) -> str:
        """The id of the next agent that it asks."""
        self.children += 1
        return f"{self.agent}.{self.children - 1}".lstrip(".")


class Exploration:
    """The agents of one episode.

    Args:
        most_output: characters of a block's output that an agent sees.

    Attributes:
        counts: metrics: blocks of code, asks, asks with an empty answer (unanswered), agents that explored
            a context of their own, and killed blocks by cause (contained/...).
    """

    def __init__(self, code: CodeRunner, settings: ExplorationSettings, most_output: int) -> None:
        self._code, self._settings, self._most_output = code, settings, most_output
        self.counts = dict.fromkeys(("blocks", "asks", "unanswered", "agents"), 0.0)

    @property
    def strategy(self) -> str:
        """Whether the agents wrote code, and asked."""
        asked = int(self.counts["asks"])
        alone = "code" if self.counts["blocks"] else "guess"
        return {0: alone, 1: "one ask"}.get(asked, "many asks")

    def explore(self, agent: Agent, messages: Sequence[Message]) -> AgentProgram[str | None]:
        """The answer of an agent; None if it does not answer within its turns.

        Args:
            messages: its prompt; none for the player, whose prompt is the task's.
        """
        functions = asks.FUNCTIONS if agent.depth else ()
        interpreter = Interpreter(self._code, {"C": agent.context}, functions, self._settings.calls)
        style = self._settings.prompt
        for _ in range(self._settings.turns):
            (text,) = yield [AgentTurn(agent.agent, tuple(messages), "explore")]
            action = actions.read(text, self._settings.tool, style)
            if isinstance(action, Answer):
                return action.text
            if isinstance(action, actions.Code):
                block = yield from self._run(agent, interpreter, action.text)
                if block.answer is not None:
                    return block.answer
                output = prompts.shown(style, block, self._most_output)
            elif isinstance(action, actions.Ask):
                output = yield from self._ask(agent, action)
            else:
                output = f"error: {action.why}\n"
            messages = [{"role": "tool", "content": output}]
        return None

    def _run(self, agent: Agent, interpreter: Interpreter, code: str) -> AgentProgram[BlockResult]:
        """Run a block, and answer its calls."""
        self._count("blocks")
        running = interpreter.run(code)
        try:
            call = next(running)
            while True:
                try:
                    answers = yield from self._answer_all(agent, asks.questions(call))
                    result = Result(answers[0] if call.function == "ask" else answers)
                except InvalidCallError as error:
                    result = Result(error=str(error))
                call = running.send(result)
        except StopIteration as end:
            block: BlockResult = end.value
        if block.cause:
            self._count(f"contained/{block.cause}")
        return block

    def _ask(self, agent: Agent, action: actions.Ask) -> AgentProgram[str]:
        """The output of a single ask."""
        try:
            asked = asks.Question(action.question(agent.context))
            (answer,) = yield from self._answer_all(agent, [asked])
        except InvalidCallError as error:
            return f"error: {error}\n"
        return f"={answer}\n" if self._settings.prompt == "compact" else answer[: self._most_output]

    def _answer_all(self, agent: Agent, asked: Sequence[asks.Question]) -> AgentProgram[list[str]]:
        """The answers of sub-agents, which work at the same time."""
        left = self._settings.asks - int(self.counts["asks"])
        if len(asked) > left:
            raise InvalidCallError(
                f"{len(asked)} asks are needed, and {left} of {self._settings.asks} are left in this episode"
            )
        self._count("asks", len(asked))
        answers = yield from together([self._answer(agent.child(), agent.depth - 1, one) for one in asked])
        self._count("unanswered", sum(not answer for answer in answers))
        return answers

    def _answer(self, child: str, depth: int, asked: asks.Question) -> AgentProgram[str]:
        """The answer of a sub-agent, which explores its context if `depth` is not 0."""
        if asked.context and depth:
            self._count("agents")
            text = self._settings.opening(glimpse_of(asked.context), asked.text, depth)
            found = yield from self.explore(Agent(child, asked.context, depth), [_user(text)])
            return found or ""
        text = "\n".join(filter(None, (asked.context, asked.text)))
        (answer,) = yield [AgentTurn(child, (_user(text),), "ask", self._settings.ask_tokens)]
        return answer

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
