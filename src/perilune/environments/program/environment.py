"""The environment `program`: episodes are runs of an agent program, whose model is the policy.

Each episode starts the program anew, confined (`perilune.sandbox.programs`). OPENAI_BASE_URL leads to a
gateway in this process. Every call of the program is a turn of the policy, and the environment of `tasks`
scores the program's final answer.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Literal

from pydantic import Field

from perilune.environments.core import registry
from perilune.environments.core.agents import observe_turns
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator
from perilune.environments.core.protocol import EpisodeFailedError, Observation, Task
from perilune.environments.program.chat import ChatAnswer
from perilune.environments.program.conversations import Conversations
from perilune.environments.program.gateway import Call, Gateway
from perilune.environments.program.launched import LaunchedEnvironment, LaunchSpec
from perilune.sandbox.programs import Ending, Streams

_CALL_BATCH_WINDOW_S = 0.02  # seconds without a call, after which the calls before are sampled


class ProgramSpec(LaunchSpec):
    """The environment section of a recipe, for `id: program`."""

    id: Literal["program"] = Field("program", description="id of the environment")
    branches: bool = Field(
        True,
        description="true: a call that does not continue an earlier conversation starts a new one, as a"
        " sub-agent; false: such a call fails the episode",
    )
    answer: Literal["output", "last_line", "reply"] = Field(
        "output", description="what is scored: the standard output, its last line, or the model's last reply"
    )
    stop: tuple[str, ...] = Field(
        (), description="texts that end a reply; a call whose `stop` has another text fails the episode"
    )
    turns: int = Field(16, ge=1, le=1000, description="maximum calls of an episode")


class ProgramEnvironment(LaunchedEnvironment):
    """Runs of one program. A program that ends without a call is a failure, whatever `on_crash` says."""

    Spec = ProgramSpec

    def __init__(self, spec: ProgramSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(registry.PROGRAM, spec, sections)
        self.spec = spec
        self.max_turns = spec.turns
        self.stop_texts = spec.stop
        self.stops_agents = True

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Run the program. Its calls are turns; those made at the same time are sampled together."""
        run = _Run(self, task)
        conversations = Conversations(self.spec.branches)
        call_count, reply = 0, ""
        try:
            while isinstance(event := run.next(), list):
                for call in event:
                    self._require_known_stops(call.request.stop)
                matched = conversations.match_calls(event)
                if call_count + len(matched) > self.max_turns:
                    yield Observation(done=True, truncated=True)
                answers = []
                for number, (conversation, call, _) in enumerate(matched):
                    action = yield observe_turns([turn for _, _, turn in matched[number:]])
                    reply = _cut_at_stop(action, call.request.stop)
                    answers.append(ChatAnswer(call.request, call_count, reply))
                    conversation.extend(answers[-1])
                    call_count += 1
                for (_, call, _), answer in zip(matched, answers, strict=True):
                    call.reply.put(answer)
        finally:
            run.close()
        yield self._finish_episode(task, event, call_count, reply)

    def close(self) -> None:
        super().close()
        if "_gateway" in vars(self):
            vars(self).pop("_gateway").close()

    def _finish_episode(self, task: Task, ending: Ending | None, turns: int, reply: str) -> Observation:
        if ending is None:
            what = f"the program neither called the model nor ended within {self.spec.seconds:g} s"
            return self.end_crashed(what, "timeout", is_data=turns > 0)
        if ending.code:
            last = ending.errors.strip().splitlines()[-1:]
            what = ": ".join([f"the program ended with exit code {ending.code}", *last])
            return self.end_crashed(what, "crash", is_data=turns > 0)
        if not turns:
            raise EpisodeFailedError("environment", "the program ended without a call of the model")
        output = ending.output.strip()
        lines = output.splitlines()[-1:]
        text = {"output": output, "last_line": "".join(lines), "reply": reply}[self.spec.answer]
        return self.end_with_answer(task, text)

    def _require_known_stops(self, stop: Sequence[str]) -> None:
        unknown = [text for text in stop if text not in self.spec.stop]
        if unknown:
            raise EpisodeFailedError(
                "environment", f"the program wants replies to end at {unknown}: add it to environment.stop"
            )

    def gateway(self) -> Gateway:
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
        streams = Streams.of_text(environment.prompt_text(task))
        try:
            self._program = environment.start(task, streams, self._events.put, names, port)
        except BaseException:
            self._gateway.close_session(self._key)
            raise

    def next(self) -> list[Call] | Ending | None:
        """Return the next calls, or the end of the program; None when neither comes in time."""
        calls: list[Call] = []
        with contextlib.suppress(Empty):
            while True:
                event = self._events.get(timeout=_CALL_BATCH_WINDOW_S if calls else self._seconds)
                if isinstance(event, Ending):
                    return event
                calls.append(event)
        return calls or None

    def close(self) -> None:
        self._gateway.close_session(self._key)
        self._program.end()


def _cut_at_stop(text: str, stop: Sequence[str]) -> str:
    starts = [text.find(stop_text) for stop_text in stop]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
