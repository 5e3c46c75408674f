"""Episodes as Parquet, one row per episode, readable by DuckDB, pandas and datasets.

The bytes depend only on the episodes and the pyarrow version: there are no time stamps, and the settings are
fixed.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from perilune.data.arrow import select_rows, to_number_arrays, to_table
from perilune.data.episode import Episode
from perilune.data.spans import Span
from perilune.errors import RequestError
from perilune.files import write_atomic
from perilune.redaction import redact_document

_MESSAGE_KEYS = {"role", "content"}
_ARRAYS = {
    "prompt_ids": np.int32,
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "policy_version": np.int32,
}
_OPTIONAL = ("step_rewards", "reference_logprobs")
_TOP_TOKENS = {"top_ids": np.int32, "top_logprobs": np.float32}
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TOKENLESS_SPAN = [  # fields of a span in files of earlier versions
    ("span_id", pa.string()),
    ("name", pa.string()),
    ("rounds", pa.list_(pa.int32())),
    ("joined", pa.int32()),
    ("prompt_tokens", pa.int64()),
    ("tokens", pa.int64()),
    ("policy_version", pa.int32()),
    ("messages", pa.list_(_MESSAGE)),
]
_SPAN_TOKENS = [
    ("token_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("finish_reason", pa.string()),
]


@cache
def episode_schema(routes: str = "uint16") -> pa.Schema:
    """Return the columns of an episodes file. For queries, `truncated` and `text` repeat data of others.

    Args:
        routes: dtype of the experts in `routed_experts`.
    """
    return pa.schema(
        [
            ("episode_id", pa.string()),
            ("group_id", pa.string()),
            ("task_id", pa.string()),
            ("environment", pa.string()),
            ("seed", pa.int64()),
            ("messages", pa.list_(_MESSAGE)),
            ("prompt_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_version", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("truncated", pa.bool_()),
            ("text", pa.string()),
            ("reward", pa.float64()),
            ("reward_terms", pa.map_(pa.string(), pa.float64())),
            ("step_rewards", pa.list_(pa.float32())),
            ("failure", pa.string()),
            ("metrics", pa.map_(pa.string(), pa.float64())),
            ("routed_experts", pa.list_(pa.type_for_alias(routes))),
            ("routed_experts_shape", pa.list_(pa.int32())),
            ("routed_experts_dtype", pa.string()),
            ("spans", pa.list_(pa.struct([*_TOKENLESS_SPAN, *_SPAN_TOKENS]))),
            ("top_ids", pa.list_(pa.list_(pa.int32()))),
            ("top_logprobs", pa.list_(pa.list_(pa.float32()))),
            ("reference_logprobs", pa.list_(pa.float32())),
            ("expected", pa.string()),
        ]
    )


def write_episodes(path: Path, episodes: Iterable[Episode]) -> int:
    """Write episodes, completely or not at all; return their number.

    Secrets in texts are redacted.

    Raises:
        ValueError: when a message has other keys than role and content.
    """
    rows = [_redact_row(_to_row(episode)) for episode in episodes]
    table = _to_table(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=["environment", "finish_reason"])
    write_atomic(path, sink.getvalue().to_pybytes())
    return len(rows)


def episodes_to_bytes(episodes: Iterable[Episode]) -> bytes:
    """Return episodes as an Arrow stream, for another process of the run.

    Raises:
        ValueError: as `write_episodes`.
    """
    table = _to_table([_to_row(episode) for episode in episodes])
    # As bytes, because a reader would have to unpack bits, which takes time for each token.
    mask = table["loss_mask"].cast(pa.list_(pa.uint8()))
    table = table.set_column(table.column_names.index("loss_mask"), "loss_mask", mask)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def episodes_from_bytes(stream: bytes) -> list[Episode]:
    return _to_episodes(pa.ipc.open_stream(stream).read_all())


def map_episodes(path: Path) -> list[Episode]:
    """Return the episodes of a file with the bytes of `episodes_to_bytes`, mapped into memory.

    Tokens and routes are views into the file and are read when used. The file may be deleted meanwhile.
    """
    with pa.memory_map(str(path)) as file:
        return _to_episodes(pa.ipc.open_stream(file).read_all())


def _to_table(rows: list[dict[str, Any]]) -> pa.Table:
    kinds = {row["routed_experts_dtype"] for row in rows} - {None}
    return to_table(rows, episode_schema("uint8" if kinds == {"uint8"} else "uint16"))


def read_episodes(path: Path, tasks: Collection[str] | None = None) -> list[Episode]:
    """Read an episodes file, or only the episodes of some tasks.

    Raises:
        RequestError: when the file is missing, is not a Parquet file, lacks a column, or has an invalid row.
    """
    table = read_columns(path)
    if tasks is not None and "task_id" in table.column_names:
        table = select_rows(table, [task_id in tasks for task_id in table["task_id"].to_pylist()])
    for name in ("spans", "top_ids", "top_logprobs", "reference_logprobs", "expected"):
        if name not in table.column_names:  # a file of an earlier version
            column = episode_schema().field(name)
            table = table.append_column(column, pa.nulls(len(table), column.type))
    for field in episode_schema():
        if field.name not in table.column_names:
            raise RequestError(f"no column '{field.name}'", where=str(path))
        possible = [episode_schema(routes).field(field.name).type for routes in ("uint8", "uint16")]
        if field.name == "spans":
            possible.append(pa.list_(pa.struct(_TOKENLESS_SPAN)))
        if table.schema.field(field.name).type not in possible:
            what = f"column '{field.name}' is {table.schema.field(field.name).type}, not {field.type}"
            raise RequestError(what, where=str(path))
        if field.name in (*_ARRAYS, "messages", "reward_terms", "metrics") and table[field.name].null_count:
            raise RequestError(f"column '{field.name}' has nulls", where=str(path))
    try:
        return _to_episodes(table)
    except ValueError as error:  # an episode that cannot be, such as a failed one with a reward
        raise RequestError(str(error), where=str(path)) from None


class EpisodeScore(NamedTuple):
    """Task, reward and number of tokens of an episode."""

    task_id: str
    reward: float | None
    tokens: int


def read_scores(path: Path) -> list[EpisodeScore]:
    """Return the scores in an episodes file, much faster than its episodes.

    Raises:
        RequestError: when the file is missing, is not a Parquet file, or lacks a column.
    """
    table = read_columns(path, ["task_id", "reward", "token_ids"])
    if table.num_columns < 3:
        raise RequestError("no column 'task_id', 'reward' or 'token_ids'", where=str(path))
    tokens = [len(ids) for ids in table["token_ids"]]
    return list(map(EpisodeScore, table["task_id"].to_pylist(), table["reward"].to_pylist(), tokens))


def read_versions(path: Path) -> NDArray[np.int64]:
    """Return (policy version of the first sampled token, sampled tokens) of each episode, as [N, 2].

    Episodes without a sampled token are left out.

    Raises:
        RequestError: when the file is missing, is not a Parquet file, or lacks the column.
    """
    table = read_columns(path, ["policy_version"])
    if not table.num_columns:
        raise RequestError("no column 'policy_version'", where=str(path))
    rows = [row[row >= 0] for row in (item.values.to_numpy() for item in table["policy_version"])]
    return np.array([(row[0], len(row)) for row in rows if len(row)], np.int64).reshape(-1, 2)


def read_columns(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return some columns of an episodes file, without those that it lacks.

    Raises:
        RequestError: when the file is missing or is not a Parquet file.
    """
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns, use_threads=False)
    except FileNotFoundError:
        raise RequestError("the episodes file does not exist", where=str(path)) from None
    except (pa.ArrowInvalid, OSError) as error:
        raise RequestError(f"not a readable Parquet file: {error}", where=str(path)) from None


