"""Episodes in Parquet files: round trips restore every field, and equal episodes give equal bytes."""

import dataclasses
import subprocess
import sys

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.arrow import to_number_arrays, to_table
from perilune.data.episode import Episode
from perilune.data.episodes_file import (
    episodes_from_bytes,
    episodes_to_bytes,
    map_episodes,
    read_episodes,
    read_scores,
    write_episodes,
)
from perilune.data.spans import Span
from perilune.errors import RequestError


def episode(index=0, tokens=5, **fields):
    random = np.random.default_rng(index)
    values = {
        "episode_id": f"3/1/{index}",
        "group_id": "3/1",
        "task_id": "t1",
        "environment": "reasoning_gym/chain_sum",
        "seed": 7,
        "messages": ({"role": "user", "content": "1+2="}, {"role": "assistant", "content": ";3 é"}),
        "prompt_ids": np.arange(4, dtype=np.int32),
        "token_ids": random.integers(0, 99, tokens, dtype=np.int32),
        "loss_mask": random.random(tokens) < 0.5,
        "logprobs": -random.random(tokens, dtype=np.float32),
        "policy_version": np.full(tokens, 3, np.int32),
        "finish_reason": "stop",
        "reward": 1.0,
        "reward_terms": {"raw": 1.0, "well_formed": 1.0},
        "metrics": {"strategy/direct": 1.0},
    }
    return Episode(**(values | fields))


def assert_equal(a, b):
    for field in dataclasses.fields(Episode):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert y.dtype == x.dtype and y.shape == x.shape, field.name
            assert x.tobytes() == y.tobytes(), field.name
        else:
            assert x == y, field.name


EPISODES = [
    episode(0, expected="3"),
    episode(1, tokens=0, finish_reason="aborted", reward=None, failure="verifier: no outcome", metrics={}),
    episode(
        2,
        finish_reason="length",
        step_rewards=np.linspace(0, 1, 5, dtype=np.float32),
        top_ids=np.array([[3, 1], [-1, -1], [0, 2], [1, 0], [2, 3]], np.int32),
        top_logprobs=np.linspace(-3, 0, 10, dtype=np.float32).reshape(5, 2),
    ),
    episode(3, routed_experts=np.arange(64, dtype=np.uint8).reshape(8, 4, 2)),
    episode(4, routed_experts=np.arange(64, dtype=np.uint16).reshape(8, 4, 2) * 300),
]


def test_read_episodes_restores_every_field(tmp_path):
    path = tmp_path / "deep" / "e.parquet"
    assert write_episodes(path, EPISODES) == 5
    for before, after in zip(EPISODES, read_episodes(path), strict=True):
        assert_equal(before, after)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.floats(allow_nan=False), st.text(max_size=20)),
        min_size=0,
        max_size=6,
    )
)
def test_read_episodes_restores_random_episodes(tmp_path_factory, rows):
    episodes = [
        episode(i, tokens=length, reward=reward, messages=({"role": "user", "content": text},))
        for i, (length, reward, text) in enumerate(rows)
        if text.isprintable()
    ]
    path = tmp_path_factory.mktemp("e") / "e.parquet"
    write_episodes(path, episodes)
    for before, after in zip(episodes, read_episodes(path), strict=True):
        assert_equal(before, after)


def test_spans_of_earlier_versions_have_no_tokens(tmp_path):
    talk = ({"role": "user", "content": "?"},)
    part = Span("0.1", "ask", (1,), 2, 2, 1, 3, talk, (5, 6, 7), (False, False, True), "length")
    path = tmp_path / "episodes.parquet"
    write_episodes(path, [episode(spans=(Span("0", "agent", (0, 2), -1, 4, 5, 3), part))])
    assert read_episodes(path)[0].spans[1] == part
    table = pq.read_table(path)
    old = ("span_id", "name", "rounds", "joined", "prompt_tokens", "tokens", "policy_version", "messages")
    kind = table.schema.field("spans").type.value_type
    rows = [[{key: span[key] for key in old} for span in row] for row in table["spans"].to_pylist()]
    column = pa.array(rows, pa.list_(pa.struct([kind.field(name) for name in old])))
    place = table.column_names.index("spans")
    pq.write_table(table.set_column(place, "spans", column), path)
    (again,) = read_episodes(path)
    assert again.spans[1] == dataclasses.replace(part, token_ids=(), loss_mask=(), finish_reason="")


