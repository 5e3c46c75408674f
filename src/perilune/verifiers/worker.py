"""Inside the processes: the server, which builds the environment, confines itself and forks; and a worker.

The server reads commands from the socket at standard input: first {"spec", "limits"}, answered by {"ready"}
or {"refused"}; then {"fork"}, with descriptors for the worker's socket and standard error, answered by
{"process"}; and {"end": process}, answered by {"status"}. A worker says {"ready"} on its socket, then answers
each {"items": [..]} by one line an item, in order, as soon as it is done. An item is a transcript to be
scored, or a step of a session. All of it is JSON Lines.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

from perilune.environments.core.protocol import Environment, Failure, Score, Transcript
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.verifiers.confinement import Confinement, ScorerLimits
from perilune.verifiers.hosting import TEXT_CHECKSUM, Host, judged_text, task_of

_LONGEST_REASON = 300
_COMMAND = 65536  # bytes read at a time


def main() -> None:
    """Build the environment, then fork workers until the socket ends."""
    _die_with_parent()
    control = socket.socket(fileno=os.dup(0))
    sink = os.open(os.devnull, os.O_RDWR)
    os.dup2(sink, 0)
    os.dup2(sink, 1)  # what a scorer prints goes nowhere; standard error is read by the parent, bounded
    commands = _commands(control)
    opening, _ = next(commands)
    try:
        environment = make_environment(opening["spec"], checked=False)
        confinement = _confined(environment, ScorerLimits(**opening["limits"]))
    except RequestError as error:
        _tell(control, {"refused": [error.what, error.where, error.remedy]})
        return
    gc.collect()
    gc.freeze()  # what is built is shared with workers as long as nobody writes to it
    missing = list(confinement.missing) if confinement is not None else []
    _tell(control, {"ready": True, "confined": confinement is not None, "missing": missing})
    for command, descriptors in commands:
        if "end" in command:
            _tell(control, {"status": _end(command["end"])})
            continue
        process = os.fork()
        if process == 0:
            control.close()
            _work(environment, confinement, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(control, {"process": process})


def _confined(environment: Environment, limits: ScorerLimits) -> Confinement | None:
    """Confine this process where the environment only computes, and load what may see no other.

    Raises:
        RequestError: when that cannot be loaded.
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


def _work(environment: Environment, confinement: Confinement | None, answers: int, errors: int) -> NoReturn:
    """Answer until the socket ends, in a process that does nothing else."""
    try:
        _die_with_parent()
        os.dup2(errors, 2)
        os.close(errors)
        with contextlib.suppress(OSError):  # refused where calls are filtered, and then nothing can be forked
            os.setpgid(0, 0)
        if confinement is not None:
            confinement.forbid_processes()
        stream = os.fdopen(answers, "wb")
        _answer(stream, {"ready": True})
        host = Host(environment)
        for line in os.fdopen(os.dup(answers), "rb"):
            for index, item in enumerate(json.loads(line)["items"]):
                if confinement is not None:
                    confinement.allow_item()
                found = host.answer(item) if "session" in item else _score(environment, item)
                _answer(stream, {"item": index, TEXT_CHECKSUM: judged_text(item)} | found)
    finally:
        os._exit(0)


def _end(process: int) -> int:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def _commands(control: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Commands and the descriptors that came with each; every one is answered before the next is sent."""
    buffer = b""
    descriptors: list[int] = []
    while True:
        data, received, _, _ = socket.recv_fds(control, _COMMAND, 2)
        if not data:
            return
        buffer, descriptors = buffer + data, descriptors + received
        if buffer.endswith(b"\n"):
            yield json.loads(buffer), descriptors
            buffer, descriptors = b"", []


def _tell(control: socket.socket, document: Mapping[str, Any]) -> None:
    control.sendall(json.dumps(document).encode() + b"\n")


def _score(environment: Environment, item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        task, transcript = task_of(item["task"]), item["transcript"]
        transcript = {**transcript, **{name: tuple(transcript[name]) for name in ("earlier", "messages")}}
        outcome: Any = environment.score(task, Transcript(**transcript))
    except BaseException as error:  # SystemExit and MemoryError of a scorer are data too
        outcome = Failure("verifier", f"scorer raised {type(error).__name__}: {error}")
    return _document(outcome)


def _document(outcome: Any) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failure": [str(outcome.boundary), str(outcome.reason)[:_LONGEST_REASON]]}
    if not isinstance(outcome, Score):
        return {"failure": ["verifier", f"scorer returned {type(outcome).__name__}, no outcome"]}
    try:
        reward, terms, metrics = float(outcome.reward), _figures(outcome.terms), _figures(outcome.metrics)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        return {"failure": ["verifier", f"scorer returned no figures: {error}"[:_LONGEST_REASON]]}
    if not all(map(math.isfinite, (reward, *terms.values(), *metrics.values()))):
        return {"failure": ["verifier", f"scorer returned a figure that is not finite (reward {reward})"]}
    return {"reward": reward, "terms": terms, "metrics": metrics}


def _figures(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _answer(answers: BinaryIO, document: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(document)
    except (TypeError, ValueError, RecursionError) as error:
        text = json.dumps({"item": document["item"], "failure": ["environment", f"no JSON: {error}"]})
    answers.write(text.encode() + b"\n")
    answers.flush()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        from perilune.sandbox.kernel import die_with_parent

        die_with_parent()


if __name__ == "__main__":
    main()
