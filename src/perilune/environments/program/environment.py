"""The environment `program`: episodes are runs of an agent program, whose model is the policy.

Each episode starts the program anew, confined (`perilune.sandbox.programs`). OPENAI_BASE_URL leads to a
gateway in this process. Every call of the program is a turn of the policy, and the environment of `tasks`
scores what the program answers at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Literal

from pydantic import Field

from perilune.environments.core import registry
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator
from perilune.environments.core.protocol import EpisodeFailedError, Observation, Task
from perilune.environments.program.chat import ChatAnswer, Said
from perilune.environments.program.gateway import Call, Gateway
from perilune.environments.program.launched import LaunchedEnvironment, LaunchSpec
from perilune.sandbox.programs import Ending, Streams


class ProgramSpec(LaunchSpec):
    """The environment section of a recipe, for `id: program`."""

    id: Literal["program"] = Field("program", description="id of the environment")
    answer: Literal["output", "last_line", "reply"] = Field(
        "output", description="what is scored: the standard output, its last line, or the model's last reply"
    )
    stop: tuple[str, ...] = Field((), description="texts that end a reply; the program may name only these")
    turns: int = Field(16, ge=1, le=1000, description="maximum calls of an episode")


class ProgramEnvironment(LaunchedEnvironment):
    """Runs of one program. A program that ends without a call is a failure, whatever `on_crash` says."""

    Spec = ProgramSpec

    def __init__(self, spec: ProgramSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(registry.PROGRAM, spec, sections)
        self.spec = spec
        self.max_turns = spec.turns
        self.stop_texts = spec.stop

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Run the program. Its calls are turns."""
        run = _Run(self, task)
        seen: tuple[Said, ...] = ()
        turns, reply = 0, ""
        try:
            while isinstance(event := run.next(), Call):
                said = event.request.said
                if said[: len(seen)] != seen or len(said) == len(seen):
                    raise EpisodeFailedError("environment", "the program changed earlier messages")
                self._require_known(event.request.stop)
                action = yield Observation(tuple(one.message() for one in said[len(seen) :]))
                reply = _before(action, event.request.stop)
                answer = ChatAnswer(event.request, turns, reply)
                seen, turns = (*said, answer.said), turns + 1
                event.reply.put(answer)
        finally:
            run.close()
        yield self._end(task, event, turns, reply)

    def close(self) -> None:
        """End all programs, the gateway, and the process that scores."""
        super().close()
        if "_gateway" in vars(self):
            vars(self).pop("_gateway").close()

    def _end(self, task: Task, ending: Ending | None, turns: int, reply: str) -> Observation:
        if ending is None:
            what = f"the program neither called the model nor ended within {self.spec.seconds:g} s"
            return self.broke(what, "timeout", is_data=turns > 0)
        if ending.code:
            last = ending.errors.strip().splitlines()[-1:]
            what = ": ".join([f"the program ended with exit code {ending.code}", *last])
            return self.broke(what, "crash", is_data=turns > 0)
        if not turns:
            raise EpisodeFailedError("environment", "the program ended without a call of the model")
        output = ending.output.strip()
        lines = output.splitlines()[-1:]
        text = {"output": output, "last_line": "".join(lines), "reply": reply}[self.spec.answer]
        return self.end_with(task, text)

    def _require_known(self, stop: Sequence[str]) -> None:
        unknown = [text for text in stop if text not in self.spec.stop]
        if unknown:
            raise EpisodeFailedError(
                "environment", f"the program wants replies to end at {unknown}: add it to environment.stop"
            )

    def gateway(self) -> Gateway:
        """The gateway of this process."""
        with self._lock:
            return self._gateway

    @cached_property
    def _gateway(self) -> Gateway:
        return Gateway()


class _Run:
    """One run of the program."""

    def __init__(self, environment: ProgramEnvironment, task: Task) -> None:
        self._seconds, self._gateway = environment.spec.seconds, environment.gateway()
        self._events: SimpleQueue[Call | Ending] = SimpleQueue()
        self._key = self._gateway.open(self._events.put)
        port = self._gateway.port
        url = f"http://127.0.0.1:{port}/{self._key}/v1"
        names = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "perilune"}
        streams = Streams.of_text(environment.text(task))
        try:
            self._program = environment.start(task, streams, self._events.put, names, port)
        except BaseException:
            self._gateway.close_session(self._key)
            raise

    def next(self) -> Call | Ending | None:
        """The next call, or the end of the program; None when neither comes in time."""
        with contextlib.suppress(Empty):
            return self._events.get(timeout=self._seconds)
        return None

    def close(self) -> None:
        """End the program."""
        self._gateway.close_session(self._key)
        self._program.end()


def _before(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]
