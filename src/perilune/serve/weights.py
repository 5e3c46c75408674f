"""New weights for a running server, sent by `perilune push`.

    GET  /v1/weights            version and digest of the weights, and dtype and shape of each tensor
    GET  /v1/weights/SHA256     the number of bytes that have arrived of a file
    PUT  /v1/weights/SHA256     the next bytes of the file, with a Content-Range
    POST /v1/weights            {"file": SHA256} loads the file, a weight update (`weights.delta`)
    POST /collective_rpc        {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}, as in vLLM:
                                loads a checkpoint that the server can read

vLLM's weight transfers, such as /init_weight_transfer_engine and /update_weights, send tensors from GPU to
GPU (NCCL, CUDA IPC). The server refuses them with status 501.

The server answers requests while it receives, checks and decodes a file. Its tensors replace the old ones
between two steps of the engine, all at once. An interrupted transfer resumes where it stopped.
"""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.files import sha256_file
from perilune.models.checkpoints.stored import StoredDecoder
from perilune.serve.bodies import Body, read_body
from perilune.serve.engine_thread import EngineThread
from perilune.serve.errors import ApiError
from perilune.weights.checkpoint import load_tensors
from perilune.weights.delta import WeightReader

MAX_CHUNK_BYTES = 1 << 22  # bytes of a file in one request
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_UPDATE_OVERHEAD_BYTES = 1 << 24  # bytes of an update's header, and of positions beyond the values
_VLLM_TRANSFERS = {
    "/get_world_size": "GET",
    "/init_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/start_draft_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
}


class _UseBody(Body):
    file: str = Field(pattern=f"^{_DIGEST.pattern}$")


class _Reload(Body):
    weights_path: str = Field(min_length=1, max_length=4096)
    is_checkpoint_format: Literal[True] = True


class _RpcBody(Body):
    method: Literal["reload_weights"]
    kwargs: _Reload
    args: tuple[()] = ()
    timeout: float | None = None


