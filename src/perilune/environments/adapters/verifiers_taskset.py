"""Runs tasksets of verifiers (v1): the package's environment, with the policy as its agent."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects import parse_message
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.graph import prepare_turn
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Response
from verifiers.v1.utils.loaders import environment_class, resolve_env_config

from perilune.environments.adapters.global_random import GlobalRandom
from perilune.environments.core.dialogue import Ask
from perilune.environments.core.protocol import EpisodeFailedError, Message, Score
from perilune.errors import RequestError

DEFAULT_MAX_TURNS = 16  # if the environment sets no limit
MAX_TASKS = 10_000  # read from an infinite taskset


class TasksetPackage:
    """A taskset and the environment that its package provides for it, by default a single-turn one."""

    def __init__(self, name: str, config: Mapping[str, Any], turns: int | None) -> None:
        # It warns of harnesses, which are not used here.
        logging.getLogger("verifiers.v1.env").setLevel(logging.ERROR)
        try:
            kind = environment_class(name)
            settings = resolve_env_config({"taskset": {**config, "id": name}})
            self._env: Any = kind(settings)
            first = next(iter(self._env.taskset))
        except ValidationError as error:
            path = ".".join(map(str, error.errors()[0]["loc"][1:]))
            raise RequestError(error.errors()[0]["msg"], where=f"environment.config.{path}") from None
        except StopIteration:
            raise RequestError(f"'{name}' has no tasks", where="environment.package") from None
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise RequestError(f"'{name}': {error}", where="environment.package") from None
        agents = {
            field: getattr(settings, field)
            for field in type(settings).model_fields
            if isinstance(getattr(settings, field), AgentConfig)
        }
        if len(agents) != 1:
            raise _refusal(f"'{name}' has {len(agents)} agents ({', '.join(agents)}); one is supported")
        ((self._agent, agent),) = agents.items()
        max_turns = turns or agent.max_turns or DEFAULT_MAX_TURNS
        self.turns = 1 if kind is SingleAgentEnv else max_turns
        _check_supported(name, self._env, first)
        if kind is not SingleAgentEnv:
            self._check_conversations(name, first)
        taskset = self._env.taskset
        self._is_infinite = not taskset.bounded if hasattr(taskset, "bounded") else taskset.INFINITE

    def rows(self) -> Iterator[tuple[Sequence[Message], Mapping[str, Any]]]:
        """Return the prompt and the JSON-serializable row of each task."""
        tasks = islice(self._env.taskset, MAX_TASKS if self._is_infinite else None)
        return ((_opening_messages(task.data), {"row": task.data.model_dump(mode="json")}) for task in tasks)

    async def run_episode(self, row: Mapping[str, Any], ask: Ask) -> Score:
        """Run one episode with `ask` as the agent, and return the task's score of its trace."""
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row["row"]), self._env.taskset.config.task)
        agent = PolicyAgent(ask, self.turns)
        try:
            await self._run(task, agent)
        finally:
            if agent.conversations > 1:
                raise EpisodeFailedError("environment", "it holds several conversations, not one") from None
        if len(agent.traces) != 1:
            raise EpisodeFailedError("environment", f"it held {len(agent.traces)} conversations, not one")
        (trace,) = agent.traces
        if type(self._env).finalize is not vf.Env.finalize:
            info = vf.EnvInfo(id=self._env.config.env_id)
            await self._env.finalize(task, vf.Episode(env=info, task=trace.task, traces=agent.traces))
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        terms = {name: float(reward.score) for name, reward in rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Score(float(trace.reward), terms, metrics)

    async def _run(self, task: Any, agent: PolicyAgent) -> None:
        agents = type("Agents", (), {self._agent: agent})()
        await self._env.setup(agents)
        await self._env.run(task, agents)

    def _check_conversations(self, name: str, task: Any) -> None:
        """Refuse an environment that holds several conversations when every reply is empty."""

        async def ask(conversation: Sequence[Message]) -> str:
            return ""

        agent = PolicyAgent(ask, self.turns, scores=False)
        with closing(asyncio.new_event_loop()) as loop, GlobalRandom(0).install(), suppress(Exception):
            loop.run_until_complete(self._run(task, agent))
        if agent.conversations > 1:
            raise _refusal(f"'{name}' holds several conversations in an episode")


class PolicyAgent:
    """An agent whose replies come from the policy. It holds one conversation."""

    trainable = True

    def __init__(self, ask: Ask, turns: int, *, scores: bool = True) -> None:
        self._ask, self._turns, self._scores = ask, turns, scores
        self.conversations = 0  # that the environment has begun
        self.traces: list[Any] = []

    async def run(self, task: Any, **options: Any) -> Any:
        """Reply once to the task's prompt, and score the reply."""
        async with self.interaction(task) as conversation:
            await conversation.turn()
        return conversation.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[Conversation]:
        """A conversation on the task, scored when the context is left."""
        self.conversations += 1
        if self.conversations > 1:
            raise EpisodeFailedError("environment", "a second conversation")
        conversation = Conversation(task, self._ask, self._turns)
        yield conversation
        conversation.trace.stop("user_closed")
        conversation.trace.is_completed = True
        try:
            if self._scores:
                await task.score(conversation.trace)
        except Exception as error:  # a reward function may raise anything
            raise EpisodeFailedError("verifier", f"{type(error).__name__}: {error}") from None
        self.traces.append(conversation.trace)


class Conversation:
    """A conversation and its trace, from which the package computes rewards."""

    def __init__(self, task: Any, ask: Ask, turns: int) -> None:
        self._ask, self._turns_left = ask, turns
        self._stops = task.hooks("stop")
        trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace: Any = vf.Trace(task=trace_task, agent=AgentInfo(config=vf.AgentConfig()))
        self.trace.state = state_cls(type(task))()
        self._messages = _parse_messages(_opening_messages(task.data))
        self._prompted = task.data.prompt is not None

    async def turn(self, message: Any = None) -> Any:
        """Return the reply to `message` or the task's prompt; empty if the conversation has ended."""
        if message is None and not self._prompted:
            raise ValueError("the task has no prompt to reply to")
        new = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        self._messages += _parse_messages(new)
        if not self._turns_left or self.trace.stop_condition is not None:
            return vf.Segment(messages=[], terminated=True)
        self._turns_left, self._prompted = self._turns_left - 1, False
        reply = AssistantMessage(content=await self._ask([convert_message(item) for item in self._messages]))
        response = Response(id="", created=0, model="policy", message=reply, finish_reason="stop")
        prepare_turn(self.trace, self._messages).commit(response)
        self._messages.append(reply)
        for stop in self._stops:
            stops = stop(trace=self.trace)
            if await stops if inspect.isawaitable(stops) else stops:
                self.trace.stop(stop.__name__)
        return vf.Segment(messages=[reply])


def convert_message(message: Any) -> Message:
    """Convert a message of the package.

    Raises:
        EpisodeFailedError: if it contains anything but text.
    """
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeFailedError("environment", "a message contains something other than text")
        content = "".join(part["text"] for part in content)
    return {"role": str(fields["role"]), "content": str(content)}


def import_taskset(name: str) -> ModuleType:
    """Import a package by the name that verifiers uses. Its own tasksets take precedence.

    Raises:
        RequestError: if it is not installed or cannot be loaded.
    """
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    spec = find_spec("verifiers")
    folders = spec.submodule_search_locations or () if spec else ()
    if any(Path(folder, "v1", "tasksets", module).is_dir() for folder in folders):
        module = f"verifiers.v1.tasksets.{module}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (
            f"no package '{name}' is installed" if error.name == module else f"'{name}' needs {error.name}"
        )
        raise RequestError(missing, where="environment.package") from None
    except Exception as error:
        raise RequestError(f"'{name}' cannot be loaded: {error}", where="environment.package") from None


