"""Rewards as weighted sums: the environment's own terms and reward functions of users.

A reward function has TRL's signature: `def f(prompts, completions, **columns) -> list[float | None]`, async
or not. It is called with lists of one answer, so an answer that makes it fail affects no other. None means
that the function does not apply to the task. An exception, NaN or any other value is recorded as a failure,
never as a reward of 0.

Functions are loaded and run only in the scorer's process, after it has given up files and network.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from perilune.environments.core.prompted_environment import PromptedEnvironment
from perilune.environments.core.protocol import (
    Environment,
    Failure,
    Message,
    Outcome,
    Score,
    Task,
    Transcript,
)
from perilune.environments.core.single_turn import SingleTurn
from perilune.environments.core.wrapping import EnvironmentWrapper
from perilune.errors import RequestError
from perilune.extensions import INSTALL_REMEDY, REWARD_GROUP, load_entry_point

VERIFIER_TERM = "verifier"  # the term that holds the environment's own reward
GOLD_METRIC = "gold"  # the metric that keeps that reward when training optimizes another one

CALL_ERROR_PREFIX = "cannot call the reward function"  # start of the reason of such a failure
CONFINEMENT_HINT = (
    "functions run confined: without files, network, processes and libraries that load native code late, such"
    " as torch. An environment of your own with `confined = False` may use them"
)

RewardFunction = Callable[..., Any]


class WeightedRewards(EnvironmentWrapper, SingleTurn):
    """An environment whose reward is the weighted sum of the terms that `rewards` names.

    Terms that are not listed are ignored. The environment's own reward is kept as the term "verifier" and the
    metric "gold", unless its attribute `judges` is False: then it has no reward of its own.

    Args:
        rewards: for each name a weight (for "verifier" and the environment's own terms), or a section with
            `function`, `weight`, `format` and, for a function in a file, `source`.

    Raises:
        RequestError: if the environment has several turns, or `rewards` has functions and the environment is
            not confined.
    """

    def __init__(self, environment: Environment, rewards: Mapping[str, Any]) -> None:
        if not isinstance(rewards, Mapping):
            raise RequestError(
                f"rewards must be a mapping of names, not a {type(rewards).__name__}",
                where="rewards",
                remedy="write {NAME: weight}, or {NAME: {function: module:name, weight: 1.0}}",
            )
        terms = {name: _parse_term(name, term) for name, term in rewards.items()}
        functions = {name: term for name, term in terms.items() if isinstance(term, dict)}
        if getattr(environment, "max_turns", 1) != 1:
            raise RequestError(
                "needs a single-turn environment, and this one has several turns", where="rewards"
            )
        if functions and not getattr(environment, "confined", True):
            what = "reward functions run in a confined process, and this environment cannot run there"
            raise RequestError(what, where="rewards", remedy="make the function a term of the environment")
        self._judges = getattr(environment, "judges", True)
        if not self._judges and VERIFIER_TERM in rewards:
            raise RequestError("this environment has no verifier of its own", where="rewards.verifier")
        super().__init__(environment)
        self._sections = functions
        self._weights = {
            name: term["weight"] if isinstance(term, dict) else term for name, term in terms.items()
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._functions: dict[str, RewardFunction] = {}

    def load_confined(self) -> None:
        """Load the functions.

        Raises:
            RequestError: naming the function that cannot be loaded, and why.
        """
        self._functions = {name: _load_function(name, section) for name, section in self._sections.items()}

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        super().close()

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Return the weighted sum of the terms that apply to the task."""
        has_terms = self._judges or isinstance(self._environment, PromptedEnvironment)
        verdict = self._environment.score(task, transcript) if has_terms else Score(0.0)
        if isinstance(verdict, Failure):
            return verdict
        terms = {**verdict.terms, **({VERIFIER_TERM: verdict.reward} if self._judges else {})}
        counted: dict[str, float] = {}
        for name in self._weights:
            value = self._call(name, task, transcript) if name in self._sections else terms.get(name)
            if isinstance(value, Failure):
                return value
            if value is not None:
                counted[name] = value
            elif name not in self._sections:
                return Failure(
                    VERIFIER_TERM, f"no reward term {name!r}; there are {', '.join(sorted(terms))}"
                )
        if not counted:
            return Failure(VERIFIER_TERM, "no reward function applies to this task")
        reward = math.fsum(self._weights[name] * value for name, value in counted.items())
        gold = {GOLD_METRIC: verdict.reward} if self._judges and self._weights != {VERIFIER_TERM: 1.0} else {}
        return Score(reward, terms | counted, gold | dict(verdict.metrics))

    def _call(self, name: str, task: Task, transcript: Transcript) -> float | Failure | None:
        function, section = self._functions[name], self._sections[name]
        answer: Message = {"role": "assistant", "content": transcript.text}
        is_text = section["format"] == "text"
        columns: dict[str, list[Any]] = {key: [value] for key, value in task.data.items()}
        joined = "\n\n".join(message["content"] for message in task.prompt)
        columns |= {
            "task_id": [task.task_id],
            "prompts": [joined if is_text else list(task.prompt)],
            "completions": [transcript.text if is_text else [answer]],
        }
        try:
            arguments = _select_columns(function, columns)
            inspect.signature(function).bind(**arguments)
        except (TypeError, ValueError) as error:
            return Failure(
                VERIFIER_TERM, f"{CALL_ERROR_PREFIX} {name!r}: {error}; columns: {', '.join(sorted(columns))}"
            )
        try:
            returned = function(**arguments)
            if inspect.isawaitable(returned):
                self._loop = self._loop or asyncio.new_event_loop()
                returned = self._loop.run_until_complete(returned)
        except BaseException as error:  # a function's SystemExit or MemoryError must not end the process
            return Failure(VERIFIER_TERM, f"reward function {name!r} raised {type(error).__name__}: {error}")
        return _parse_reward(name, returned)


def _parse_term(name: str, term: Any) -> dict[str, Any] | float:
    """Return a weight, or a function's section with its defaults."""
    section = {"weight": 1.0, "format": "messages", **term} if isinstance(term, Mapping) else {"weight": term}
    weight, function = section["weight"], section.get("function", "")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        what = f"the weight is {_describe(weight)}, not a finite number"
        raise RequestError(what, where=f"rewards.{name}", remedy="write a weight or a function's section")
    if not isinstance(term, Mapping):
        return float(weight)
    if not isinstance(function, str) or not function:
        what = f"the function is {_describe(function)}"
        raise RequestError(
            what,
            where=f"rewards.{name}.function",
            remedy="write file.py:name, module:name, or the name of an entry point",
        )
    if section["format"] not in ("messages", "text"):
        what = f"the format is {_describe(section['format'])}"
        raise RequestError(what, where=f"rewards.{name}.format", remedy="write messages or text")
    return {**section, "weight": float(weight)}


def _load_function(name: str, section: Mapping[str, Any]) -> RewardFunction:
    module, _, attribute = section["function"].rpartition(":")
    try:
        if section.get("source") is None and not module:
            function = load_entry_point(REWARD_GROUP, attribute)
        elif section.get("source") is None:
            function = getattr(import_module(module), attribute)
        else:
            names: dict[str, Any] = {"__name__": f"reward_{name}", "__file__": module}
            exec(compile(section["source"], module, "exec"), names)  # noqa: S102 - the process is confined
            function = names[attribute]
    except BaseException as error:
        remedy = "write module:function of an installed package, or file.py:function next to the recipe"
        if isinstance(error, ImportError):
            remedy = INSTALL_REMEDY
        elif isinstance(error, PermissionError):
            remedy = CONFINEMENT_HINT
        raise RequestError(
            f"cannot load {section['function']!r}: {type(error).__name__}: {error}",
            where=f"rewards.{name}.function",
            remedy=remedy,
        ) from None
    if not callable(function):
        raise RequestError(f"{section['function']!r} is not callable", where=f"rewards.{name}.function")
    return function  # type: ignore[no-any-return]


def _select_columns(function: RewardFunction, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that the function has parameters for; all of them if it takes **columns."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


def _parse_reward(name: str, returned: Any) -> float | Failure | None:
    says = f"reward function {name!r} returned"
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 1:
        return Failure(VERIFIER_TERM, f"{says} {_describe(returned)}, not a list of one reward")
    if returned[0] is None:
        return None
    try:
        value = float(returned[0])
    except (TypeError, ValueError):
        return Failure(VERIFIER_TERM, f"{says} {_describe(returned[0])}, not a number")
    if not math.isfinite(value):
        return Failure(VERIFIER_TERM, f"{says} {value}")
    return value


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
