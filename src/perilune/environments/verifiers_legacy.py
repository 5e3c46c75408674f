"""Environments of verifiers before tasksets (v0): `load_environment`, rollouts, rubrics of functions."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from perilune.environments.dialogue import Ask
from perilune.environments.protocol import EpisodeFailedError, Message, Score
from perilune.environments.verifiers_taskset import MOST_TURNS, told
from perilune.errors import RequestError

_raised: ContextVar[list[str]] = ContextVar("raised")  # by reward functions of the episode that is judged


class LegacyPackage:
    """What a package's `load_environment` gives: a SingleTurnEnv, or another MultiTurnEnv without tools."""

    def __init__(self, module: ModuleType, config: Mapping[str, Any], turns: int | None) -> None:
        try:
            import datasets

            import verifiers as vf

            datasets.disable_progress_bars()
            with _signals_kept():
                self._env: Any = module.load_environment(**config)
        except TypeError as error:
            raise RequestError(f"load_environment: {error}", where="environment.config") from None
        except Exception as error:  # data sets that cannot be had, keys that are not set, ...
            raise RequestError(f"load_environment: {error}", where="environment.package") from None
        if not isinstance(self._env, vf.MultiTurnEnv):
            raise _refused(f"a {type(self._env).__name__} is no environment of turns")
        if self._env.tool_defs:
            raise _refused("it gives its agent tools")
        rubrics = list(_rubrics(self._env.rubric))
        if any(isinstance(one, vf.JudgeRubric) for one in rubrics):
            raise _refused("it asks a model for its verdict")
        if any(one.has_group_rewards for one in rubrics):
            raise _refused("it judges all samples of a task together")
        for one in rubrics:
            one.funcs = [_watched(function) for function in one.funcs]
        self._weighted = {
            name(f) for one in rubrics for f, w in zip(one.funcs, one.weights, strict=True) if w
        }
        own = self._env.max_turns
        self.turns = own if own == 1 else turns or (own if own > 0 else MOST_TURNS)
        self._env.max_turns = self.turns

    def rows(self, evaluation: bool) -> Iterator[tuple[Sequence[Message], Mapping[str, Any]]] | None:
        """Its data set, or the one for evaluation."""
        found = self._env.build_eval_dataset() if evaluation else self._env.build_dataset()
        if found is None:
            return None if evaluation else iter(())
        return (
            (
                [told(message) for message in row["prompt"]],
                {"row": {k: v for k, v in row.items() if k != "example_id"}},
            )
            for row in found
        )

    async def episode(self, row: Mapping[str, Any], ask: Ask) -> Score:
        """The environment's own rollout, answered by us, and its rubric's verdict."""
        raised: list[str] = []
        _raised.set(raised)
        state = await self._env.rollout({"example_id": 0, **row["row"]}, _client(ask), "policy", {})
        if state.get("error") is not None:
            cause = state["error"].__cause__ or state["error"]
            raise EpisodeFailedError("environment", f"{type(cause).__name__}: {cause}")
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        if raised:
            raise EpisodeFailedError("verifier", raised[0])
        figures = {key: float(value) for key, value in state["metrics"].items()}
        terms = {key: value for key, value in figures.items() if key in self._weighted}
        return Score(float(state["reward"]), terms, {k: v for k, v in figures.items() if k not in terms})


def name(function: Callable[..., Any]) -> str:
    """Of a reward function, as a rubric has it."""
    return getattr(function, "__name__", repr(function))


def _client(ask: Ask) -> Any:
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):  # type: ignore[misc]
        """Our policy, as a client of a model server that says what it says."""

        async def get_response(self, prompt: Any, *arguments: Any, **more: Any) -> Any:
            said = await ask([told(one) for one in prompt])
            message = ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model="policy", message=message)

    Policy.__abstractmethods__ = frozenset()
    return Policy(None)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function; what it raises, which a rubric would call a zero, is kept."""

    @functools.wraps(function)
    async def watched(*arguments: Any, **more: Any) -> Any:
        try:
            found = function(*arguments, **more)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            _raised.get().append(f"{name(function)} raised {type(error).__name__}: {error}"[:300])
            raise

    return watched


def _rubrics(rubric: Any) -> Iterator[Any]:
    """A rubric, and those it is made of."""
    inner = getattr(rubric, "rubrics", None)
    if inner is None:
        yield rubric
    for one in inner or ():
        yield from _rubrics(one)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """An environment that is loaded takes signals for itself; they stay ours."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _refused(what: str) -> RequestError:
    return RequestError(
        what, where="environment.package", remedy="an environment of text, judged by functions"
    )