def _to_episodes(table: pa.Table) -> list[Episode]:
    columns = {name: _column_values(table, name) for name in episode_schema().names}
    return [_to_episode({name: column[i] for name, column in columns.items()}) for i in range(len(table))]


def _to_row(episode: Episode) -> dict[str, Any]:
    for message in chain(episode.messages, *(span.messages for span in episode.spans)):
        if set(message) != _MESSAGE_KEYS:
            raise ValueError(f"{episode.episode_id}: a message has the keys {sorted(message)}")
    experts = episode.routed_experts
    row: dict[str, Any] = {name: getattr(episode, name) for name in _ARRAYS}
    for name in ("episode_id", "group_id", "task_id", "environment", "seed", "finish_reason", "truncated"):
        row[name] = getattr(episode, name)
    row |= {name: getattr(episode, name) for name in ("text", "reward", "failure", "expected", *_OPTIONAL)}
    row["messages"] = [dict(message) for message in episode.messages]
    row["reward_terms"] = _sorted_pairs(episode.reward_terms)
    row["metrics"] = _sorted_pairs(episode.metrics)
    row["routed_experts"] = None if experts is None else experts.reshape(-1)
    row["routed_experts_shape"] = None if experts is None else list(experts.shape)
    row["routed_experts_dtype"] = None if experts is None else experts.dtype.name
    names = Span.__slots__  # not by asdict, which copies each token
    row["spans"] = [{name: getattr(span, name) for name in names} for span in episode.spans]
    row |= {name: None if (top := getattr(episode, name)) is None else top.tolist() for name in _TOP_TOKENS}
    return row


def _redact_row(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: redact_document(row[name]) for name in ("messages", "text", "failure", "expected")}
    spans = [
        span | redact_document({key: span[key] for key in ("name", "messages")}) for span in row["spans"]
    ]
    return row | texts | {"spans": spans}


def _sorted_pairs(figures: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted((name, float(value)) for name, value in figures.items())


def _column_values(table: pa.Table, name: str) -> list[Any]:
    column = table.column(name)
    if name in _ARRAYS or name in (*_OPTIONAL, "routed_experts"):
        # combine_chunks copies even a single chunk, and a mapped file has one.
        return to_number_arrays(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
    values: list[Any] = column.to_pylist()
    return values


def _to_episode(row: dict[str, Any]) -> Episode:
    experts = row["routed_experts"]
    if experts is not None:
        experts = experts.astype(row["routed_experts_dtype"], copy=False).reshape(row["routed_experts_shape"])
    fields = {name: value for name, value in row.items() if name in Episode.__slots__}
    fields |= {name: row[name].view(dtype) for name, dtype in _ARRAYS.items()}
    fields |= {name: dict(row[name]) for name in ("reward_terms", "metrics")}
    fields |= {
        "messages": tuple(row["messages"]),
        "expected": row["expected"] or "",
        "spans": tuple(map(_to_span, row["spans"] or ())),
    }
    fields |= {
        name: None if row[name] is None else np.asarray(row[name], dtype)
        for name, dtype in _TOP_TOKENS.items()
    }
    return Episode(**(fields | {"routed_experts": experts}))


def _to_span(row: Mapping[str, Any]) -> Span:
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Span(**{**row, **lists})
