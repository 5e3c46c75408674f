"""The oracle: the values that must be equal when a cassette is played again.

The oracle compares the end of the episode (reward, terms, metrics, failure), the observations and their
tokens, and the number of turns. Only mode `exact` compares sampled tokens.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from perilune.files import canonical_json, sha256_bytes
from perilune.frozen import Frozen
from perilune.traces.cassette import Messages, Track, Verdict

REWARD_TOLERANCE = 1e-9  # allows for sums of the same numbers in another order
_MAX_CHARACTERS = 160  # of a value in a difference


class Expectation(Frozen):
    """The recorded behavior that a replay of one player or sub-agent must repeat.

    Attributes:
        texts: SHA-256 of each turn's text, which changes if the tokenizer decodes differently.
        seen: the messages before the first turn, then the messages after each turn.
        tokens: SHA-256 of the tokens of each item of `seen`.
        stop: texts that end a turn.
    """

    player: int
    agent: str = ""
    verdict: Verdict
    texts: tuple[str, ...]
    seen: tuple[Messages, ...]
    tokens: tuple[str, ...]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference: its kind ("reward", "observation", ...), its place, and both values as text."""

    kind: str
    where: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.where}: {self.recorded} -> {self.replayed}"


def make_expectation(track: Track) -> Expectation:
    return Expectation(
        player=track.player,
        agent=track.agent,
        verdict=track.verdict,
        texts=tuple(sha256_bytes(turn.text.encode("utf-8", "surrogatepass")) for turn in track.turns),
        seen=(track.opening, *(turn.messages for turn in track.turns)),
        tokens=tuple(
            sha256_bytes(canonical_json(list(ids)))
            for ids in (track.prompt, *(turn.seen for turn in track.turns))
        ),
        stop=track.stop,
    )


def find_differences(expected: Sequence[Expectation], replayed: Sequence[Expectation]) -> list[Difference]:
    """Return all differences between a recording and a replay."""
    before, after = ({(item.player, item.agent): item for item in part} for part in (expected, replayed))
    players = {player for player, _ in before}
    diffs = []
    for key in sorted(before.keys() | after.keys()):
        player, agent = key
        name = f"player {player} " if len(players) > 1 or player else ""
        name += f"sub-agent {agent} " if agent else ""
        if key not in before or key not in after:
            moved = {True: "moves", False: "does not move"}
            diffs.append(Difference("turns", f"{name}turns", moved[key in before], moved[key in after]))
            continue
        diffs += _compare_agents(before[key], after[key], name)
    return diffs


def _compare_verdicts(expected: Verdict, replayed: Verdict, name: str) -> list[Difference]:
    diffs = []
    if _mask_numbers(expected.failure) != _mask_numbers(replayed.failure):
        diffs.append(_make_difference("failure", f"{name}failure", expected.failure, replayed.failure))
    if not _is_close(expected.reward, replayed.reward):
        diffs.append(_make_difference("reward", f"{name}reward", expected.reward, replayed.reward))
    if expected.finish_reason != replayed.finish_reason:
        values = expected.finish_reason, replayed.finish_reason
        diffs.append(_make_difference("finish", f"{name}finish_reason", *values))
    diffs += _compare_figures("term", f"{name}reward_terms", expected.terms, replayed.terms)
    return diffs + _compare_figures("metric", f"{name}metrics", expected.metrics, replayed.metrics)


def find_token_differences(recorded: Sequence[Track], replayed: Sequence[Track]) -> list[Difference]:
    """Return the first sampled token of each player and sub-agent that differs, for mode `exact`."""
    after = {track.span_id: track for track in replayed}
    diffs = []
    for track in recorded:
        other = after[track.span_id].turns if track.span_id in after else ()
        name = f"sub-agent {track.span_id}, " if track.agent else ""
        for number, (old, new) in enumerate(zip_longest(track.turns, other), 1):
            before, now = (turn.tokens if turn else () for turn in (old, new))
            if before != now:
                position = next(
                    (i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]),
                    min(len(before), len(now)),
                )
                values = [_format_value(list(part[position : position + 8])) for part in (before, now)]
                diffs.append(Difference("sampled", f"{name}turn {number}, token {position}", *values))
                break
    return diffs


def _compare_agents(before: Expectation, after: Expectation, name: str) -> list[Difference]:
    diffs = []
    if len(before.texts) != len(after.texts):
        diffs.append(_make_difference("turns", f"{name}turns", len(before.texts), len(after.texts)))
    if before.stop != after.stop:
        diffs.append(_make_difference("stop", f"{name}stop texts", before.stop, after.stop))
    for turn, (old, new) in enumerate(zip(before.texts, after.texts, strict=False), 1):
        if old != new:
            diffs.append(_make_difference("text", f"{name}turn {turn}, its text", old[:12], new[:12]))
    for turn, (old_seen, new_seen) in enumerate(zip(before.seen, after.seen, strict=False)):
        where = f"{name}observation {turn}" if turn else f"{name}prompt"
        if old_seen != new_seen:
            diffs.append(
                _make_difference("observation", where, _format_messages(old_seen), _format_messages(new_seen))
            )
        elif before.tokens[turn] != after.tokens[turn]:
            values = before.tokens[turn][:12], after.tokens[turn][:12]
            diffs.append(_make_difference("tokens", f"{where}, its tokens", *values))
    return diffs + _compare_verdicts(before.verdict, after.verdict, name)


def _compare_figures(
    kind: str, where: str, before: Mapping[str, float], after: Mapping[str, float]
) -> list[Difference]:
    return [
        _make_difference(kind, f"{where}.{name}", before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if not _is_close(before.get(name), after.get(name))
    ]


def _is_close(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return math.isclose(before, after, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE)


def _mask_numbers(failure: str) -> str:
    """Return a failure without its numbers, such as seconds."""
    return re.sub(r"\d+(\.\d+)?", "#", failure)


def _make_difference(kind: str, where: str, before: Any, after: Any) -> Difference:
    return Difference(kind, where, _format_value(before), _format_value(after))


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _format_messages(messages: Messages) -> str:
    return repr("".join(f"{message['role']}: {message['content']}" for message in messages))
