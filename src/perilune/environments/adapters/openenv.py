"""Environments behind an OpenEnv server, spoken to over its WebSocket: reset, step, close.

https://github.com/meta-pytorch/OpenEnv (BSD-3-Clause). What the server says is not trusted: whatever is no
observation, or comes too late, costs the one episode.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from perilune.environments.adapters.openenv_connection import Connection, action_fields
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import EpisodeFailedError, Split, Task
from perilune.errors import RequestError

HELD_OUT_PARTS = 10  # one tenth of all beginnings is held out


class OpenEnvSpec(BaseModel):
    """The environment section of a recipe, for `id: openenv`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["openenv"] = Field("openenv", description="which environment this is")
    url: str = Field(description="of the server, e.g. http://127.0.0.1:8000")
    prompt: str = Field(description="what the policy is told first; a server says nothing of the kind")
    action: str | None = Field(
        None,
        description="field of the server's action that takes the policy's text; null: the one it needs, or,"
        " where it needs several, the policy writes all as a JSON object",
    )
    observation: str | None = Field(
        None, description="field of the server's observation that the policy sees; null: all, as JSON"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="what a reset is told beside the seed")
    turns: int = Field(16, ge=1, le=1000, description="most actions of an episode")
    seconds: float = Field(8.0, gt=0, description="longest to wait for each answer of the server")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is neither http://HOST:PORT nor https://HOST")
        return url.rstrip("/")


class OpenEnvEnvironment(MultiTurn):
    """Episodes of a server; each step earns what the server says, and a session of its own is held for each.

    The server is not asked before the first episode. An action that the server calls invalid changes nothing
    and is told to the policy; whatever else goes wrong is a failure of the environment.

    Raises:
        RequestError: when the package `websockets` is not installed.
    """

    Spec = OpenEnvSpec
    confined = False  # sessions need the network, and run nothing

    def __init__(self, spec: OpenEnvSpec) -> None:
        self.spec = spec
        self.id = f"openenv/{urlsplit(spec.url).netloc}"
        self.max_turns = spec.turns
        self._field: str | None = spec.action
        self._asked = spec.action is not None
        try:
            import_module("websockets.sync.client")
        except ImportError:
            raise RequestError(
                "the package websockets is not installed",
                where="environment.id",
                remedy="pip install 'perilune[openenv]'",
            ) from None

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Beginnings without end: a server is told a seed, and nothing else differs."""
        prompt = ({"role": "user", "content": self.spec.prompt},)
        asked = json.dumps([self.spec.prompt, self.spec.config], sort_keys=True)
        for number in range(sys.maxsize):
            task_id = hashlib.sha256(f"openenv/{asked}/{seed}/{number}".encode()).hexdigest()[:32]
            if (int(task_id[:8], 16) % HELD_OUT_PARTS == 0) == (split == "heldout"):
                yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Actions until the server is done."""
        reset = {**self.spec.config, "seed": rng.integer(1 << 31, "reset")}
        with Connection(self.spec.url, self.spec.seconds) as server:
            found, reward, done = _read(server.ask("reset", reset) or {})
            illegal = 0
            while not done:
                counted = {"illegal": float(illegal)}
                said = yield ask(self._shown(found), role="tool", rewards=(reward,), metrics=counted)
                action = self._action(said)
                answer = None if action is None else server.ask("step", action)
                if answer is None:
                    illegal, reward = illegal + 1, 0.0
                    found = {"error": "that is no valid action"}
                else:
                    found, reward, done = _read(answer)
            yield end_episode(reward, metrics={"illegal": float(illegal)})

    def _action(self, said: str) -> Mapping[str, Any] | None:
        """The action as the server wants it; None for text that is none."""
        if not self._asked:
            fields = action_fields(self.spec.url, self.spec.seconds)
            self._field = fields[0] if len(fields) == 1 else None
            self._asked = True
        if self._field is not None:
            return {self._field: said}
        try:
            action = json.loads(said)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _shown(self, found: Mapping[str, Any]) -> str:
        field = self.spec.observation
        if field is None or "error" in found:
            told = {name: value for name, value in found.items() if name != "metadata"}
            return json.dumps(told, ensure_ascii=False)
        if field not in found:
            raise EpisodeFailedError("environment", f"the server's observation has no field '{field}'")
        shown = found[field]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _read(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], float, bool]:
    """Observation, reward, and whether the episode is done."""
    found, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done")
    if not isinstance(found, dict) or not isinstance(done, bool):
        raise EpisodeFailedError("environment", "the server's answer holds no observation")
    if reward is None:
        return found, 0.0, done
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EpisodeFailedError("environment", f"the server's reward is no number: {str(reward)[:40]}")
    return found, float(reward), done
