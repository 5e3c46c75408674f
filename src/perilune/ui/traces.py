"""Training traces in the episode browser: verified traces and refused candidates."""

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.ui.attempt import Attempt
from perilune.ui.curves import even_places
from perilune.ui.embedding import embeddable_json
from perilune.ui.episodes import EpisodeSet, StageEpisodes
from perilune.ui.turns import ASSISTANT, shorten, shorten_messages, split_turns

TRACE_TASKS = ("collect", "rejection_sampling")
LISTED_TASK = "collect"  # the task under which the browser lists traces
TRACE_FILES = {"verified traces": "records.jsonl", "refused candidates": "rejected.jsonl"}
MAX_KEPT = 300
MAX_REFUSED = 100


def sample_traces(stage: str, attempt: Attempt) -> StageEpisodes | None:
    """Return an evenly spaced sample of the traces of a stage, or None without traces."""
    if attempt.root is None:
        return None
    folder = attempt.root / "artifacts" / "traces"
    kept, refused = (attempt.rows(folder / name) for name in TRACE_FILES.values())
    sets = [
        _trace_set(label, step, rows, even_places(len(rows), most))
        for step, (label, rows, most) in enumerate(
            zip(TRACE_FILES, (kept, refused), (MAX_KEPT, MAX_REFUSED), strict=True)
        )
    ]
    filled = [episode_set for episode_set in sets if episode_set.total]
    strategies = sorted({_strategy(row) for row in kept})
    return StageEpisodes(stage, LISTED_TASK, None, filled, strategies) if filled else None


def _trace_set(label: str, step: int, rows: Sequence[Mapping[str, Any]], chosen: Sequence[int]) -> EpisodeSet:
    groups = [_trace_group(str(index + 1), rows[index]) for index in chosen]
    return EpisodeSet(label, step, len(rows), len(groups), embeddable_json(groups))


def _trace_group(number: str, row: Mapping[str, Any]) -> dict[str, Any]:
    messages = shorten_messages(row.get("messages") or ())
    roles = [message["role"] for message in messages]
    first = roles.index(ASSISTANT) if ASSISTANT in roles[:-1] else len(messages) - 1
    return {
        "id": number,
        "task": str(row.get("task_id", "")),
        "prompt": messages[: max(first, 0)],
        "expected": "",
        "rendered": "",
        "dead": False,
        "episodes": [
            {
                "id": number,
                "turns": split_turns(messages[first:]) if 0 <= first < len(messages) - 1 else None,
                "text": messages[-1]["content"] if messages else shorten(str(row.get("text", ""))),
                "tokens": None,
                "logprobs": [],
                "masked": None,
                "versions": None,
                "steps": [],
                "spans": None,
                "reward": row.get("score"),
                "terms": {},
                "metrics": {f"strategy/{_strategy(row)}": 1.0},
                "finish": "stop",
                "failure": str(row.get("reason", "")),
                "advantage": None,
            }
        ],
    }


def _strategy(row: Mapping[str, Any]) -> str:
    return str(row.get("source", "")).rpartition("/")[2]
