"""A mixture: one environment whose tasks come from several others, its parts.

Each task belongs to one part, which its id names: "sums/3f9a...". The part prompts, plays and scores it, so
an episode is the same as in the part alone.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, count
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.environments.core.episode_settings import EPISODES_KEY as EPISODES
from perilune.environments.core.epochs import endless_tasks
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import (
    Environment,
    Failure,
    Observation,
    Outcome,
    Session,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.reference_answer import (
    ReferenceAnswer,
    expected_answer,
    reference_answer,
)
from perilune.environments.core.registry import MIXTURE, REWARDS, make_environment
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import RequestError
from perilune.frozen import Frozen

PartName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class PartSettings(BaseModel):
    """One part: its place in the mixture, and the keys of its environment section."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = Field(description="id of the part's environment; the part also takes its other keys")
    weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="the part's share of the training tasks is proportional to weight^(1/temperature); 0:"
        " the part is only evaluated",
    )
    reward_scale: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="factor of the part's rewards in training"
    )


class MixtureSpec(Frozen):
    """The environment section of a recipe, for `id: mixture`."""

    id: Literal["mixture"] = Field("mixture", description="id of the environment")
    parts: dict[PartName, PartSettings] = Field(
        min_length=1,
        description="sections of environments by name. Each section takes the keys of its environment,"
        " and also `weight` (default 1), `reward_scale` (default 1) and `rewards`",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="a part's share of the training tasks is proportional to weight^(1/temperature);"
        " large values equalize the shares",
    )

    @model_validator(mode="after")
    def _has_training_tasks(self) -> MixtureSpec:
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("every part has weight 0, so there are no training tasks")
        return self


