"""The scorer's processes: the server, which builds the environment and confines itself, and its workers.

The server reads commands from the socket at standard input: first {"spec", "limits"}, answered by {"ready"}
or {"refused"}; then {"fork"}, with descriptors for the worker's socket and standard error, answered by
{"process"}; and {"end": process}, answered by {"status"}. A worker sends {"ready"} on its socket. Then it
answers each {"items": [..]} with one line per item, in order, as soon as each is done. An item is a
transcript to score or a step of a session. {"items": null} closes the sessions and the environment, which {}
answers. All messages are JSON Lines.
"""

import contextlib
import gc
import json
import math
import os
import signal
import socket
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn

from perilune.environments.core.protocol import (
    Environment,
    EpisodeFailedError,
    Failure,
    Observation,
    Score,
    Session,
    Task,
    Transcript,
)
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.sandbox.control_socket import read_requests
from perilune.verifiers.confinement import Confinement, ScorerLimits

TEXT_CHECKSUM_KEY = "text_checksum"  # key of an answer: CRC-32 of the texts that were scored
_MAX_REASON_CHARS = 300


def main() -> None:
    """Build the environment, then fork workers until the socket closes."""
    _die_with_parent()
    control = socket.socket(fileno=os.dup(0))
    sink = os.open(os.devnull, os.O_RDWR)
    os.dup2(sink, 0)
    os.dup2(sink, 1)  # a scorer's output is discarded; the parent reads a bounded part of standard error
    commands = read_requests(control, 2)
    opening, _ = next(commands)
    try:
        environment = make_environment(opening["spec"], checked=False)
        confinement = _confine(environment, ScorerLimits(**opening["limits"]))
    except RequestError as error:
        _send(control, {"refused": [error.what, error.where, error.remedy]})
        return
    gc.collect()
    gc.freeze()  # keeps the environment's memory shared with the workers
    missing = list(confinement.missing) if confinement is not None else []
    _send(control, {"ready": True, "confined": confinement is not None, "missing": missing})
    for command, descriptors in commands:
        if "end" in command:
            _send(control, {"status": _kill_worker(command["end"])})
            continue
        process = os.fork()
        if process == 0:
            control.close()
            _run_worker(environment, confinement, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, {"process": process})


def _confine(environment: Environment, limits: ScorerLimits) -> Confinement | None:
    """Confine this process if the environment permits it, and load the code that must be confined.

    Raises:
        RequestError: if that code cannot be loaded.
    """
    if not getattr(environment, "confined", True):
        return None
    confinement = Confinement(limits)
    load = getattr(environment, "load_confined", None)
    if load is not None:
        confinement.armed = True
        load()
        confinement.armed = False
    return confinement


def _run_worker(
    environment: Environment, confinement: Confinement | None, answers: int, errors: int
) -> NoReturn:
    """Answer requests until the socket closes, and exit."""
    try:
        _die_with_parent()
        os.dup2(errors, 2)
        os.close(errors)
        with contextlib.suppress(OSError):  # a call filter refuses it; then the worker cannot fork either
            os.setpgid(0, 0)
        if confinement is not None:
            confinement.forbid_processes()
        stream = os.fdopen(answers, "wb")
        _write_answer(stream, {"ready": True})
        host = SessionHost(environment)

        def answer(item: Mapping[str, Any]) -> dict[str, Any]:
            if confinement is not None:
                confinement.allow_item()
            return host.answer(item) if "session" in item else _score(environment, item)

        # The sessions of some environments wait for other processes, which then run at the same time.
        threads = getattr(environment, "concurrent", 1)
        map_items = ThreadPoolExecutor(threads).map if threads > 1 else map
        for line in os.fdopen(os.dup(answers), "rb"):
            items = json.loads(line)["items"]
            if items is None:
                host.close()
                _write_answer(stream, {})
                break
            for index, (item, result) in enumerate(zip(items, map_items(answer, items), strict=True)):
                _write_answer(stream, {"item": index, TEXT_CHECKSUM_KEY: _compute_checksum(item)} | result)
    finally:
        os._exit(0)


