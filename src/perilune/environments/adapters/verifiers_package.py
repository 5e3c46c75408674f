"""Tasksets and environments written for the package `verifiers`, version 1 of its interface.

https://github.com/PrimeIntellect-ai/verifiers (MIT). The package's own code plays and scores; where it would
ask a model server, our policy answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core.dialogue import Dialogue
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import EpisodeFailedError, Message, Observation, Split, Task
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.environments.adapters.verifiers_taskset import TasksetPackage

HELD_OUT_PARTS = 10  # one tenth is held out: tasksets keep no tasks for evaluation


class VerifiersSpec(BaseModel):
    """The environment section of a recipe, for `id: verifiers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["verifiers"] = Field("verifiers", description="which environment this is")
    package: str = Field(description="the installed package that has the taskset")
    config: dict[str, Any] = Field(default_factory=dict, description="the taskset's settings")
    turns: int | None = Field(
        None, ge=1, le=1000, description="most replies of an episode; null: the environment's own, or 16"
    )


class VerifiersEnvironment(MultiTurn):
    """Tasks, turns and rewards of one package. A reward that raises is a failure of the verifier, no zero.

    Raises:
        RequestError: when verifiers or the package is not installed, or it needs what is not here: tools, a
            machine to run on, further models to play or to judge, samples of a task judged together.
    """

    Spec = VerifiersSpec
    family_field = "package"

    def __init__(self, spec: VerifiersSpec) -> None:
        self.spec = spec
        self.id = f"verifiers/{spec.package}"
        self._package = _loaded(spec)
        self.max_turns = self._package.turns

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Every task of the split once, in an order drawn from `seed`."""
        rows = [one for one in self._tasks if _is_held_out(one.task_id) == (split == "heldout")]
        random.Random(f"{self.id}/{seed}").shuffle(rows)
        yield from rows

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """The package's own rollout, which waits wherever the policy is to speak."""
        from perilune.environments.adapters.global_random import GlobalRandom

        drawn = GlobalRandom(rng.integer(1 << 31, "play"))
        talk = Dialogue(self._loop, lambda ask: self._package.episode(task.data, ask), drawn.installed)
        seen: tuple[Message, ...] = task.prompt
        try:
            asked = talk.begin()
            while asked is not None:
                if tuple(asked[: len(seen)]) != seen:
                    raise EpisodeFailedError("environment", "it changes what was said before")
                said = yield Observation(tuple(asked[len(seen) :]))
                seen = (*asked, {"role": "assistant", "content": said})
                asked = talk.next(said)
            score = talk.result()
        finally:
            talk.close()
        if not all(map(math.isfinite, (score.reward, *score.terms.values()))):
            raise EpisodeFailedError("verifier", f"a reward is not finite: {score.reward}")
        yield Observation(rewards=(score.reward,), terms=score.terms, metrics=score.metrics, done=True)

    def close(self) -> None:
        """Let go of the loop."""
        self._loop.close()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Made by the process that plays: what forks from one that has a loop would share it."""
        return asyncio.new_event_loop()

    @cached_property
    def _tasks(self) -> list[Task]:
        found: dict[str, Task] = {}
        for prompt, row in self._package.rows():
            try:
                text = json.dumps(row, sort_keys=True, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RequestError(f"a task is no JSON: {error}", where="environment.package") from None
            task_id = hashlib.sha256(f"{self.id}/{text}".encode()).hexdigest()[:32]
            found[task_id] = Task(task_id, tuple(prompt), json.loads(text))
        return list(found.values())


def _is_held_out(task_id: str) -> bool:
    return int(task_id[:8], 16) % HELD_OUT_PARTS == 0


def _loaded(spec: VerifiersSpec) -> TasksetPackage:
    if find_spec("verifiers") is None:
        raise RequestError(
            "verifiers is not installed", where="environment.id", remedy="pip install 'perilune[verifiers]'"
        )
    from perilune.environments.adapters.verifiers_taskset import TasksetPackage, taskset_module

    module = taskset_module(spec.package)
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise RequestError(
            f"'{spec.package}' has load_environment, the interface of verifiers before tasksets (v0)",
            where="environment.package",
            remedy="use a version of the package that exports a taskset (v1)",
        )
    return TasksetPackage(spec.package, spec.config, spec.turns)
