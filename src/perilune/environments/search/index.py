"""Ranks documents with BM25, by the package bm25s. Source: Lù, BM25S, arXiv 2407.03618."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.environments.search.corpus import Corpus, Document
from perilune.errors import requires_extra

_WORD = re.compile(r"\w+")
_MAX_CACHED_INDEXES = 16  # indices


class Index:
    """BM25 (the variant of Lucene, k1 1.5, b 0.75) over the words of titles and texts.

    Equal scores are in the order of the documents, so a query always gives the same list.

    Args:
        where: the field that errors refer to.

    Raises:
        RequestError: when bm25s is not installed.
    """

    def __init__(self, documents: Sequence[Document], where: str = "") -> None:
        self._documents = documents
        words = [_tokenize(f"{document['title']} {document['text']}") for document in documents]
        self._known = frozenset(word for line in words for word in line)
        with requires_extra("retrieval", "search needs bm25s", where=where):
            import bm25s
        self._bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        if self._known:
            self._bm25.index(words, show_progress=False)

    def search(self, query: str, k: int) -> list[Document]:
        """Return the best `k` documents that have a word of the query, the best first."""
        scores = self.scores(query)
        matching = scores.nonzero()[0]
        return [self._documents[number] for number in matching[rank_scores(scores[matching])[:k]]]

    def scores(self, query: str) -> NDArray[np.float32]:
        """Return the score of each document; 0 for those without a word of the query."""
        words = [word for word in _tokenize(query) if word in self._known]
        if not words:
            return np.zeros(len(self._documents), np.float32)
        scores: NDArray[np.float32] = self._bm25.get_scores(words)
        return scores


@lru_cache(maxsize=_MAX_CACHED_INDEXES)
def get_index(corpus: Corpus) -> Index:
    """Return the index of a corpus, which is built once in a process."""
    return Index(corpus.documents, "environment.id")


def _tokenize(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def rank_scores(scores: Sequence[float] | NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the numbers of documents, the best first; equal scores in their order."""
    return np.argsort(-np.asarray(scores), kind="stable")
