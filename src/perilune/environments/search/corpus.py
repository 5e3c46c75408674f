"""Documents to search, made by a generator or read from a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes

Document = dict[str, str]
"""{"id": "d1", "title": "...", "text": "..."}"""

_MAX_DOCUMENT_CHARS = 1 << 20  # of one document


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in a fixed order. Corpora with the same digest are equal."""

    documents: Sequence[Document]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the documents."""
        return sha256_bytes(canonical_json(list(self.documents)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Corpus) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@lru_cache(maxsize=4)
def read_corpus(path: str) -> Corpus:
    """Read a JSON Lines file: `text`, and possibly `id` (by default d1, d2, ...) and `title`.

    Raises:
        RequestError: naming file and line of an invalid row.
    """
    try:
        with Path(path).open(encoding="utf-8") as stream:
            lines = ((number, line) for number, line in enumerate(stream, 1) if line.strip())
            documents = [_parse_document(line, f"{path}:{number}", number) for number, line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}", where="environment.corpus") from None
    if not documents:
        raise RequestError(f"{path} has no documents", where="environment.corpus")
    if len({document["id"] for document in documents}) < len(documents):
        raise RequestError(f"two documents of {path} have the same id", where="environment.corpus")
    return Corpus(documents)


def _parse_document(line: str, where: str, number: int) -> Document:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, Mapping):
        raise RequestError("not a JSON object", where=where)
    document = {"id": row.get("id", f"d{number}"), "title": row.get("title", ""), "text": row.get("text")}
    for key, value in document.items():
        if not isinstance(value, str):
            raise RequestError(f"'{key}' is not a text", where=where, remedy='write {"text": "..."}')
        if len(value) > _MAX_DOCUMENT_CHARS:
            remedy = "split the document into passages"
            raise RequestError(
                f"'{key}' has more than {_MAX_DOCUMENT_CHARS} characters", where=where, remedy=remedy
            )
    return document
