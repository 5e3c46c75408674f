"""Rewards by name and weight: the environment's own terms, and functions that users bring.

A function is one of TRL's: `def f(prompts, completions, **columns) -> list[float | None]`, async or not. It
is called with lists of one answer, so that an answer it fails at costs itself alone. None means that it does
not apply to the task. An exception, NaN or anything else is a recorded failure, and never a zero.

Functions are loaded and run in the scorer's own process alone, after that has given up files and network.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from perilune.environments.core.protocol import (
    Environment,
    Failure,
    Message,
    Outcome,
    Score,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.single_turn import SingleTurn
from perilune.errors import RequestError

VERIFIER = "verifier"  # the name of what the environment itself says that an answer is worth
GOLD = "gold"  # the metric that keeps that, where something else is climbed

Function = Callable[..., Any]


class WeightedRewards(SingleTurn):
    """An environment whose reward is the weighted sum of the terms that `rewards` names, and of no others.

    What the environment itself says stays among the terms as "verifier", and is the metric "gold"; unless its
    attribute `judges` is False, and it has nothing to say.

    Args:
        rewards: by name: a weight, for "verifier" and the environment's own terms; or a section of
            `function`, `weight`, `format` and, for a function in a file, `source`.

    Raises:
        RequestError: when the environment has several turns, or is not confined.
    """

    def __init__(self, environment: Environment, rewards: Mapping[str, Any]) -> None:
        if not isinstance(rewards, Mapping):
            raise RequestError(
                f"rewards are terms by name, not a {type(rewards).__name__}",
                where="rewards",
                remedy="{NAME: weight}, or {NAME: {function: module:name, weight: 1.0}}",
            )
        terms = {name: _term(name, term) for name, term in rewards.items()}
        functions = {name: term for name, term in terms.items() if isinstance(term, dict)}
        if getattr(environment, "max_turns", 1) != 1:
            raise RequestError("judges answers of one turn, and this environment has more", where="rewards")
        if functions and not getattr(environment, "confined", True):
            raise RequestError(
                "functions run where nothing can be reached, and this environment needs more than that",
                where="rewards",
                remedy="offer the function as a term of the environment",
            )
        self._judges = getattr(environment, "judges", True)
        if not self._judges and VERIFIER in rewards:
            raise RequestError("this environment has no verdict of its own", where="rewards.verifier")
        self.id = environment.id
        self.confined = getattr(environment, "confined", True)
        self._environment = environment
        self._sections = functions
        self._weights = {
            name: term["weight"] if isinstance(term, dict) else term for name, term in terms.items()
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._functions: dict[str, Function] = {}

    def load_confined(self) -> None:
        """Load the functions.

        Raises:
            RequestError: naming the function that cannot be loaded, and why.
        """
        self._functions = {name: _loaded(name, section) for name, section in self._sections.items()}

    def __getattr__(self, name: str) -> Any:
        """What else the environment offers, as its stated answers."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._environment, name)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """The environment's."""
        return self._environment.tasks(split, seed)

    def close(self) -> None:
        """Let go of what the environment holds."""
        self._environment.close()

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """The weighted sum of the terms that apply to the task."""
        verdict = self._environment.score(task, transcript) if self._judges else Score(0.0)
        if isinstance(verdict, Failure):
            return verdict
        terms = {**verdict.terms, VERIFIER: verdict.reward} if self._judges else {}
        counted: dict[str, float] = {}
        for name in self._weights:
            found = self._call(name, task, transcript) if name in self._sections else terms.get(name)
            if isinstance(found, Failure):
                return found
            if found is not None:
                counted[name] = found
            elif name not in self._sections:
                return Failure(VERIFIER, f"no reward term {name!r}; there are {', '.join(sorted(terms))}")
        if not counted:
            return Failure(VERIFIER, "no reward function applies to this task")
        reward = math.fsum(self._weights[name] * value for name, value in counted.items())
        gold = {GOLD: verdict.reward} if self._judges and self._weights != {VERIFIER: 1.0} else {}
        return Score(reward, terms | counted, gold | dict(verdict.metrics))

    def _call(self, name: str, task: Task, transcript: Transcript) -> float | Failure | None:
        function, section = self._functions[name], self._sections[name]
        answer: Message = {"role": "assistant", "content": transcript.text}
        in_words = section["format"] == "text"
        columns: dict[str, list[Any]] = {key: [value] for key, value in task.data.items()}
        columns |= {
            "task_id": [task.task_id],
            "prompts": [_in_words(task.prompt) if in_words else list(task.prompt)],
            "completions": [transcript.text if in_words else [answer]],
        }
        try:
            found = function(**_accepted(function, columns))
            if inspect.isawaitable(found):
                self._loop = self._loop or asyncio.new_event_loop()
                found = self._loop.run_until_complete(found)
        except BaseException as error:  # SystemExit and MemoryError of a function are data too
            return Failure(VERIFIER, f"reward function {name!r} raised {type(error).__name__}: {error}")
        return _worth(name, found)


def _term(name: str, term: Any) -> dict[str, Any] | float:
    """A weight, or a function's section with its defaults.

    Raises:
        RequestError: when it is neither.
    """
    section = {"weight": 1.0, "format": "messages", **term} if isinstance(term, Mapping) else {"weight": term}
    weight, function = section["weight"], section.get("function", "")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        what = f"the weight is {_shown(weight)}, not a finite number"
        raise RequestError(what, where=f"rewards.{name}", remedy="a weight, or a section with a function")
    if not isinstance(term, Mapping):
        return float(weight)
    if not isinstance(function, str) or ":" not in function:
        what = f"the function is {_shown(function)}"
        raise RequestError(what, where=f"rewards.{name}.function", remedy="module:name, or file.py:name")
    if section["format"] not in ("messages", "text"):
        what = f"the format is {_shown(section['format'])}"
        raise RequestError(what, where=f"rewards.{name}.format", remedy="messages or text")
    return {**section, "weight": float(weight)}


def _loaded(name: str, section: Mapping[str, Any]) -> Function:
    place, _, attribute = section["function"].rpartition(":")
    try:
        if section.get("source") is None:
            found = getattr(import_module(place), attribute)
        else:
            names: dict[str, Any] = {"__name__": f"reward_{name}", "__file__": place}
            exec(compile(section["source"], place, "exec"), names)  # noqa: S102 - the process is confined
            found = names[attribute]
    except BaseException as error:
        raise RequestError(
            f"cannot load {section['function']!r}: {type(error).__name__}: {error}",
            where=f"rewards.{name}.function",
            remedy="module:function of an installed package, or file.py:function beside the recipe",
        ) from None
    if not callable(found):
        raise RequestError(f"{section['function']!r} is no function", where=f"rewards.{name}.function")
    return found  # type: ignore[no-any-return]


def _accepted(function: Function, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the function takes: all of them, if it has **columns."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


def _in_words(prompt: Sequence[Message]) -> str:
    return "\n\n".join(message["content"] for message in prompt)


def _worth(name: str, found: Any) -> float | Failure | None:
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != 1:
        return Failure(VERIFIER, f"reward function {name!r} returned {_shown(found)}, no list of one reward")
    if found[0] is None:
        return None
    try:
        value = float(found[0])
    except (TypeError, ValueError):
        return Failure(VERIFIER, f"reward function {name!r} returned {_shown(found[0])}, no number")
    if not math.isfinite(value):
        return Failure(VERIFIER, f"reward function {name!r} returned {value}")
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