class WeightUpdates:
    """Receives weight updates and applies them to the engine.

    Args:
        engine: samples from `decoder`; once the server has started, only the engine's thread uses it.
        chunk_bytes: maximum number of bytes of a file in one request.
        weights_lock: held while the weights of the engine or its runner are replaced.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: StoredDecoder,
        thread: EngineThread,
        chunk_bytes: int,
        weights_lock: asyncio.Lock,
    ) -> None:
        self._engine, self._decoder, self._thread, self._chunk_bytes = engine, decoder, thread, chunk_bytes
        self._folder = tempfile.TemporaryDirectory(prefix="perilune-weights-")
        self._reader = WeightReader()
        with decoder.in_memory():
            state = decoder.state_dict()
            self._reader.set_base(state, engine.version)
        self._tensors = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in state.items()
        }
        self._max_update_bytes = sum(tensor.nbytes for tensor in state.values()) + _UPDATE_OVERHEAD_BYTES
        self._lock, self._weights_lock = asyncio.Lock(), weights_lock

    @property
    def state(self) -> dict[str, Any]:
        """The weights' version and digest, the chunk limit, and dtype and shape of each tensor."""
        versions = {"version": self._reader.version, "digest": self._reader.result}
        return {**versions, "chunk_bytes": self._chunk_bytes, "tensors": self._tensors}

    def received(self, digest: str) -> int:
        """Return the number of bytes that have arrived of the file with this SHA-256."""
        path = self._path(digest)
        return path.stat().st_size if path.exists() else 0

    async def receive(self, digest: str, content_range: str, data: bytes) -> int:
        """Append the next bytes of a file and return the number that have arrived.

        Raises:
            ApiError: when `data` is not the next part, or the complete file has another digest.
        """
        match = _RANGE.fullmatch(content_range)
        first, last, total = map(int, match.groups()) if match else (0, 0, 0)
        if not match or last - first + 1 != len(data) or last >= total:
            raise ApiError(
                400, "Content-Range is missing or does not fit the body: give bytes FIRST-LAST/TOTAL"
            )
        if total > self._max_update_bytes:
            raise ApiError(413, f"an update of this model has at most {self._max_update_bytes:,} bytes")
        async with self._lock:
            return await asyncio.to_thread(self._append, self._path(digest), first, total, data)

    def _append(self, path: Path, first: int, total: int, data: bytes) -> int:
        for other in Path(self._folder.name).iterdir():
            if other != path:
                other.unlink()  # the file of an earlier transfer that was not completed
        has = path.stat().st_size if path.exists() else 0
        if first != has:
            raise ApiError(
                409, f"the next byte is {has}, and the body begins at {first}", code="wrong_offset"
            )
        with path.open("ab") as file:
            file.write(data)
        if has + len(data) == total and sha256_file(path) != path.name:
            path.unlink()
            raise ApiError(422, "the file has another digest than its name; send it again", code="damaged")
        return has + len(data)

    async def apply(self, digest: str) -> dict[str, Any]:
        """Apply the update in a completely received file to the engine.

        Raises:
            RequestError: when the update is malformed, or does not apply to the engine's weights.
        """
        async with self._lock:
            path = self._path(digest)
            if not path.exists() or await asyncio.to_thread(sha256_file, path) != digest:
                raise ApiError(404, "the file has not arrived completely", code="incomplete")
            async with self._weights_lock:
                version, state = await asyncio.to_thread(self._read, path)
                await self._thread.run_between_steps(lambda: self._engine.update_weights(state, version))
                self._reader.commit()
            path.unlink()
        return {"version": self._reader.version, "digest": self._reader.result}

    async def reload(self, folder: Path) -> None:
        """Load the weights of the checkpoint in `folder` into the engine.

        Raises:
            RequestError: when the folder has no checkpoint with tensors of the same names and shapes.
        """
        async with self._lock, self._weights_lock:
            state = await asyncio.to_thread(load_tensors, folder, self._tensors)
            version = self._reader.version + 1
            await self._thread.run_between_steps(lambda: self._engine.update_weights(state, version))
            await asyncio.to_thread(self._reader.set_base, state, version)

    def _read(self, path: Path) -> tuple[int, dict[str, Tensor]]:
        """Read an update; return its version and all tensors after it."""
        with self._decoder.in_memory():
            current = self._decoder.state_dict()
        new = self._reader.read(path, current)
        return self._reader.next_version, current | new

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ApiError(404, "a file is named by its SHA-256 in lower-case hexadecimal digits")
        return Path(self._folder.name) / digest


def reload_routes(updates: WeightUpdates) -> APIRouter:
    """Return the route that loads a checkpoint from a folder."""
    router = APIRouter()

    @router.post("/collective_rpc")
    async def collective_rpc(request: Request) -> dict[str, Any]:
        body = read_body(await request.body(), _RpcBody)
        await updates.reload(Path(body.kwargs.weights_path))
        return {"results": [None]}

    return router


def transfer_routes() -> APIRouter:
    """Return vLLM's routes of transfers between GPUs, which answer 501."""
    router = APIRouter()

    def refuse() -> None:
        raise ApiError(
            501,
            "this server receives no weights over NCCL or CUDA IPC; start it with --weight-updates and "
            "--control, and load a folder with the method reload_weights of POST /collective_rpc, or run "
            "`perilune push`",
            code="unsupported_weight_transfer",
        )

    for path, method in _VLLM_TRANSFERS.items():
        router.add_api_route(path, refuse, methods=[method])
    return router


def weight_routes(updates: WeightUpdates) -> APIRouter:
    router = APIRouter(prefix="/v1/weights")

    @router.get("")
    async def state() -> dict[str, Any]:
        return updates.state

    @router.get("/{digest}")
    async def received(digest: str) -> dict[str, Any]:
        return {"received": updates.received(digest)}

    @router.put("/{digest}")
    async def receive(digest: str, request: Request) -> dict[str, Any]:
        content_range = request.headers.get("content-range", "")
        return {"received": await updates.receive(digest, content_range, await request.body())}

    @router.post("")
    async def apply(request: Request) -> dict[str, Any]:
        return await updates.apply(read_body(await request.body(), _UseBody).file)

    return router
