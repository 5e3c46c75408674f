"""Parse and validate the runner's answers, which are untrusted and may follow a login shell's greeting."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from perilune.execution.claim import Claim
from perilune.execution.hosts.protocol import HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.processes import Presence
from perilune.execution.verdict import make_damaged_verdict, parse_verdict

MAX_LINE_BYTES = 1 << 20
MAX_MESSAGE_CHARS = 2000


def parse_last_document(output: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object on the last line.

    Args:
        name: of the machine, for messages.

    Raises:
        HostUnreachableError: the last line is no JSON object.
    """
    lines = output.strip().splitlines()
    try:
        document = json.loads(lines[-1]) if lines else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HostUnreachableError(f"{name}: its answer is incomplete")
    return document


def parse_first_observation(answer: BinaryIO) -> dict[str, Any] | None:
    """Return the observation in the first JSON line of an answer, before its frames; None without one."""
    while line := answer.readline(MAX_LINE_BYTES):
        with contextlib.suppress(ValueError):
            document = json.loads(line) if line.startswith(b'{"seen": {') else None
            if document is not None:
                return dict(document["seen"])
    return None


def make_observation(seen: Mapping[str, Any], epoch: int, *, more: bool) -> Observation:
    """Return the runner's observation of attempt `epoch`.

    Raises:
        ValueError, KeyError, TypeError: `seen` is malformed, or is about another attempt.
    """
    fields, result = seen["claim"], seen["result"]
    if seen["superseded"]:
        return Observation(superseded=True)
    if fields is None:
        return Observation()
    claim = TypeAdapter(Claim).validate_python({**fields, "starttime": fields["starttime"] or 0})
    verdict = None
    if result is not None:
        try:
            verdict = parse_verdict({**result, "message": str(result["message"])[:MAX_MESSAGE_CHARS]})
        except (KeyError, TypeError, ValueError):
            verdict = make_damaged_verdict(epoch, "runtime/result.json is not the result of an attempt")
    if claim.epoch != epoch or (verdict is not None and verdict.epoch != epoch):
        raise ValueError("the answer is about another attempt")
    worker = {True: Presence.PRESENT, False: Presence.ABSENT, None: Presence.UNKNOWN}[seen["alive"]]
    return Observation(claim, worker, verdict, heartbeat=int(seen["heartbeat"]), more=more)
