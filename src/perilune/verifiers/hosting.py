"""Inside the process: sessions under way, by number, and what one call to them leads to."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from perilune.environments.core.protocol import Environment, EpisodeFailedError, Observation, Session, Task

_LONGEST_REASON = 300
TEXT_CHECKSUM = "judged"  # of an answer: the checksum of the text it is about


class Host:
    """The sessions that this process holds."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._sessions: dict[int, Session] = {}

    def answer(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Do what `item` asks: begin a session (after some actions), let it step, or let go of it."""
        number: int = item["session"]
        try:
            if "close" in item:
                self._close(number)
                return {}
            if "task" in item:
                observation = self._begin(number, item)
            else:
                observation = self._sessions[number].step(item["action"], item["finished"])
            return document(observation)
        except EpisodeFailedError as error:
            return {"failure": [error.failure.boundary, error.failure.reason[:_LONGEST_REASON]]}
        except BaseException as error:  # whatever a session raises is data, SystemExit and MemoryError too
            return {"failure": ["environment", f"{type(error).__name__}: {error}"[:_LONGEST_REASON]]}

    def _begin(self, number: int, item: Mapping[str, Any]) -> Observation:
        self._close(number)
        session = self._environment.reset(task_of(item["task"]), item["seed"])
        self._sessions[number] = session
        for place, action in enumerate(item["actions"], 1):
            session.step(action, place < len(item["actions"]) or item["finished"])
        return session.observation

    def _close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()


def judged_text(item: Mapping[str, Any]) -> int | None:
    """CRC-32 of the text that `item` gives the environment; None when it gives none."""
    text = item["transcript"]["text"] if "transcript" in item else (item.get("actions") or [None])[-1]
    text = item.get("action", text)
    return None if text is None else text_checksum(text)


def text_checksum(text: str) -> int:
    """CRC-32 of a text that may hold anything."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def task_of(document: Mapping[str, Any]) -> Task:
    """A task as it was before it travelled."""
    return Task(**{**document, "prompt": tuple(document["prompt"])})


def document(observation: Any) -> dict[str, Any]:
    """An observation as JSON can carry it; what it holds is checked by who reads it."""
    if not isinstance(observation, Observation):
        raise TypeError(f"a step returned {type(observation).__name__}, no observation")
    return {"observation": {name: getattr(observation, name) for name in Observation.__slots__}}
