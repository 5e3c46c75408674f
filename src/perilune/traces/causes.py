"""Clusters episodes by the cause of their outcome, and keeps a few of each cluster.

A cause is a short text: the failure, the limit that was reached, the reward terms below 1, and the errors
that tools reported.
"""

import re
from collections.abc import Mapping, Sequence

from perilune.files import sha256_bytes
from perilune.traces.cassette import Cassette, Track

FULL_REWARD = 1.0
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))\b", re.MULTILINE)
_ENDED = re.compile(r"\[ended: ([\w ]+)\]")
_VARYING = re.compile(r"\d+(?:\.\d+)?|'[^']*'|\"[^\"]*\"")
_CAUSE_METRICS = ("contained/", "strategy/")  # metrics of an episode that name a cause


def describe_cause(cassette: Cassette) -> str:
    """Return the cause of the outcome of a cassette, for all its players."""
    parts = [_describe_track(track) for track in cassette.tracks if not track.agent]
    return " | ".join(dict.fromkeys(parts)) or "nobody moved"


def cluster_cassettes(cassettes: Sequence[Cassette]) -> dict[str, list[Cassette]]:
    """Return the cassettes by environment and cause, each list ordered by number of tokens, then digest."""
    clusters: dict[str, list[Cassette]] = {}
    for tape in cassettes:
        clusters.setdefault(f"{environment_label(tape.environment)}: {describe_cause(tape)}", []).append(tape)
    return {
        name: sorted(members, key=lambda cassette: (cassette.tokens, cassette.digest))
        for name, members in sorted(clusters.items())
    }


def choose_cassettes(found: Mapping[str, Sequence[Cassette]], each: int) -> dict[str, list[Cassette]]:
    """Return at most `each` cassettes of every cluster: the smallest, and others evenly over the sizes."""
    return {name: [members[i] for i in _even_places(len(members), each)] for name, members in found.items()}


def environment_label(section: Mapping[str, object]) -> str:
    family = section.get("task") or section.get("game")
    return f"{section.get('id')}/{family}" if family else str(section.get("id"))


def is_held_out(digest: str, share: float) -> bool:
    """Return whether a cassette is held out: a fixed draw from its digest, with this probability."""
    return int(sha256_bytes(f"held out/{digest}".encode())[:8], 16) < share * 16**8


def _describe_track(track: Track) -> str:
    verdict = track.verdict
    if verdict.failure:
        return f"failure {_VARYING.sub('#', verdict.failure)}"
    text = "\n".join(message["content"] for turn in track.turns for message in turn.messages)
    terms = verdict.terms.items()
    low = [f"{name} {'below 1' if value else '0'}" for name, value in terms if value < FULL_REWARD]
    reward = verdict.reward or 0.0
    return ", ".join(
        [
            *(["cut off"] if verdict.finish_reason == "length" else []),
            *(f"ended by {reason}" for reason in dict.fromkeys(_ENDED.findall(text))),
            *dict.fromkeys(_ERROR.findall(text)),
            *(name.partition("/")[2] for name in verdict.metrics if name.startswith(_CAUSE_METRICS)),
            *(low or ["full reward" if reward >= FULL_REWARD else f"reward {reward:g}"]),
        ]
    )


def _even_places(count: int, most: int) -> list[int]:
    if count <= most or most == 1:
        return list(range(min(count, most)))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
