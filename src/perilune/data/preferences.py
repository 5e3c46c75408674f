"""Preference pairs: JSON Lines of a prompt with a better and a worse answer.

The format is TRL's conversational one (`prompt`, `chosen` and `rejected` as lists of messages), with further
fields for the origin of the pair.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from perilune.data.episode import Episode
from perilune.data.records import check_fields, check_messages, require
from perilune.errors import RequestError
from perilune.files import canonical_json, finite_number, sha256_bytes, write_json_lines

PREFERENCES_FILE = "preferences.jsonl"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """One pair.

    Attributes:
        chosen, rejected: ({"role": "assistant", "content": text},) each.
        environment, task_id: the environment that judged the answers, and the task.
        chosen_score, rejected_score: rewards; the first is larger.
        source: what wrote the answers, e.g. the name of a stage.
        digest: SHA-256 of prompt and both answers.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    environment: str
    task_id: str
    chosen_score: float
    rejected_score: float
    source: str
    digest: str


def make_pair(chosen: Episode, rejected: Episode, source: str) -> PreferenceRecord:
    """Return the pair of two answers to one prompt. Both episodes must have a reward."""
    *prompt, answer = ({"role": m["role"], "content": m["content"]} for m in chosen.messages)
    other = {"role": "assistant", "content": rejected.text}
    assert chosen.reward is not None
    assert rejected.reward is not None
    texts = (tuple(prompt), (answer,), (other,))
    return PreferenceRecord(
        *texts, chosen.environment, chosen.task_id, chosen.reward, rejected.reward, source, _digest(*texts)
    )


def choose_pairs(
    group: Sequence[Episode], *, most: int, gap: float, most_alike: float = 1.0, length_gap: int | None = None
) -> list[tuple[Episode, Episode]]:
    """Return at most `most` pairs (better, worse) of answers to one prompt, starting with best and worst.

    Each answer is in at most one pair, and equal texts count once. Answers without a reward are left out, and
    so are truncated answers, because a pair with one truncated answer would teach the end-of-sequence token.

    Args:
        gap: smallest difference of rewards.
        most_alike: largest similarity of the two texts. A pair of similar texts would raise and lower the
            same tokens at once.
        length_gap: largest difference of lengths in tokens; None for any.
    """
    distinct = {item.text: item for item in reversed(group) if item.reward is not None and not item.truncated}
    ranked = sorted(distinct.values(), key=lambda episode: -(episode.reward or 0.0))
    pairs: list[tuple[Episode, Episode]] = []
    used: set[int] = set()
    for better in ranked:
        for worse in reversed(ranked):
            if len(pairs) == most or (better.reward or 0.0) - (worse.reward or 0.0) < gap:
                break
            if id(worse) in used or id(better) in used:
                continue
            is_far = length_gap is not None and abs(len(better.token_ids) - len(worse.token_ids)) > length_gap
            if is_far or SequenceMatcher(None, better.text, worse.text).ratio() > most_alike:
                continue
            used |= {id(better), id(worse)}
            pairs.append((better, worse))
    return pairs


def write_preferences(path: Path, records: Iterable[PreferenceRecord]) -> None:
    """Write records as canonical JSON Lines, completely or not at all."""
    write_json_lines(path, map(asdict, records))


def _digest(*texts: Sequence[Message]) -> str:
    return sha256_bytes(canonical_json([list(text) for text in texts]))


def parse_preference(value: Mapping[str, Any], where: str) -> PreferenceRecord:
    """Return the pair of a decoded row.

    Raises:
        RequestError: when the row is not a pair, naming `where` and the field.
    """
    row = check_fields(value, where, PreferenceRecord.__slots__)
    for name in ("prompt", "chosen", "rejected"):
        check_messages(row, name, where)
        row[name] = tuple(row[name])
    for name in ("chosen", "rejected"):
        if len(row[name]) != 1 or row[name][0]["role"] != "assistant":
            raise RequestError(f"field '{name}' is not one message by the assistant", where=where)
    for name in ("environment", "task_id", "source"):
        require(isinstance(row[name], str) and row[name] != "", name, "text that is not empty", row, where)
    for name in ("chosen_score", "rejected_score"):
        require(finite_number(row[name]) is not None, name, "a finite number", row, where)
    if not row["chosen_score"] > row["rejected_score"]:
        raise RequestError("the chosen answer does not score above the rejected one", where=where)
    if row["digest"] != _digest(row["prompt"], row["chosen"], row["rejected"]):
        raise RequestError("field 'digest' does not fit the texts: the row was changed", where=where)
    return PreferenceRecord(**row)
