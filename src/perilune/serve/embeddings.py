"""POST /v1/embeddings: pooled hidden states of the model."""

import asyncio
import base64
import logging
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from perilune.engine.embedding import Pooling
from perilune.engine.engine import Engine
from perilune.errors import RequestError, WorkFailedError
from perilune.serve.answers import Usage
from perilune.serve.bodies import RequestBody, read_request
from perilune.serve.errors import ApiError
from perilune.serve.responses import run_while_connected
from perilune.serve.schema import Tokens
from perilune.serve.service import Service

_log = logging.getLogger(__name__)

_MAX_TEXTS = 2048
_MAX_TOKENS = 300_000  # of all texts, as in OpenAI's API


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings."""

    no_effect = frozenset({"user"})

    model: str
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_TEXTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=_MAX_TEXTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)

    @property
    def texts(self) -> list[str | list[int]]:
        """The inputs, as texts or token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


class Embeddings:
    """Computes embeddings between the steps of the engine.

    Args:
        engine: once the server has started, only the engine's thread uses it.
        size: number of dimensions of an embedding.
    """

    def __init__(self, service: Service, engine: Engine, size: int, pooling: Pooling) -> None:
        self._service, self._engine, self._size, self._pooling = service, engine, size, pooling
        self._turn = asyncio.Lock()  # one request computes at a time

    async def answer(self, request: Request) -> Response:
        """Answer POST /v1/embeddings."""
        service, began = self._service, perf_counter()
        body, size = await read_request(request, EmbeddingBody, service.lanes)
        if body.dimensions is not None and body.dimensions > self._size:
            raise ApiError(400, f"an embedding has only {self._size} dimensions", param="dimensions")
        adapter = service.find_adapter(body.model)
        with service.admit():
            texts = await service.prompts.encode_texts(body.texts, size, None, "input")
            tokens = sum(map(len, texts))
            if tokens > _MAX_TOKENS:
                raise ApiError(400, f"a request may have at most {_MAX_TOKENS:,} tokens", param="input")
            vectors = await run_while_connected(self._compute(texts, adapter), request.receive)
        request.state.model, request.state.usage = body.model, Usage(tokens)
        service.metrics.record_finished(began, prompt=tokens, completion=0, cached=0)
        return await asyncio.to_thread(lambda: JSONResponse(_document(body, vectors, tokens)))

    async def _compute(self, texts: list[list[int]], adapter: str | None) -> list[NDArray[np.float32]]:
        vectors: list[NDArray[np.float32]] = []
        failures: list[WorkFailedError] = []
        async with self._turn:
            pieces = self._engine.embed(texts, self._pooling, adapter)

            def compute() -> None:
                try:
                    vectors.extend(next(pieces))
                except RequestError:
                    raise
                except Exception as error:  # embeddings do not change the engine, so only this request fails
                    _log.error("an embedding failed", exc_info=error)
                    failures.append(WorkFailedError("the embedding failed"))

            while len(vectors) < len(texts):
                await self._service.gate.enter()
                await self._service.thread.run_between_steps(compute)
                if failures:
                    raise failures[0]
        if not all(np.isfinite(vector).all() for vector in vectors):
            raise WorkFailedError("the model's hidden states are not finite")
        return vectors


def _document(body: EmbeddingBody, vectors: list[NDArray[np.float32]], tokens: int) -> dict[str, Any]:
    data = []
    for index, vector in enumerate(vectors):
        short = vector[: body.dimensions]
        short = short / max(float(np.linalg.norm(short)), 1e-12)
        encoded: Any = short.tolist()
        if body.encoding_format == "base64":
            encoded = base64.b64encode(short.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def embedding_routes(embeddings: Embeddings) -> APIRouter:
    router = APIRouter(prefix="/v1")
    router.post("/embeddings", response_model=None)(embeddings.answer)
    return router
