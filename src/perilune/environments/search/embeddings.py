"""Similarities of texts, from an OpenAI-compatible server of embeddings."""

import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from perilune.environments.core.protocol import EpisodeFailedError
from perilune.errors import RequestError
from perilune.files import append_json_line, read_json_lines, sha256_bytes
from perilune.frozen import Frozen
from perilune.servers import JsonClient, ServerError, ServerToken, parse_server_url, require_httpx

_BATCH_TEXTS = 64  # of a request
_TIMEOUT_S, _MAX_ATTEMPTS = 60.0, 4  # seconds for an answer; attempts, 3.5 s together
_RECORDED_DIGITS = 6  # of recorded numbers


class EmbeddingsSpec(Frozen):
    """A server of embeddings, which `rerank` then uses in place of BM25."""

    url: str = Field(description="URL of an OpenAI-compatible server, with or without /v1")
    model: str = Field(description="the model's name on the server")
    token: ServerToken = None
    record: Path | None = Field(
        None,
        description="absolute path of a JSON Lines file that stores every embedding, so that a replay"
        " gets the same embeddings without a server; null: each process keeps its embeddings"
        " in memory",
    )

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str) -> str:
        try:
            return parse_server_url(url)
        except RequestError as error:
            raise ValueError(f"{error.what}; {error.remedy}") from None

    @field_validator("record")
    @classmethod
    def _is_absolute(cls, record: Path | None) -> Path | None:
        if record is not None and not record.is_absolute():
            raise ValueError("the path of the record must be absolute, because several processes share it")
        return record


class Embeddings:
    """Embeds texts, each of them once.

    Raises:
        RequestError: when httpx is not installed.
    """

    def __init__(self, spec: EmbeddingsSpec) -> None:
        require_httpx("environment.embeddings")
        self._spec = spec
        self._known: dict[str, list[float]] = {}

    @cached_property
    def _client(self) -> JsonClient:
        token = os.environ.get(self._spec.token or "")
        return JsonClient(self._spec.url, token=token, timeout=_TIMEOUT_S, attempts=_MAX_ATTEMPTS)

    def similarities(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the cosine of each text with the query.

        Raises:
            EpisodeFailedError: when the server does not answer, or its answer is wrong.
        """
        self._embed_missing([query, *texts])
        (query_vector, *others) = (self._known[self._key(text)] for text in (query, *texts))
        return [_cosine(query_vector, other) for other in others]

    def _embed_missing(self, texts: Sequence[str]) -> None:
        missing = self._find_missing(texts)
        if missing and self._spec.record is not None:
            for row in read_json_lines(self._spec.record):
                self._known.setdefault(row["key"], row["vector"])
            missing = self._find_missing(texts)
        for start in range(0, len(missing), _BATCH_TEXTS):
            part = missing[start : start + _BATCH_TEXTS]
            for text, vector in zip(part, self._request(part), strict=True):
                key, rounded = self._key(text), [round(number, _RECORDED_DIGITS) for number in vector]
                self._known[key] = rounded
                if self._spec.record is not None:
                    append_json_line(self._spec.record, {"key": key, "vector": rounded})

    def _find_missing(self, texts: Sequence[str]) -> list[str]:
        return [text for text in dict.fromkeys(texts) if self._key(text) not in self._known]

    def _key(self, text: str) -> str:
        return sha256_bytes(f"{self._spec.model}\n{text}".encode())

    def _request(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of at most `_BATCH_TEXTS` texts."""
        body = {"model": self._spec.model, "input": list(texts), "encoding_format": "float"}
        try:
            return _parse_vectors(self._client.request("POST", "/v1/embeddings", body), len(texts))
        except ServerError as error:
            raise EpisodeFailedError("model", f"embeddings: {error.what}") from None


def _parse_vectors(answer: Any, count: int) -> list[list[float]]:
    try:
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        vectors = [[float(number) for number in row["embedding"]] for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise EpisodeFailedError("model", "the answer of the server of embeddings has no vectors") from None
    sizes = {len(vector) for vector in vectors}
    is_finite = all(math.isfinite(number) for vector in vectors for number in vector)
    if len(vectors) != count or len(sizes) != 1 or not is_finite:
        raise EpisodeFailedError(
            "model", f"the server of embeddings returned no {count} equally long vectors"
        )
    return vectors


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    norm = math.sqrt(sum(x * x for x in first) * sum(x * x for x in second))
    return sum(x * y for x, y in zip(first, second, strict=False)) / norm if norm else 0.0
