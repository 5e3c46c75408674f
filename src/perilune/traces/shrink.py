"""Shrinks a cassette by delta debugging, while it still shows the same failure.

The shrinker cuts turns, then the text of each turn, then the task's prompt. The harness plays every
candidate, so observations always follow from the remaining turns. The algorithm is ddmin (Zeller and
Hildebrandt 2002, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2)), with the candidates of
one level played together.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from perilune.models.text.tokenizer import Tokenizer
from perilune.traces.cassette import Cassette, Turn
from perilune.traces.causes import describe_cause
from perilune.traces.replay import Replayer, apply_replay

T = TypeVar("T")
FailureCheck = Callable[[Sequence[Cassette]], list[bool]]
"""Returns for each played cassette whether it still shows the failure."""

_PIECES = re.compile(r"\n+|[^\S\n]+|\w+|[^\w\s]")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
MAX_PIECES = 400  # lists with more pieces are not cut, such as the words of a long text


def has_same_cause(cassette: Cassette) -> FailureCheck:
    """Return a check that a played cassette has the same cause of its outcome as `cassette`."""
    wanted = describe_cause(cassette)
    return lambda played: [describe_cause(candidate) == wanted for candidate in played]


def minimize(items: Sequence[T], first: Callable[[list[list[T]]], int | None]) -> list[T]:
    """Return a subsequence from which no single item can be cut.

    Args:
        first: returns the index of the first candidate that still fails; None if there is none.
    """
    kept, parts = list(items), 2
    if kept and first([[]]) is not None:
        return []
    while len(kept) >= 2:
        edges = [round(number * len(kept) / parts) for number in range(parts + 1)]
        spans = [(a, b) for a, b in pairwise(edges) if a < b]
        chunks = [kept[a:b] for a, b in spans] if parts > 2 or len(spans) == 2 else []
        rests = [kept[:a] + kept[b:] for a, b in spans] if parts > 2 else []
        hit = first(chunks + rests)
        if hit is not None:
            parts = 2 if hit < len(chunks) else max(parts - 1, 2)
            kept = (chunks + rests)[hit]
        elif parts >= len(kept):
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


@dataclass(frozen=True)
class Shrinker:
    """Shrinks cassettes.

    Attributes:
        fails: whether a played cassette still shows the failure.
    """

    fails: FailureCheck
    replayer: Replayer

    def shrink(self, cassette: Cassette) -> Cassette:
        """Return the smallest cassette found; `cassette` itself if it does not show the failure."""
        (whole,) = self._play([cassette])
        if whole is None or not self.fails([whole])[0]:
            return cassette
        small, before = whole, whole.tokens + 1
        while small.tokens < before:
            before = small.tokens
            small = self._cut_turns(small)
            for index in range(len(small.order)):
                small = self._cut_text(small, index) if index < len(small.order) else small
            for index in range(len(small.task.prompt)):
                small = self._cut_prompt(small, index)
        if small.tokens >= cassette.tokens:
            return cassette
        return small.model_copy(update={"shrunk_from": cassette.digest, "checkpoint": None})

    def _cut_turns(self, small: Cassette) -> Cassette:
        return self._cut(small, range(len(small.order)), lambda kept: _with_turns(small, kept))

    def _cut_text(self, small: Cassette, place: int) -> Cassette:
        def cut(base: Cassette, pattern: re.Pattern[str]) -> Cassette:
            pieces = pattern.findall(base.actions()[place].text)
            tokenizer = self.replayer.tokenizer_of(base.tokenizer)
            return self._cut(base, pieces, lambda kept: _with_text(base, place, "".join(kept), tokenizer))

        return cut(cut(small, _LINES), _PIECES)

    def _cut_prompt(self, small: Cassette, place: int) -> Cassette:
        def cut(base: Cassette, pattern: re.Pattern[str]) -> Cassette:
            pieces = pattern.findall(base.task.prompt[place]["content"])
            return self._cut(base, pieces, lambda kept: _with_prompt(base, place, "".join(kept)))

        return cut(cut(small, _LINES), _PIECES)

    def _cut(
        self, base: Cassette, items: Sequence[T], make_draft: Callable[[Sequence[T]], Cassette | None]
    ) -> Cassette:
        """Return the cassette without the items that the failure does not need."""
        best = base

        def first(candidates: list[list[T]]) -> int | None:
            nonlocal best
            drafts = list(map(make_draft, candidates))
            indices = [index for index, draft in enumerate(drafts) if draft is not None]
            played = self._play([draft for draft in drafts if draft is not None])
            kept = [(index, draft) for index, draft in zip(indices, played, strict=True) if draft is not None]
            for (index, draft), fails in zip(kept, self.fails([draft for _, draft in kept]), strict=True):
                if fails:
                    best = draft
                    return index
            return None

        if 1 < len(items) <= MAX_PIECES:
            minimize(items, first)
        return best

    def _play(self, drafts: Sequence[Cassette]) -> list[Cassette | None]:
        """Return the drafts as the harness plays them; None if the replay stops, or needs a cut turn."""
        results = []
        for draft, replay in zip(drafts, self.replayer.harness(drafts), strict=True):
            reasons = [track.verdict.finish_reason for track in replay.tracks]
            results.append(None if replay.error or "aborted" in reasons else apply_replay(draft, replay))
        return results


def _with_turns(cassette: Cassette, kept: Sequence[int]) -> Cassette | None:
    """Return the draft with the actions at the indices `kept`; None without actions."""
    if not kept:
        return None
    turns: dict[str, list[Turn]] = {"": [], **{track.span_id: [] for track in cassette.tracks}}
    actions = cassette.actions()
    for index in kept:
        turns[cassette.order[index]].append(actions[index])
    tracks = tuple(part.model_copy(update={"turns": tuple(turns[part.span_id])}) for part in cassette.tracks)
    return cassette.model_copy(update={"tracks": tracks})


def _with_text(cassette: Cassette, place: int, text: str, tokenizer: Tokenizer) -> Cassette | None:
    """Return the draft with another text of one action; None if the text has no tokens."""
    agent = cassette.order[place]
    number = cassette.order[:place].count(agent)
    tracks = []
    for track in cassette.tracks:
        turns = list(track.turns)
        if track.span_id == agent:
            old = turns[number]
            tokens = tokenizer.encode_completion(text)
            tokens = tokens if old.finished else tokens[:-1]
            if not tokens:
                return None
            turns[number] = old.model_copy(update={"text": text, "tokens": tuple(tokens)})
        tracks.append(track.model_copy(update={"turns": tuple(turns)}))
    return cassette.model_copy(update={"tracks": tuple(tracks)})


def _with_prompt(cassette: Cassette, place: int, text: str) -> Cassette | None:
    """Return the draft with another text of one message of the prompt; None if no message has text left."""
    prompt = list(cassette.task.prompt)
    prompt[place] = {**prompt[place], "content": text}
    if not any(message["content"].strip() for message in prompt):
        return None
    task = cassette.task.model_copy(update={"prompt": tuple(prompt)})
    return cassette.model_copy(update={"task": task})
