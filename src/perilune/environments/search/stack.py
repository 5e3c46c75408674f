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
from perilune.environments.search.index import Index, ranked

HOSTED = ("search", "fan_out", "rerank")
"""Functions that need the index. The others are also defined in the sandbox."""

SOURCE = Path(functions.__file__).read_text()
"""Python that defines the other functions."""

_MOST_GIVEN = 1000  # documents or queries in the arguments of a call
_MOST_RETURNED = 1_000_000  # characters of all results of an episode, which travel into the sandbox

Documents = Annotated[list[Document], Field(max_length=_MOST_GIVEN)]
Queries = Annotated[list[str], Field(max_length=_MOST_GIVEN)]


class SearchStack:
    """The functions over one corpus, for one episode.

    Args:
        most_results: most documents that a search returns.
        most_searches: most searches of the episode.
        embeddings: what `rerank` uses in place of BM25.

    Attributes:
        searches: queries so far.
    """

    def __init__(
        self, index: Index, most_results: int, most_searches: int, embeddings: Embeddings | None = None
    ) -> None:
        self._index, self._most_results, self._most_searches = index, most_results, most_searches
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
        """The result of a function: documents, or texts.

        Raises:
            InvalidCallError: when an argument is wrong, or there are too many searches.
        """
        try:
            result = self.functions[name](*arguments, **named)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = first["loc"][0]
            if isinstance(place, int):
                place = [*signature(self.functions[name]).parameters, "too many"][place]
            raise InvalidCallError(f"{name}: {place}: {first['msg']}") from None
        except (ValueError, KeyError) as error:
            raise InvalidCallError(f"{name}: {error}") from None
        size = sum(len("".join(one.values()) if isinstance(one, dict) else one) for one in result)
        if self._returned + size > _MOST_RETURNED:
            raise InvalidCallError(f"{name}: an episode may get {_MOST_RETURNED} characters; ask for fewer")
        self._returned += size
        return result

    def _search(self, query: str, k: Annotated[int, Field(ge=1)] = 10) -> list[Document]:
        return self._fan_out([query], k)

    def _fan_out(self, queries: Queries, k: Annotated[int, Field(ge=1)] = 10) -> list[Document]:
        left = self._most_searches - self.searches
        if len(queries) > left:
            raise ValueError(f"{len(queries)} searches are needed, and {left} are left in this episode")
        self.searches += len(queries)
        return [one for query in queries for one in self._index.search(query, min(k, self._most_results))]

    def _rerank(
        self, documents: Documents, query: str, k: Annotated[int, Field(ge=1)] = _MOST_GIVEN
    ) -> list[Document]:
        if self._embeddings:
            texts = [f"{one['title']}\n{one['text']}".strip() for one in documents]
            order = ranked(self._embeddings.similarities(query, texts))
        else:
            order = ranked(Index(documents).scores(query))
        return [documents[number] for number in order[:k]]