def test_write_episodes_is_deterministic(tmp_path):
    write_episodes(tmp_path / "a", EPISODES)
    write_episodes(tmp_path / "b", [dataclasses.replace(e) for e in EPISODES])
    write_episodes(tmp_path / "c", EPISODES[1:])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_to_table_matches_pyarrow_from_pylist():
    pairs = pa.map_(pa.string(), pa.float64())
    numbers = {"flags": pa.bool_(), "wide": pa.int32(), "logprobs": pa.float32()}
    schema = pa.schema(
        [("name", pa.string()), ("seed", pa.int64()), ("reward", pa.float64()), ("pairs", pairs)]
        + [("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]
        + [(name, pa.list_(kind)) for name, kind in numbers.items()]
    )
    rows = [
        {"name": "é", "seed": -(2**62), "reward": None, "pairs": [("a", 0.1), ("b", np.inf)]}
        | {"messages": [{"role": "user", "content": None}, None], "flags": np.arange(9) % 2 == 0}
        | {"wide": [1, -2], "logprobs": None},
        {"name": None, "seed": 3, "reward": 0.5, "pairs": [], "messages": []}
        | {"flags": [], "wide": None, "logprobs": np.full(3, -0.1, np.float32)},
    ]
    for count in range(3):
        made = to_table(rows[:count], schema)
        assert made.equals(pa.Table.from_pylist(rows[:count], schema=schema))
        made.validate(full=True)
    for name in numbers:
        arrays = to_number_arrays(made.column(name).combine_chunks().slice(1))
        assert [None if array is None else array.tolist() for array in arrays] == made[name].to_pylist()[1:]
    with pytest.raises(OverflowError, match="int32"):
        to_table([{"wide": np.array([2**31])}], pa.schema([("wide", pa.list_(pa.int32()))]))


def test_stream_has_bytes_for_masks_and_restores_them(tmp_path):
    stream = episodes_to_bytes(EPISODES)
    schema = pa.ipc.open_stream(stream).schema
    assert schema.field("loss_mask").type == pa.list_(pa.uint8())  # bits would be unpacked for each token
    (tmp_path / "stream").write_bytes(stream)
    for read in (map_episodes(tmp_path / "stream"), episodes_from_bytes(stream)):
        assert [episode.loss_mask.tolist() for episode in read] == [e.loss_mask.tolist() for e in EPISODES]
        assert {episode.loss_mask.dtype for episode in read} == {np.dtype(np.bool_)}
    assert episodes_from_bytes(episodes_to_bytes([])) == []


def test_episodes_file_does_not_import_pandas(tmp_path):
    write_episodes(tmp_path / "a", EPISODES)
    (tmp_path / "stream").write_bytes(episodes_to_bytes(EPISODES))
    code = """
import sys
from pathlib import Path
from perilune.data.episodes_file import episodes_from_bytes, read_episodes, write_episodes
write_episodes(Path("b"), read_episodes(Path("a")))
episodes_from_bytes(Path("stream").read_bytes())
assert read_episodes(Path("a"), {read_episodes(Path("a"))[0].task_id})
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_duckdb_and_pandas_read_episodes_file(tmp_path):
    path = tmp_path / "e.parquet"
    write_episodes(path, EPISODES)
    rows = (
        duckdb.connect()
        .execute(
            f"select avg(reward), count(*) filter (where truncated), max(reward_terms['raw']), "
            f"max(len(token_ids)), min(messages[1].content) from '{path}'"
        )
        .fetchone()
    )
    assert rows == (1.0, 1, 1.0, 5, "1+2=")
    frame = pd.read_parquet(path)
    assert list(frame["truncated"]) == [False, False, True, False, False]
    assert frame["text"][0] == ";3 é"


def test_write_episodes_rejects_message_with_unknown_key(tmp_path):
    with pytest.raises(ValueError, match="keys"):
        write_episodes(tmp_path / "e", [episode(messages=({"role": "tool", "content": "", "name": "x"},))])
    assert not (tmp_path / "e").exists()


def test_read_episodes_rejects_invalid_files(tmp_path):
    with pytest.raises(RequestError, match="does not exist"):
        read_episodes(tmp_path / "absent")
    (tmp_path / "text").write_text("not parquet")
    with pytest.raises(RequestError, match="not a readable Parquet"):
        read_episodes(tmp_path / "text")
    pq.write_table(pa.table({"episode_id": ["x"]}), tmp_path / "other")
    with pytest.raises(RequestError, match="no column 'group_id'"):
        read_episodes(tmp_path / "other")
    write_episodes(tmp_path / "good", EPISODES)
    table = pq.read_table(tmp_path / "good")
    wrong = table.set_column(table.schema.get_field_index("seed"), "seed", pa.array(["x"] * 5))
    pq.write_table(wrong, tmp_path / "typed")
    with pytest.raises(RequestError, match="column 'seed' is string"):
        read_episodes(tmp_path / "typed")
    names = table.schema.names
    for name, values, error in (
        ("token_ids", pa.nulls(5, table.schema.field("token_ids").type), "column 'token_ids' has nulls"),
        ("failure", pa.array(["verifier"] * 5), "a failed episode has no reward"),
    ):
        pq.write_table(table.set_column(names.index(name), name, values), tmp_path / "invalid")
        with pytest.raises(RequestError, match=error) as caught:
            read_episodes(tmp_path / "invalid")
        assert caught.value.where == str(tmp_path / "invalid")
    torn = (tmp_path / "good").read_bytes()[:-100]
    (tmp_path / "torn").write_bytes(torn)
    with pytest.raises(RequestError, match="not a readable Parquet"):
        read_episodes(tmp_path / "torn")


def test_read_scores_reads_only_needed_columns(tmp_path):
    rows = [episode(0), episode(1, tokens=3, reward=None, failure="verifier: died")]
    write_episodes(tmp_path / "one.parquet", rows)
    scores = read_scores(tmp_path / "one.parquet")
    assert scores == [(row.task_id, row.reward, len(row.token_ids)) for row in rows]
    pq.write_table(pa.table({"task_id": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(RequestError, match="no column 'task_id', 'reward' or 'token_ids'"):
        read_scores(tmp_path / "other.parquet")
    with pytest.raises(RequestError, match="does not exist"):
        read_scores(tmp_path / "missing.parquet")
