"""Tasksets of verifiers (v1): its environment is run with a seat of ours, in which the policy speaks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from perilune.environments.core.dialogue import Ask
from perilune.environments.core.protocol import EpisodeFailedError, Message, Score
from perilune.errors import RequestError

MOST_TURNS = 16  # of an environment that says none


class TasksetPackage:
    """A taskset, and the environment that its package offers for it: by default, one answer."""

    def __init__(self, name: str, config: Mapping[str, Any], turns: int | None) -> None:
        from pydantic import ValidationError
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import environment_class, resolve_env_config

        logging.getLogger("verifiers.v1.env").setLevel(
            logging.ERROR
        )  # warns of harnesses, which are not used
        try:
            kind = environment_class(name)
            settings = resolve_env_config({"taskset": {**config, "id": name}})
            self._env: Any = kind(settings)
            first = next(iter(self._env.taskset))
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"][1:]))
            raise RequestError(error.errors()[0]["msg"], where=f"environment.config.{place}") from None
        except StopIteration:
            raise RequestError(f"'{name}' has no tasks", where="environment.package") from None
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise RequestError(f"'{name}': {error}", where="environment.package") from None
        seats = {
            field: getattr(settings, field)
            for field in type(settings).model_fields
            if isinstance(getattr(settings, field), AgentConfig)
        }
        if len(seats) != 1:
            raise _refused(f"'{name}' has {len(seats)} seats ({', '.join(seats)}), and the policy takes one")
        ((self._seat, seat),) = seats.items()
        most = turns or seat.max_turns or MOST_TURNS
        self.turns = 1 if kind is SingleAgentEnv else most
        _refuse_what_is_not_here(name, self._env, first)
        self._endless = not self._env.taskset.bounded if hasattr(self._env.taskset, "bounded") else (
            self._env.taskset.INFINITE
        )  # fmt: skip

    def rows(self) -> Iterator[tuple[Sequence[Message], Mapping[str, Any]]]:
        """Prompt and JSON-able row of each task."""
        return ((_opening(task.data), {"row": task.data.model_dump(mode="json")}) for task in self._tasks())

    async def episode(self, row: Mapping[str, Any], ask: Ask) -> Score:
        """The environment's run, its seat taken by us; then the task's rewards, as it judges the trace."""
        import verifiers.v1 as vf

        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row["row"]), self._env.taskset.config.task)
        seat = Seat(ask, self.turns)
        agents = type("Agents", (), {self._seat: seat})()
        await self._env.setup(agents)
        await self._env.run(task, agents)
        if len(seat.traces) != 1:
            raise EpisodeFailedError("environment", f"it played {len(seat.traces)} conversations, not one")
        (trace,) = seat.traces
        if type(self._env).finalize is not vf.Env.finalize:
            info = vf.EnvInfo(id=self._env.config.env_id)
            await self._env.finalize(task, vf.Episode(env=info, task=trace.task, traces=seat.traces))
        rewards = {name: one for name, one in trace.rewards.items() if one is not None}
        terms = {name: float(one.score) for name, one in rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Score(float(trace.reward), terms, metrics)

    def _tasks(self) -> Iterator[Any]:
        tasks = iter(self._env.taskset)
        return (task for task, _ in zip(tasks, range(ENDLESS), strict=False)) if self._endless else tasks


ENDLESS = 10_000  # tasks that are taken of a taskset without an end


class Seat:
    """Stands for an agent of the environment's: what it says, the policy says."""

    trainable = True

    def __init__(self, ask: Ask, turns: int) -> None:
        self._ask, self._turns = ask, turns
        self.traces: list[Any] = []

    async def run(self, task: Any, **more: Any) -> Any:
        """One reply to the task's prompt, judged."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **more: Any) -> AsyncIterator[Talk]:
        """A conversation on the task, judged when it is left."""
        talk = Talk(task, self._ask, self._turns)
        yield talk
        talk.trace.stop("user_closed")
        talk.trace.is_completed = True
        try:
            await task.score(talk.trace)
        except Exception as error:  # whatever a reward raises
            raise EpisodeFailedError("verifier", f"{type(error).__name__}: {error}") from None
        self.traces.append(talk.trace)


class Talk:
    """A conversation, and the trace of it that rewards read."""

    def __init__(self, task: Any, ask: Ask, turns: int) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, TraceTask

        self._ask, self._left = ask, turns
        self._stops = task.hooks("stop")
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace: Any = vf.Trace(task=about, agent=AgentInfo(config=vf.AgentConfig()))
        self.trace.state = state_cls(type(task))()
        self._messages = _parsed(_opening(task.data))
        self._prompted = task.data.prompt is not None

    async def turn(self, message: Any = None) -> Any:
        """What the policy says after `message`, or after the task's prompt; nothing once the talk is over."""
        import verifiers.v1 as vf
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.types import AssistantMessage, Response

        if message is None and not self._prompted:
            raise ValueError("the task has no prompt to reply to")
        said = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        self._messages += _parsed(said)
        if not self._left or self.trace.stop_condition is not None:
            return vf.Segment(messages=[], terminated=True)
        self._left, self._prompted = self._left - 1, False
        reply = AssistantMessage(content=await self._ask([told(one) for one in self._messages]))
        response = Response(id="", created=0, model="policy", message=reply, finish_reason="stop")
        prepare_turn(self.trace, self._messages).commit(response)
        self._messages.append(reply)
        for stop in self._stops:
            found = stop(trace=self.trace)
            if await found if inspect.isawaitable(found) else found:
                self.trace.stop(stop.__name__)
        return vf.Segment(messages=[reply])


