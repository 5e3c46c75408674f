"""A pipeline of stages with queues, scheduled by deadline.

A stage computes one batch at a time from its queue and feeds the next stage. Each item has a deadline. The
pipeline steps the stage with the earliest deadline; of equal ones, the later stage. For speech, the deadline
is the time at which the listener has heard all samples so far.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Request

ItemT = TypeVar("ItemT")


class Stage(ABC, Generic[ItemT]):
    """One stage of the pipeline from requests to deltas.

    Attributes:
        queue: items by the id of their request.
    """

    def __init__(self) -> None:
        self.queue: dict[int, ItemT] = {}

    @abstractmethod
    def deadline(self) -> float | None:
        """Return the earliest deadline in the queue, in seconds of the clock; None if the queue is empty."""

    @abstractmethod
    def step(self) -> Sequence[Any]:
        """Compute a batch of the most urgent items of equal shape; return items for the next stage."""

    @abstractmethod
    def feed(self, items: Sequence[Any]) -> None:
        """Add items to the queue."""

    def abort(self, request_id: int) -> None:
        self.queue.pop(request_id, None)

    def clear(self) -> None:
        """Remove all requests."""
        self.queue.clear()


class Pipeline:
    """Steps `stages`. The first takes requests, and the last returns deltas.

    It has the interface of the engine, so `EngineThread` serves it. Not thread-safe.
    """

    def __init__(self, engine: Engine, stages: Sequence[Stage[Any]]) -> None:
        self._engine, self.stages = engine, stages

    @property
    def unfinished(self) -> bool:
        """True if `step` has work to do."""
        return any(stage.deadline() is not None for stage in self.stages)

    def add(self, request: Request, *, stream: bool = True) -> int:
        """Queue `request` and return its id. `stream` makes no difference.

        Raises:
            RequestError: when the engine cannot serve it.
        """
        request_id = self._engine.add(request)  # the stages after the engine need each token at once
        self.stages[0].feed([(request_id, request)])
        return request_id

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Step the most urgent stage; return the deltas if it is the last stage, otherwise an empty list."""
        due = [
            (deadline, -i)
            for i, stage in enumerate(self.stages)
            if (deadline := stage.deadline()) is not None
        ]
        if not due:
            return []
        index = -min(due)[1]
        outputs = self.stages[index].step()
        if index + 1 == len(self.stages):
            return list(outputs)
        self.stages[index + 1].feed(outputs)
        return []

    def abort(self, request_id: int) -> None:
        """Stop a request and free its resources."""
        self._engine.abort(request_id)
        for stage in self.stages:
            stage.abort(request_id)

    def restart(self) -> None:
        """Drop all requests and restart after a failure.

        Raises:
            Exception: the failure, if it persists.
        """
        for stage in self.stages:
            stage.clear()
        self._engine.restart()