def _opening_messages(data: Any) -> list[Message]:
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    prompt = data.prompt or []
    return [
        *system,
        *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(convert_message, prompt)),
    ]


def _parse_messages(messages: Sequence[Any]) -> list[Any]:
    return [parse_message(dict(message)) if isinstance(message, Mapping) else message for message in messages]


def _check_supported(name: str, env: Any, task: Any) -> None:
    kind, taskset = type(task), type(env.taskset)
    scorers = [*task.hooks("reward"), *task.hooks("metric")]
    if taskset.toolsets(env.taskset.config) or kind.toolsets(env.taskset.config.task):
        raise _refusal(f"'{name}' gives its agent tools")
    if task.plugged_judges():
        raise _refusal(f"'{name}' uses a model as a judge")
    has_hooks = kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize
    if kind.NEEDS_CONTAINER or task.data.image or has_hooks or any(map(_needs_machine, scorers)):
        raise _refusal(f"'{name}' needs a machine for its agent")
    if not all(set(inspect.signature(stop).parameters) <= {"trace"} for stop in task.hooks("stop")):
        raise _refusal(f"'{name}' has a stop condition that reads requests to a model server")
    if not _opening_messages(task.data):
        raise _refusal(f"'{name}' has tasks without a prompt")


def _needs_machine(function: Any) -> bool:
    machine = inspect.signature(function).parameters.get("runtime")
    return machine is not None and machine.default is inspect.Parameter.empty


def _refusal(what: str) -> RequestError:
    remedy = "use a text environment that is scored by functions"
    return RequestError(what, where="environment.package", remedy=remedy)
