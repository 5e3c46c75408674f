"""The search stack: the functions that an agent calls, with checked arguments."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, validate_call

from perilune.environments.interpreter.interpreter import InvalidCallError
from perilune.environments.search import functions
from perilune.environments.search.corpus import Document
from perilune.environments.search.embeddings import Embeddings
from perilune.environments.search.index import Index, rank_scores

HOSTED_FUNCTIONS = ("search", "fan_out", "rerank")
"""Functions that need the index. The others are also defined in the sandbox."""

FUNCTIONS_SOURCE = Path(functions.__file__).read_text()
"""Python that defines the other functions."""

_MAX_ARGUMENT_ITEMS = 1000  # documents or queries in the arguments of a call
_MAX_RESULT_CHARS = 1_000_000  # characters of all results of an episode, which travel into the sandbox

Documents = Annotated[list[Document], Field(max_length=_MAX_ARGUMENT_ITEMS)]
Queries = Annotated[list[str], Field(max_length=_MAX_ARGUMENT_ITEMS)]


class SearchStack:
    """The functions over one corpus, for one episode.

    Args:
        embeddings: used by `rerank` in place of BM25.

    Attributes:
        searches: queries so far.
    """

    def __init__(
        self, index: Index, max_results: int, max_searches: int, embeddings: Embeddings | None = None
    ) -> None:
        self._index, self._max_results, self._max_searches = index, max_results, max_searches
        self._embeddings = embeddings
        self.searches = 0
        self._returned = 0
        strict = validate_call(config=ConfigDict(strict=True))
        self.functions: Mapping[str, Callable[..., Any]] = {
            "search": strict(self._search),
            "fan_out": strict(self._fan_out),
            "rerank": strict(self._rerank),
            "filter": strict(functions.filter),
            "dedup": strict(functions.dedup),
            "extract": strict(functions.extract),
        }

    def call(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of a function: documents, or texts.

        Raises:
            InvalidCallError: when an argument is wrong, or there are too many searches.
        """
        try:
            result = self.functions[name](*arguments, **named)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            argument = first["loc"][0]
            if isinstance(argument, int):
                argument = [*signature(self.functions[name]).parameters, "too many"][argument]
            raise InvalidCallError(f"{name}: {argument}: {first['msg']}") from None
        except (ValueError, KeyError) as error:
            raise InvalidCallError(f"{name}: {error}") from None
        size = sum(len("".join(item.values()) if isinstance(item, dict) else item) for item in result)
        if self._returned + size > _MAX_RESULT_CHARS:
            raise InvalidCallError(
                f"{name}: an episode may get {_MAX_RESULT_CHARS} characters; ask for fewer"
            )
        self._returned += size
        return result

    def _search(self, query: str, k: Annotated[int, Field(ge=1)] = 10) -> list[Document]:
        return self._fan_out([query], k)

    def _fan_out(self, queries: Queries, k: Annotated[int, Field(ge=1)] = 10) -> list[Document]:
        remaining = self._max_searches - self.searches
        if len(queries) > remaining:
            raise ValueError(f"{len(queries)} searches are needed, and {remaining} are left in this episode")
        self.searches += len(queries)
        return [doc for query in queries for doc in self._index.search(query, min(k, self._max_results))]

    def _rerank(
        self, documents: Documents, query: str, k: Annotated[int, Field(ge=1)] = _MAX_ARGUMENT_ITEMS
    ) -> list[Document]:
        if self._embeddings:
            texts = [f"{doc['title']}\n{doc['text']}".strip() for doc in documents]
            order = rank_scores(self._embeddings.similarities(query, texts))
        else:
            order = rank_scores(Index(documents).scores(query))
        return [documents[number] for number in order[:k]]