class Mixture:
    """Several environments as one.

    The part of the n-th training task is drawn from (seed, n) alone, with the parts' shares. A finite part is
    reshuffled in every epoch of its own, so training tasks never end. Held-out tasks come from all parts in
    turn, until a part has no more.

    Attributes:
        shares: probability of each part with a positive weight in the draw of a training task.

    Args:
        sections: the whole section of each part (`registry.part_sections`).

    Raises:
        RequestError: if a part is wrong, is itself a mixture, or has several players.
    """

    Spec = MixtureSpec
    id = MIXTURE
    players = 1

    def __init__(self, spec: MixtureSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self.spec = spec
        self.parts = {name: _make_part(name, section) for name, section in sections.items()}
        self.shares = _to_shares({name: part.weight for name, part in spec.parts.items()}, spec.temperature)
        self.max_turns = max(getattr(part, "max_turns", 1) for part in self.parts.values())
        self.confined = all(getattr(part, "confined", True) for part in self.parts.values())
        self._scales = {name: part.reward_scale for name, part in spec.parts.items()}
        self._is_scaled = any(scale != 1 for scale in self._scales.values())
        for name, section in sections.items():
            terms = section.get(REWARDS) or {}
            if not self.confined and any(isinstance(term, Mapping) for term in terms.values()):
                raise RequestError(
                    "reward functions run in a confined process, and another part cannot run there",
                    where=f"environment.parts.{name}.{REWARDS}",
                    remedy="make the function a term of its environment, or train on the parts separately",
                )

    def check_files(self) -> None:
        for part in self.parts.values():
            if hasattr(part, "check_files"):
                part.check_files()

    def load_confined(self) -> None:
        for part in self.parts.values():
            if hasattr(part, "load_confined"):
                part.load_confined()

    def settings(self) -> dict[str, Any]:
        """Return the share of each part in training."""
        return {f"share.{name}": round(share, 4) for name, share in self.shares.items()}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        if split == "heldout":
            yield from self._heldout_tasks(seed)
            return
        streams = {name: endless_tasks(self.parts[name], seed) for name in self.shares}
        names, bounds = list(self.shares), list(accumulate(self.shares.values()))
        draw = KeyedRandom(seed, MIXTURE)
        for number in count():
            index = min(bisect(bounds, draw.uniform("part", number)), len(names) - 1)
            yield named_task(names[index], next(streams[names[index]]))

    def reset(self, task: Task, seed: int) -> Session:
        name, part_task = split_task(task)
        session = self.parts[name].reset(part_task, seed)
        return _ScaledSession(session, self._scales[name]) if self._is_scaled else session

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Return the score of the task's part, scaled. The metric `gold` keeps the score before scaling."""
        name, part_task = split_task(task)
        outcome = self.parts[name].score(part_task, transcript)
        if isinstance(outcome, Failure) or not self._is_scaled:
            return outcome
        metrics = {GOLD_METRIC: outcome.reward, **outcome.metrics}
        return replace(outcome, reward=outcome.reward * self._scales[name], metrics=metrics)

    def gold(self, task: Task) -> Transcript | None:
        name, part_task = split_task(task)
        answer: Transcript | None = getattr(self.parts[name], "gold", lambda _: None)(part_task)
        return answer

    def is_right(self, task: Task, transcript: Transcript) -> bool | None:
        name, part_task = split_task(task)
        opinion = getattr(self.parts[name], "is_right", lambda task, transcript: None)
        right: bool | None = opinion(part_task, transcript)
        return right

    def reference_answer(self, task: Task) -> ReferenceAnswer | None:
        name, part_task = split_task(task)
        return reference_answer(self.parts[name], part_task)

    def expected_answer(self, task: Task) -> str:
        name, part_task = split_task(task)
        return expected_answer(self.parts[name], part_task)

    def close(self) -> None:
        for part in self.parts.values():
            if hasattr(part, "close"):
                part.close()

    def _heldout_tasks(self, seed: int) -> Iterator[Task]:
        streams = {name: part.tasks("heldout", seed) for name, part in self.parts.items()}
        while streams:
            for name in list(streams):
                task = next(streams[name], None)
                if task is None:
                    del streams[name]
                else:
                    yield named_task(name, task)


class _ScaledSession:
    """A session whose rewards are scaled. The metric `gold` holds their sum before scaling."""

    def __init__(self, session: Session, scale: float) -> None:
        self._session, self._scale, self._gold = session, scale, 0.0
        self.observation = session.observation

    def step(self, action: str, finished: bool = True) -> Observation:
        observation = self._session.step(action, finished)
        self._gold += math.fsum(observation.rewards)  # of one player
        self.observation = replace(
            observation,
            rewards=tuple(reward * self._scale for reward in observation.rewards),
            metrics={GOLD_METRIC: self._gold, **observation.metrics}
            if observation.done
            else observation.metrics,
        )
        return self.observation

    def close(self) -> None:
        self._session.close()


def find_part(environment: Environment, task: Task) -> Environment:
    """Return the part of a mixture that `task` belongs to; any other environment itself."""
    return environment.parts[split_task(task)[0]] if isinstance(environment, Mixture) else environment


def environment_name(environment: Environment, task: Task) -> str:
    """Return the environment of an episode: "mixture/PART" in a mixture, else the environment's id."""
    return f"{MIXTURE}/{split_task(task)[0]}" if isinstance(environment, Mixture) else environment.id


def _make_part(name: str, section: Mapping[str, Any]) -> Environment:
    where = f"environment.parts.{name}"
    if section["id"] == MIXTURE:
        what = "a part of a mixture cannot be a mixture"
        raise RequestError(what, where=f"{where}.id", remedy="list its parts in the outer mixture")
    if section.get(EPISODES):
        what = "the bounds of episodes hold for the whole mixture"
        raise RequestError(what, where=f"{where}.{EPISODES}", remedy=f"move them to environment.{EPISODES}")
    try:
        part = make_environment(section, checked=False)
    except RequestError as error:
        inner = error.where.removeprefix("environment").removeprefix(".")
        raise RequestError(
            error.what, where=f"{where}.{inner}" if inner else where, remedy=error.remedy
        ) from None
    if getattr(part, "players", 1) != 1:
        raise RequestError(
            "a part of a mixture must have one player", where=where, remedy="train on games separately"
        )
    return part


def _to_shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """weight^(1/temperature) of the positive weights, normalized."""
    largest = max(weights.values())
    scaled = {name: (weight / largest) ** (1 / temperature) for name, weight in weights.items() if weight}
    total = math.fsum(scaled.values())
    return {name: value / total for name, value in scaled.items()}


def named_task(part: str, task: Task) -> Task:
    return replace(task, task_id=f"{part}/{task.task_id}")


def split_task(task: Task) -> tuple[str, Task]:
    """Return the name of the part, and the part's own task."""
    name, _, task_id = task.task_id.partition("/")
    return name, replace(task, task_id=task_id)
