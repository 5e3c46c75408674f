"""Environments written for the package `verifiers`, version 1 of its interface.

https://github.com/PrimeIntellect-ai/verifiers (MIT). The package's own code runs and scores the episodes.
The policy replies in place of a model server.
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

from pydantic import Field

from perilune.environments.adapters.global_random import GlobalRandom
from perilune.environments.core.dialogue import Dialogue
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import EpisodeFailedError, Message, Observation, Split, Task
from perilune.environments.core.splits import assign_split
from perilune.errors import RequestError
from perilune.frozen import Frozen

if TYPE_CHECKING:
    from perilune.environments.adapters.verifiers_taskset import TasksetPackage


class VerifiersSpec(Frozen):
    """The environment section of a recipe, for `id: verifiers`."""

    id: Literal["verifiers"] = Field("verifiers", description="id of the environment")
    package: str = Field(description="the installed package that contains the taskset")
    config: dict[str, Any] = Field(default_factory=dict, description="the taskset's settings")
    turns: int | None = Field(
        None, ge=1, le=1000, description="maximum replies of an episode; null: the environment's limit, or 16"
    )


class VerifiersEnvironment(MultiTurn):
    """Tasks, turns and rewards of one package. A reward function that raises is a failure, not a reward of 0.

    Raises:
        RequestError: if verifiers or the package is not installed, or the package needs something
            unsupported: tools, a machine to run on, other models as players or judges, or several samples
            scored together.
    """

    Spec = VerifiersSpec
    family_field = "package"

    def __init__(self, spec: VerifiersSpec) -> None:
        self.spec = spec
        self.id = f"verifiers/{spec.package}"
        self._package = _load_package(spec)
        self.max_turns = self._package.turns

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        tasks = [task for task in self._tasks if assign_split(task.task_id) == split]
        random.Random(f"{self.id}/{seed}").shuffle(tasks)
        yield from tasks

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Run the package's own rollout, paused wherever it awaits a reply of the policy."""
        state = GlobalRandom(rng.integer(1 << 31, "play"))
        dialogue = Dialogue(self._loop, lambda ask: self._package.run_episode(task.data, ask), state.install)
        conversation: tuple[Message, ...] = task.prompt
        try:
            messages = dialogue.begin()
            while messages is not None:
                if tuple(messages[: len(conversation)]) != conversation:
                    raise EpisodeFailedError("environment", "it changed earlier messages of the conversation")
                reply = yield Observation(tuple(messages[len(conversation) :]))
                conversation = (*messages, {"role": "assistant", "content": reply})
                messages = dialogue.next(reply)
            score = dialogue.result()
        finally:
            dialogue.close()
        if not all(map(math.isfinite, (score.reward, *score.terms.values()))):
            raise EpisodeFailedError("verifier", f"a reward is not finite: {score.reward}")
        yield Observation(rewards=(score.reward,), terms=score.terms, metrics=score.metrics, done=True)

    def close(self) -> None:
        self._loop.close()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """An event loop of this process, because forked processes would share the parent's."""
        return asyncio.new_event_loop()

    @cached_property
    def _tasks(self) -> list[Task]:
        tasks: dict[str, Task] = {}
        for prompt, row in self._package.rows():
            try:
                text = json.dumps(row, sort_keys=True, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RequestError(f"a task is not JSON: {error}", where="environment.package") from None
            task_id = hashlib.sha256(f"{self.id}/{text}".encode()).hexdigest()[:32]
            tasks[task_id] = Task(task_id, tuple(prompt), json.loads(text))
        return list(tasks.values())


def _load_package(spec: VerifiersSpec) -> TasksetPackage:
    if find_spec("verifiers") is None:
        raise RequestError(
            "verifiers is not installed", where="environment.id", remedy="pip install 'perilune[verifiers]'"
        )
    from perilune.environments.adapters.verifiers_taskset import TasksetPackage, import_taskset

    module = import_taskset(spec.package)
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise RequestError(
            f"'{spec.package}' uses load_environment, the old interface of verifiers (v0)",
            where="environment.package",
            remedy="use a version of the package that exports a taskset (v1)",
        )
    return TasksetPackage(spec.package, spec.config, spec.turns)