def told(message: Any) -> Message:
    """A message of the package's as ours.

    Raises:
        EpisodeFailedError: when it is not text.
    """
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeFailedError("environment", "a message holds what is no text")
        content = "".join(part["text"] for part in content)
    return {"role": str(fields["role"]), "content": str(content)}


def taskset_module(name: str) -> ModuleType:
    """The module that a package's name stands for, as verifiers itself finds it: its own tasksets first.

    Raises:
        RequestError: when there is none, or it cannot be loaded.
    """
    own = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    found = find_spec("verifiers")
    places = found.submodule_search_locations or () if found else ()
    if any(Path(place, "v1", "tasksets", own).is_dir() for place in places):
        own = f"verifiers.v1.tasksets.{own}"
    try:
        return import_module(own)
    except ModuleNotFoundError as error:
        missing = f"no package '{name}' is installed" if error.name == own else f"'{name}' needs {error.name}"
        raise RequestError(missing, where="environment.package") from None
    except Exception as error:
        raise RequestError(f"'{name}' cannot be loaded: {error}", where="environment.package") from None


def _opening(data: Any) -> list[Message]:
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    prompt = data.prompt or []
    return [
        *system,
        *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(told, prompt)),
    ]


def _parsed(messages: Sequence[Any]) -> list[Any]:
    from verifiers.v1.dialects import parse_message

    return [parse_message(dict(one)) if isinstance(one, Mapping) else one for one in messages]


def _refuse_what_is_not_here(name: str, env: Any, task: Any) -> None:
    import verifiers.v1 as vf

    kind, taskset = type(task), type(env.taskset)
    judged = [*task.hooks("reward"), *task.hooks("metric")]
    if taskset.toolsets(env.taskset.config) or kind.toolsets(env.taskset.config.task):
        raise _refused(f"'{name}' gives its agent tools")
    if task.plugged_judges():
        raise _refused(f"'{name}' asks a model for its verdict")
    moved = kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize
    if kind.NEEDS_CONTAINER or task.data.image or moved or any(map(_needs_machine, judged)):
        raise _refused(f"'{name}' needs a machine for its agent to work on")
    if not all(set(inspect.signature(stop).parameters) <= {"trace"} for stop in task.hooks("stop")):
        raise _refused(f"'{name}' stops by what is sent to a model server")
    if not _opening(task.data):
        raise _refused(f"'{name}' states no prompt")


def _needs_machine(function: Any) -> bool:
    machine = inspect.signature(function).parameters.get("runtime")
    return machine is not None and machine.default is inspect.Parameter.empty


def _refused(what: str) -> RequestError:
    return RequestError(
        what, where="environment.package", remedy="an environment of text, judged by functions"
    )