class SessionHost:
    """The sessions of this process, by number."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._sessions: dict[int, Session] = {}

    def answer(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session and replay its actions, apply one action, or close a session."""
        number: int = item["session"]
        try:
            if "close" in item:
                self._close(number)
                return {}
            if "task" in item:
                observation = self._begin(number, item)
            else:
                observation = _apply_actions(self._sessions[number], item["actions"], item["finished"])
            return _encode_observation(observation)
        except EpisodeFailedError as error:
            return {"failure": [error.failure.boundary, error.failure.reason[:_MAX_REASON_CHARS]]}
        except BaseException as error:  # a session's SystemExit or MemoryError must not end the process
            return {"failure": ["environment", f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]]}

    def close(self) -> None:
        """Close all sessions, then the environment."""
        resources: list[Session | Environment] = [*self._sessions.values(), self._environment]
        for resource in resources:
            with contextlib.suppress(BaseException):
                resource.close()

    def _begin(self, number: int, item: Mapping[str, Any]) -> Observation:
        self._close(number)
        session = self._environment.reset(_parse_task(item["task"]), item["seed"])
        self._sessions[number] = session
        for turn, action in enumerate(item["earlier"]):
            session.step(action, turn not in item["cut_off"])
        return _apply_actions(session, item["actions"], item["finished"])

    def _close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()


def _apply_actions(session: Session, actions: Sequence[str], finished: bool) -> Observation:
    """Apply the actions of one round. `finished` is about the first, the player's own.

    Raises:
        ValueError: when an observation before the last has results, which would be lost.

    Returns:
        the last observation; that of the first action if it was cut off and so ended the episode.
    """
    for later, action in zip(range(len(actions) - 1, -1, -1), actions, strict=True):
        observation = session.step(action, finished or later < len(actions) - 1)
        if observation.truncated and not finished:
            break
        if later and (observation.done or observation.rewards or observation.terms or observation.metrics):
            raise ValueError(f"a result came before the last {later} turns of a round")
    return session.observation


def _compute_checksum(item: Mapping[str, Any]) -> int | None:
    """Return CRC-32 of the texts that `item` passes to the environment; None if there are none."""
    texts = [item["transcript"]["text"]] if "transcript" in item else item.get("actions")
    return text_checksum(texts) if texts else None


def text_checksum(texts: Iterable[str]) -> int:
    """Return CRC-32 of texts, which may contain lone surrogates."""
    return zlib.crc32("\0".join(texts).encode("utf-8", "surrogatepass"))


def _parse_task(document: Mapping[str, Any]) -> Task:
    return Task(**{**document, "prompt": tuple(document["prompt"])})


def _encode_observation(observation: Any) -> dict[str, Any]:
    """Return an observation as JSON. The receiver validates its fields."""
    if not isinstance(observation, Observation):
        raise TypeError(f"a step returned {type(observation).__name__}, not an Observation")
    fields = {name: getattr(observation, name) for name in Observation.__slots__}
    turns = [
        (turn.agent, turn.messages, turn.name, turn.max_tokens, turn.continues, turn.results)
        for turn in observation.turns
    ]
    return {"observation": fields | {"turns": turns}}


def _kill_worker(process: int) -> int:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def _send(control: socket.socket, document: Mapping[str, Any]) -> None:
    control.sendall(json.dumps(document).encode() + b"\n")


def _score(environment: Environment, item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        task, transcript = _parse_task(item["task"]), item["transcript"]
        lists = {name: tuple(value) for name, value in transcript.items() if isinstance(value, list)}
        outcome: Any = environment.score(task, Transcript(**{**transcript, **lists}))
    except BaseException as error:  # a scorer's SystemExit or MemoryError must not end the process
        outcome = Failure("verifier", f"scorer raised {type(error).__name__}: {error}")
    return _encode_outcome(outcome)


def _encode_outcome(outcome: Any) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failure": [str(outcome.boundary), str(outcome.reason)[:_MAX_REASON_CHARS]]}
    if not isinstance(outcome, Score):
        return {"failure": ["verifier", f"scorer returned {type(outcome).__name__}, not an outcome"]}
    try:
        reward, terms, metrics = float(outcome.reward), to_floats(outcome.terms), to_floats(outcome.metrics)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        return {"failure": ["verifier", f"scorer returned invalid numbers: {error}"[:_MAX_REASON_CHARS]]}
    if not all(map(math.isfinite, (reward, *terms.values(), *metrics.values()))):
        return {"failure": ["verifier", f"scorer returned a number that is not finite (reward {reward})"]}
    return {"reward": reward, "terms": terms, "metrics": metrics}


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _write_answer(answers: BinaryIO, document: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(document)
    except (TypeError, ValueError, RecursionError) as error:
        text = json.dumps({"item": document["item"], "failure": ["environment", f"not JSON: {error}"]})
    answers.write(text.encode() + b"\n")
    answers.flush()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        from perilune.sandbox.kernel import die_with_parent

        die_with_parent()


if __name__ == "__main__":
    main()
