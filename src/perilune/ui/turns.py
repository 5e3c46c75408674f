"""Splits an episode into turns and tokens, and shortens long texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from perilune.data.episode import Episode
from perilune.ui.pieces import Piece, Vocabulary

ASSISTANT = "assistant"
MAX_CHARACTERS = 20_000  # characters to show of a text


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    head = most * 3 // 4
    return f"{text[:head]}\n[… {len(text) - most:,} characters omitted …]\n{text[len(text) - most + head :]}"


def shorten_messages(
    messages: Iterable[Mapping[str, str]], most: int = MAX_CHARACTERS
) -> list[dict[str, str]]:
    return [{"role": str(item["role"]), "content": shorten(str(item["content"]), most)} for item in messages]


def split_turns(messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the policy's turns and the messages between them, with role and text of each."""
    turns: list[dict[str, Any]] = []
    for own, group in groupby(messages, key=lambda message: message["role"] == ASSISTANT):
        members = list(group)
        for turn in [[message] for message in members] if own else [members]:
            roles = " and ".join(dict.fromkeys(message["role"] for message in turn))
            turns.append({"role": roles, "text": "".join(message["content"] for message in turn)})
    return turns


def list_turns(episode: Episode) -> list[dict[str, Any]] | None:
    """Return the turns after the prompt, each with the positions of its tokens; None for a single answer.

    A turn with process rewards has their sum as `reward`. Positions and rewards are omitted if the loss mask
    does not separate the turns.
    """
    if episode.loss_mask.all():
        return None
    turns = split_turns(episode.messages[len(episode.opening) :])
    bounds = episode.runs()
    owners = [turn["role"] == ASSISTANT for turn in turns]
    if owners == [own for own, _, _ in bounds]:
        for turn, (_, start, end) in zip(turns, bounds, strict=True):
            turn |= {"start": start, "end": end}
            earned = [] if episode.step_rewards is None else episode.step_rewards[start:end].tolist()
            if known := [value for value in earned if math.isfinite(value)]:
                turn["reward"] = float(f"{math.fsum(known):.6g}")
    return turns


def split_pieces(vocabulary: Vocabulary, episode: Episode) -> list[Piece] | None:
    """Return one piece for each token; None if they do not join to the policy's text."""
    token_ids = episode.token_ids.tolist()
    if episode.loss_mask.all():
        return vocabulary.pieces(token_ids, episode.text)
    messages = episode.messages[len(episode.opening) :]
    texts = iter([message["content"] for message in messages if message["role"] == ASSISTANT])
    pieces: list[Piece] = []
    for own, start, end in episode.runs():
        part = token_ids[start:end]
        added = vocabulary.pieces(part, next(texts, "")) if own else vocabulary.decode_pieces(part)
        if added is None:
            return None
        pieces += added
    return pieces
