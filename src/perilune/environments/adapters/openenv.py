"""Environments behind an OpenEnv server, used through its WebSocket interface: reset, step, close.

https://github.com/meta-pytorch/OpenEnv (BSD-3-Clause). The server is not trusted: a malformed or late
response fails one episode.
"""

import json
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from perilune.environments.adapters.openenv_connection import Connection, fetch_action_fields
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import EpisodeFailedError, Split, Task
from perilune.environments.core.splits import generate_task_ids
from perilune.errors import requires_extra
from perilune.frozen import Frozen

_REFUSAL: Mapping[str, Any] = {"error": "that is no valid action"}


class OpenEnvSpec(Frozen):
    """The environment section of a recipe, for `id: openenv`."""

    id: Literal["openenv"] = Field("openenv", description="id of the environment")
    url: str = Field(description="URL of the server, e.g. http://127.0.0.1:8000")
    prompt: str = Field(description="the prompt of every task; servers don't provide one")
    action: str | None = Field(
        None,
        description="field of the server's action that takes the policy's text. null: the field that the"
        " server's schema requires; if it does not require exactly one, the policy writes the"
        " whole action as a JSON object",
    )
    observation: str | None = Field(
        None, description="field of the server's observation to show to the policy; null: all fields as JSON"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the server's reset, besides the seed"
    )
    turns: int = Field(16, ge=1, le=1000, description="maximum actions of an episode")
    seconds: float = Field(8.0, gt=0, description="timeout of each request to the server")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be http://HOST:PORT or https://HOST")
        return url.rstrip("/")


class OpenEnvEnvironment(MultiTurn):
    """Episodes of a server. Rewards are the server's own, and each episode has its own server session.

    The first episode opens the first connection. If the server rejects an action as invalid, the policy sees
    an error and nothing else changes. Any other problem is a failure of the environment.

    Raises:
        RequestError: if the package `websockets` is not installed.
    """

    Spec = OpenEnvSpec
    confined = False  # sessions use the network; they run no untrusted code

    def __init__(self, spec: OpenEnvSpec) -> None:
        self.spec = spec
        self.id = f"openenv/{urlsplit(spec.url).netloc}"
        self.max_turns = spec.turns
        self._field: str | None = spec.action
        self._is_field_known = spec.action is not None
        with requires_extra("openenv", "the package websockets is not installed", where="environment.id"):
            import_module("websockets.sync.client")

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield tasks without end; they differ only in the seed that a reset passes to the server."""
        prompt = ({"role": "user", "content": self.spec.prompt},)
        request = json.dumps([self.spec.prompt, self.spec.config], sort_keys=True)
        for task_id in generate_task_ids(f"openenv/{request}", split, seed):
            yield Task(task_id, prompt, {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        reset = {**self.spec.config, "seed": rng.integer(1 << 31, "reset")}
        with Connection(self.spec.url, self.spec.seconds) as server:
            observation, reward, done = _parse_response(server.request("reset", reset) or {})
            illegal = 0
            while not done:
                metrics = {"illegal": float(illegal)}
                text = yield ask(self._render(observation), role="tool", rewards=(reward,), metrics=metrics)
                action = self._parse_action(text)
                response = None if action is None else server.request("step", action)
                if response is None:
                    illegal, reward = illegal + 1, 0.0
                    observation = _REFUSAL
                else:
                    observation, reward, done = _parse_response(response)
            yield end_episode(reward, metrics={"illegal": float(illegal)})

    def _parse_action(self, text: str) -> Mapping[str, Any] | None:
        """Return the action that the server expects; None if the text is not an action."""
        if not self._is_field_known:
            fields = fetch_action_fields(self.spec.url, self.spec.seconds)
            self._field = fields[0] if len(fields) == 1 else None
            self._is_field_known = True
        if self._field is not None:
            return {self._field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _render(self, observation: Mapping[str, Any]) -> str:
        field = self.spec.observation
        if field is None or observation is _REFUSAL:
            fields = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(fields, ensure_ascii=False)
        if field not in observation:
            raise EpisodeFailedError("environment", f"the server's observation has no field '{field}'")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_response(response: Mapping[str, Any]) -> tuple[Mapping[str, Any], float, bool]:
    """Return the observation, the reward, and whether the episode is done."""
    observation, reward, done = response.get("observation"), response.get("reward"), response.get("done")
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise EpisodeFailedError("environment", "the server's response has no observation")
    if reward is None:
        return observation, 0.0, done
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EpisodeFailedError("environment", f"the server's reward is not a number: {str(reward)[:40]}")
    return observation, float(reward), done
