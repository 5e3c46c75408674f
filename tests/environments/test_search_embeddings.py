"""Reranking with a server of embeddings, over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from perilune.environments import make_environment
from perilune.environments.core.protocol import EpisodeFailedError
from perilune.environments.search.embeddings import Embeddings, EmbeddingsSpec
from perilune.environments.search.index import Index
from perilune.environments.search.stack import SearchStack
from perilune.errors import RequestError

TOPICS = ("moon satellite", "sun star")


class Handler(BaseHTTPRequestHandler):
    """Embeds a text as its number of words of each topic. Returns the vectors in reverse order."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, self.headers["Authorization"], body["model"], body["input"]))
        status, content = server.planned.pop(0) if server.planned else (200, None)
        if content is None:
            vectors = [
                [sum(word in topic for word in text.split()) for topic in TOPICS] for text in body["input"]
            ]
            rows = [{"index": number, "embedding": vector} for number, vector in enumerate(vectors)]
            content = json.dumps({"data": rows[::-1]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: object) -> None:
        """Writes no log."""


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.planned = [], []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def spec(server: Any, **more: Any) -> EmbeddingsSpec:
    return EmbeddingsSpec(url=f"http://127.0.0.1:{server.server_port}/v1", model="m", **more)


def documents(*texts: str) -> list[dict[str, str]]:
    return [{"id": "", "title": "", "text": text} for text in texts]


def test_rerank_orders_by_similarity_and_embeds_each_text_once(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDDINGS_TOKEN", "secret")
    embeddings = Embeddings(spec(server, token="EMBEDDINGS_TOKEN"))
    stack = SearchStack(Index(documents("a")), 5, 5, embeddings)
    given = documents("star", "satellite", "star")
    assert stack.call("rerank", [given, "moon"], {}) == [given[1], given[0], given[2]]
    assert stack.call("rerank", [given, "sun", 1], {}) == [given[0]]
    assert server.seen == [
        ("/v1/embeddings", "Bearer secret", "m", ["moon", "star", "satellite"]),
        ("/v1/embeddings", "Bearer secret", "m", ["sun"]),
    ]


def test_recorded_embeddings_need_no_server(server: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    texts = ["star moon", "star", "none"]
    scores = Embeddings(spec(server, record=record)).similarities("moon", texts)
    assert scores == pytest.approx([0.5**0.5, 0.0, 0.0], abs=1e-5)
    assert Embeddings(spec(server, record=record)).similarities("moon", texts) == scores
    assert len(server.seen) == 1 and len(record.read_text().splitlines()) == 4
    Embeddings(spec(server, record=record).model_copy(update={"model": "other"})).similarities("moon", texts)
    assert len(server.seen) == 2


def test_request_is_retried_when_server_is_busy(server: Any) -> None:
    server.planned = [(503, "busy")]
    assert Embeddings(spec(server)).similarities("sun", ["star"]) == [1.0] and len(server.seen) == 2


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (401, "", "refuses with 401"),
        (200, "no JSON", "is not JSON"),
        (200, "{}", "has no vectors"),
        (200, '{"data": [{"index": 0, "embedding": [1]}]}', "no 2 equally long"),
        (
            200,
            '{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}]}',
            "equally long",
        ),
        (200, '{"data": [{"index": 0, "embedding": [NaN]}, {"index": 1, "embedding": [1]}]}', "equally long"),
    ],
)
def test_invalid_response_fails_episode_with_model_boundary(
    server: Any, status: int, content: str, error: str
) -> None:
    server.planned = [(status, content)]
    with pytest.raises(EpisodeFailedError, match=error) as failed:
        Embeddings(spec(server)).similarities("sun", ["star"])
    assert failed.value.failure.boundary == "model" and len(server.seen) == 1


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("url", "ftp://host", "not the URL of a server"),
        ("url", "http://me:pass@host", "contains a password"),
        ("record", "record.jsonl", "must be absolute"),
    ],
)
def test_invalid_embeddings_settings_are_rejected(key: str, value: str, error: str) -> None:
    section = {"url": "http://127.0.0.1:1", "model": "m", key: value}
    with pytest.raises(RequestError, match=error):
        make_environment({"id": "search", "tasks": {"id": "facts"}, "embeddings": section})
