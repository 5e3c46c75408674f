"""Scorer: judges transcripts in a process of its own, so that a bad scorer costs one item and no more."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import TracebackType
from typing import Any

from perilune.environments.protocol import Failure, Outcome, Score, Task, Transcript
from perilune.errors import RequestError, WorkFailedError
from perilune.verifiers.channel import BrokenScorerError, Channel
from perilune.verifiers.confinement import Limits

Item = tuple[Task, Transcript]

CHUNK = 64  # items sent together


class Scorer:
    """Runs an environment's scorer in a separate, resource-limited process, with a deadline for each item.

    The process starts at once and is ready when the first outcome is awaited. One that hangs, dies, floods
    or speaks nonsense is killed and replaced; the item it was at is a Failure of the verifier, and no other.

    Args:
        spec: the environment section of a recipe; the environment is built in the process, not here.
        limits: deadlines and resources.
        workers: processes that share a batch.
    """

    def __init__(self, spec: Mapping[str, Any], limits: Limits | None = None, workers: int = 1) -> None:
        self._limits = limits or Limits()
        self._slots = [_Slot(spec, self._limits) for _ in range(workers)]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def item_seconds(self) -> float:
        """The longest that one item may take."""
        return self._limits.item_seconds

    @property
    def restarts(self) -> int:
        """How many processes had to be replaced so far."""
        return sum(slot.restarts for slot in self._slots)

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome an item, in order.

        Raises:
            RequestError: when the environment's section is wrong.
            WorkFailedError: when the process cannot start.
        """
        seconds = self._limits.batch_seconds
        until = math.inf if seconds is None else time.monotonic() + seconds
        if len(self._slots) == 1:
            return self._slots[0].score(items, until)
        share = -(-len(items) // len(self._slots))
        shards = [items[i * share : (i + 1) * share] for i in range(len(self._slots))]
        with ThreadPoolExecutor(len(self._slots)) as threads:
            scored = threads.map(lambda slot, shard: slot.score(shard, until), self._slots, shards)
            return [outcome for outcomes in scored for outcome in outcomes]

    def close(self) -> None:
        """End the processes."""
        for slot in self._slots:
            slot.close()


class _Slot:
    """One process at a time, replaced when it breaks."""

    def __init__(self, spec: Mapping[str, Any], limits: Limits) -> None:
        self.restarts = 0
        self._spec = dict(spec)
        self._limits = limits
        self._ready = False
        self._channel: Channel | None = self._start()

    def score(self, items: Sequence[Item], until: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            if time.monotonic() >= until:
                late = Failure("verifier", f"the batch took more than {self._limits.batch_seconds:g} s")
                return outcomes + [late] * (len(items) - len(outcomes))
            outcomes += self._chunk(items[len(outcomes) : len(outcomes) + CHUNK], until)
        return outcomes

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, self._ready = None, False

    def _start(self) -> Channel:
        channel = Channel(self._limits.answer_bytes)
        channel.send({"spec": self._spec, "limits": asdict(self._limits)})
        return channel

    def _chunk(self, items: Sequence[Item], until: float) -> list[Outcome]:
        """Outcomes of the first items, up to and including the one that breaks the process."""
        channel = self._opened()
        outcomes: list[Outcome] = []
        channel.send({"items": [_document(task, transcript) for task, transcript in items]})
        for index in range(len(items)):
            left = min(self._limits.item_seconds, max(until - time.monotonic(), 0.0))
            try:
                outcomes.append(_outcome(channel.receive(left), index))
            except BrokenScorerError as broken:
                self.close()
                self.restarts += 1
                self._channel = self._start()
                return [*outcomes, Failure("verifier", str(broken))]
        return outcomes

    def _opened(self) -> Channel:
        if self._channel is None:
            self._channel = self._start()
        if not self._ready:
            try:
                answer = self._channel.receive(self._limits.start_seconds)
            except BrokenScorerError as broken:
                self.close()
                raise WorkFailedError(f"the scorer's process cannot start: {broken}") from None
            if "refused" in answer:
                self.close()
                what, where, remedy = answer["refused"]
                raise RequestError(what, where=where, remedy=remedy)
            self._ready = True
        return self._channel


def _document(task: Task, transcript: Transcript) -> dict[str, Any]:
    return {"task": _fields(task), "transcript": _fields(transcript)}


def _fields(value: Task | Transcript) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def _outcome(answer: Mapping[str, Any], index: int) -> Outcome:
    """Check one answer: the process that wrote it may be hostile."""
    if answer.get("item") != index:
        raise BrokenScorerError("the scorer's process answered out of turn")
    try:
        if "failure" in answer:
            boundary, reason = map(str, answer["failure"])
            return Failure(boundary, reason)
        score = Score(float(answer["reward"]), _figures(answer["terms"]), _figures(answer["metrics"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BrokenScorerError("the scorer's process wrote an answer that is no outcome") from None
    if not all(map(math.isfinite, (score.reward, *score.terms.values(), *score.metrics.values()))):
        return Failure("verifier", "the scorer returned a figure that is not finite")
    return score


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
