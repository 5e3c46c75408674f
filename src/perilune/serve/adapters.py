"""LoRA adapters that a running server loads and unloads, as in vLLM.

    POST /v1/load_lora_adapter     {"lora_name": NAME, "lora_path": FOLDER, "load_inplace": false}
    POST /v1/unload_lora_adapter   {"lora_name": NAME}

Clients can load only folders inside one folder of the server. The server answers requests while it reads and
checks an adapter. A request keeps the adapter that had its name when the request arrived.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import StringConstraints
from starlette.responses import PlainTextResponse

from perilune.engine.engine import Engine
from perilune.files import open_inside
from perilune.models.adapters.files import Adapter
from perilune.serve.bodies import Body, read_body
from perilune.serve.engine_thread import EngineThread
from perilune.serve.errors import ApiError, shorten

MAX_ADAPTERS = 64
_MAX_BYTES = 1 << 30  # of the tensors of an adapter
_MAX_JSON_BYTES = 1 << 20  # of its other files; the JSON parser blocks all other threads

_Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\w./:@+-]+$")]


class _LoadBody(Body):
    lora_name: _Name
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    load_inplace: bool = False


class _UnloadBody(Body):
    lora_name: _Name
    lora_int_id: int | None = None  # vLLM ignores it too


class AdapterLoader:
    """Loads adapters into an engine.

    Args:
        engine: once the server has started, only the engine's thread uses it.
        base: name of the model, which adapters may not use.
        loaded: the folders of the loaded adapters by name, which this object updates.
        root: folder with the adapters that may be loaded.
        weights_lock: held while the weights of the engine or its runner are replaced.
    """

    def __init__(  # noqa: PLR0917
        self,
        engine: Engine,
        thread: EngineThread,
        base: str,
        loaded: dict[str, Path],
        root: Path,
        weights_lock: asyncio.Lock,
    ) -> None:
        self._engine, self._thread, self._weights_lock = engine, thread, weights_lock
        self._base, self._loaded, self._root = base, loaded, root.resolve()

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Load the adapter in folder `path`, relative to the root.

        Raises:
            ApiError: when the name is taken, there are too many adapters, or the folder is not in the root.
            RequestError: when the folder has no valid adapter for the model.
        """
        async with self._weights_lock:
            if name == self._base:
                raise ApiError(400, f"{name!r} is the name of the model", param="lora_name")
            if name in self._loaded and not replace:
                message = f"The lora adapter {name!r} has already been loaded; set load_inplace to replace it"
                raise ApiError(400, message, param="lora_name", code="adapter_loaded")
            if len(self._loaded) >= MAX_ADAPTERS and name not in self._loaded:
                raise ApiError(400, f"the server has {MAX_ADAPTERS} adapters; unload one first")
            folder, adapter = await asyncio.to_thread(self._read, path)
            add = lambda: self._engine.add_adapter(name, adapter, checked=True)  # noqa: E731
            await self._thread.run_between_steps(add)
            self._loaded[name] = folder

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests in flight still finish with it.

        Raises:
            ApiError: 404, when no adapter has this name.
        """
        async with self._weights_lock:
            if name not in self._loaded:
                message = f"The lora adapter {shorten(name)!r} cannot be found."
                raise ApiError(404, message, param="lora_name", code="model_not_found")
            del self._loaded[name]
            await self._thread.run_between_steps(lambda: self._engine.remove_adapter(name))

    def _read(self, path: str) -> tuple[Path, Adapter]:
        """Read the adapter in a folder, and check it against the model."""
        folder = self._resolve(self._root / path)
        if not folder.is_dir():
            raise ApiError(400, f"{shorten(path)!r} is not a folder", param="lora_path")
        adapter = Adapter.read(folder, self._read_file)
        self._engine.check_adapter(adapter)
        return folder, adapter

    def _read_file(self, file: Path) -> bytes | None:
        """Read a file of an adapter; None if it is missing."""
        if not os.path.lexists(file):
            return None
        limit = _MAX_BYTES if file.suffix == ".safetensors" else _MAX_JSON_BYTES
        try:
            with open_inside(self._root, self._resolve(file)) as opened:
                data = opened.read(limit + 1)
        except OSError as error:
            message = f"cannot read {file.name}: {error.strerror}"
            raise ApiError(400, message, param="lora_path") from None
        if len(data) > limit:
            raise ApiError(400, f"{file.name} has more than {limit:,} bytes", param="lora_path")
        return data

    def _resolve(self, path: Path) -> Path:
        """Resolve the symbolic links of `path`, which must be in the root."""
        try:
            real = path.resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # missing, too long, a zero byte, a loop of links
            real = None
        if real is None or not real.is_relative_to(self._root):
            raise ApiError(
                400, f"no adapter {shorten(path.name)!r} in the folder of adapters", param="lora_path"
            )
        return real


def adapter_routes(loader: AdapterLoader) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/load_lora_adapter", response_model=None)
    async def load(request: Request) -> PlainTextResponse:
        body = read_body(await request.body(), _LoadBody)
        await loader.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", response_model=None)
    async def unload(request: Request) -> PlainTextResponse:
        body = read_body(await request.body(), _UnloadBody)
        await loader.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
