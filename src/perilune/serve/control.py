"""Pausing, sleeping and the prefix cache: the endpoints of vLLM's development mode.

    POST /pause?mode=abort|wait|keep          GET /is_paused
    POST /resume
    POST /sleep?level=1|2&mode=abort|wait|keep   GET /is_sleeping
    POST /wake_up?tags=weights&tags=kv_cache
    POST /reset_prefix_cache?reset_running_requests=true

`abort` ends the requests in flight with status 503, `wait` lets them finish, and `keep` continues them
after /resume. New requests wait while the server is paused, and get status 503 while the model sleeps.
"""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from perilune.engine.engine import Engine
from perilune.serve.engine_thread import EngineThread
from perilune.serve.errors import ApiError
from perilune.serve.gate import Gate

Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]

_POLL_INTERVAL_S = 0.01  # seconds


class Control:
    """Pauses and resumes the engine, and frees its memory.

    Args:
        engine: once the server has started, only the engine's thread uses it.
        weights_lock: held while the weights of the engine or its runner are replaced.
    """

    def __init__(self, engine: Engine, thread: EngineThread, gate: Gate, weights_lock: asyncio.Lock) -> None:
        self._engine, self._thread, self.gate, self._weights_lock = engine, thread, gate, weights_lock

    async def pause(self, mode: Mode, *, clear_cache: bool = True) -> None:
        """Stop computing steps and make new requests wait. A sleeping model stays asleep."""
        if mode == "abort":
            self._thread.abort_all("the server was paused")
        if self.gate.sleeping:
            return
        self.gate.close()
        if mode == "wait":  # also finish requests that an earlier pause with "keep" has stopped
            await self._unpause()
        while mode == "wait" and self._thread.num_open_samples:
            await asyncio.sleep(_POLL_INTERVAL_S)
            if not self.gate.closed:  # resumed meanwhile
                return

        def stop() -> None:
            self._thread.paused = True
            if mode != "keep" and clear_cache:
                self._engine.reset_prefix_cache()

        await self._thread.run_between_steps(stop)

    async def resume(self) -> None:
        """End a pause.

        Raises:
            ApiError: 409, when the model sleeps.
        """
        if self.gate.sleeping:
            raise ApiError(409, "the model sleeps; wake it up with POST /wake_up", code="sleeping")
        await self._unpause()
        self.gate.open()

    async def _unpause(self) -> None:
        await self._thread.run_between_steps(lambda: setattr(self._thread, "paused", False))

    async def sleep(self, mode: Mode) -> None:
        """Pause, and free the cache and the engine's copy of the weights."""
        async with self._weights_lock:
            if self.gate.sleeping:
                return
            await self.pause(mode)
            if not self.gate.closed:
                raise ApiError(409, "the server was resumed before it could sleep", code="resumed")
            self.gate.sleeping.update(("weights", "kv_cache"))
            self.gate.open()  # refuses the requests that waited

            def fall_asleep() -> None:
                self._thread.paused = True  # a concurrent pause with "wait" may have reset it
                self._engine.sleep()

            try:
                await self._thread.run_between_steps(fall_asleep)
            except BaseException:
                self.gate.sleeping.clear()
                self.gate.close()
                raise

    async def wake_up(self, tags: set[Tag]) -> None:
        """Wake up parts of the model. The server resumes once all parts are awake."""
        async with self._weights_lock:
            if not self.gate.sleeping:
                return
            if self.gate.sleeping <= tags:
                await self._thread.run_between_steps(self._engine.wake_up)
            self.gate.sleeping -= tags
            if not self.gate.sleeping:
                await self.resume()

    async def reset_prefix_cache(self, *, recompute: bool) -> None:
        """Empty the prefix cache; `recompute` also recomputes the cached tokens of samples in flight."""
        await self._thread.run_between_steps(lambda: self._engine.reset_prefix_cache(recompute=recompute))


def control_routes(control: Control) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, str]:
        await control.pause(mode, clear_cache=clear_cache)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await control.resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": control.gate.closed or bool(control.gate.sleeping)}

    @router.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "abort") -> Response:
        # Both levels free the engine's copy of the weights. The decoder's weights remain: on disk, or in
        # memory if a weight update has replaced them.
        await control.sleep(mode)
        return Response()

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[Tag], Query()] = ["weights", "kv_cache"]) -> Response:  # noqa: B006
        await control.wake_up(set(tags))
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": bool(control.gate.sleeping)}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        await control.reset_prefix_cache(recompute=reset_running_requests)
        return Response()

    return router
