"""From a checkpoint to a server that answers, and to its orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from perilune.engine.engine import Engine
from perilune.errors import RequestError, WorkFailedError
from perilune.models.adapters.files import Adapter
from perilune.models.transformers_model import TransformersModel, load_for_inference
from perilune.serve.app import make_app
from perilune.serve.connection import ConnectionLimits, protocol_for
from perilune.serve.engine_thread import EngineThread
from perilune.serve.guard import BodyLimits
from perilune.serve.service import ServedModel, Service

SHORTEST_TOKEN = 16  # characters; shorter ones can be guessed
_BACKLOG = 2048  # connections that the kernel holds, and asyncio accepts, at a time
_DESCRIPTORS = 16_384  # asked for; the system may allow fewer
_RESERVED_DESCRIPTORS = 256  # for files, pipes and processes
_MOST_CONNECTIONS = 4096
_HEAD_SECONDS = 10.0  # for the headers of a request to come
_LAST_WORDS = 5  # seconds for aborted answers to be sent


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        checkpoint: Hugging Face folder.
        name: by which requests ask for the model.
        token_env: name of the environment variable that holds the token; "" for none.
        slots: most samples in flight.
        max_queue: most samples that wait beside them.
        cache_tokens: room for keys and values, in tokens of all samples together; 0 for the engine's default.
        max_body: bytes of a request's body.
        drain: seconds that answers have to be finished in once the server is told to end.
        stalled: seconds after which a client that takes or sends nothing is given up.
        max_connections: most at a time; None for as many as descriptors allow, 4096 at most.
        adapters: folders of LoRA adapters, as PEFT writes them, by the names that requests ask for them by.
    """

    checkpoint: Path
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    token_env: str = ""
    slots: int = 64
    max_queue: int = 256
    cache_tokens: int = 0
    max_body: int = 4 << 20
    device: str = "auto"
    dtype: str = "float32"
    drain: float = 30.0
    stalled: float = 60.0
    max_connections: int | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)


def serve(
    settings: Settings, announce: Callable[[str], None], notify: Callable[[str], None] = lambda notice: None
) -> None:
    """Serve until the process is told to end; then finish what is being answered.

    `announce` is called with the server's URL once it answers, `notify` with what is worth knowing before.

    Raises:
        RequestError: when the checkpoint cannot be used, the address is not free, or others than this machine
            could ask without a token.
        WorkFailedError: when the engine fails.
    """
    token = _token(settings)
    with _listening(settings.host, settings.port) as listener:
        service = _service(settings, notify)
        server = _Server(service, settings, token, lambda: announce(_url(listener)))
        server.run(sockets=[listener])
    if service.thread.failure is not None:
        raise WorkFailedError(f"the engine failed: {service.thread.failure}", where=str(settings.checkpoint))


def _service(settings: Settings, notify: Callable[[str], None]) -> Service:
    """Read the checkpoint and make everything that answers with it."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    loaded, tokenizer = load_for_inference(settings.checkpoint, _device(settings.device), dtype)
    if isinstance(loaded, TransformersModel):
        notify(loaded.notice)
    config = loaded.config
    engine = Engine(
        loaded, slots=settings.slots, cache_tokens=settings.cache_tokens or None, tokenizer=tokenizer
    )
    for name, folder in settings.adapters.items():
        if name == settings.name:
            raise RequestError(f"{name!r} is the model's own name", where="--adapter", remedy="give another")
        engine.add_adapter(name, Adapter.load(folder))
    ends = (*config.eos_token_ids, tokenizer.eos_token_id)
    model = ServedModel(
        name=settings.name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        context=engine.positions,
        end_tokens=tuple(end for end in dict.fromkeys(ends) if end < config.vocab_size),
        adapters=tuple(settings.adapters),
    )

    def figures() -> dict[str, float]:
        return {
            "samples_running": engine.running,
            "requests_waiting": engine.waiting,
            "cache_use": engine.cache_use,
            "steps": engine.counters.steps,
            "preemptions": engine.counters.preemptions,
        }

    return Service(model, EngineThread(engine), settings.slots + settings.max_queue, figures)


def _device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RequestError("device cuda is asked for and this machine has none", remedy="perilune doctor")
    return "cuda" if available and wanted != "cpu" else "cpu"


class _Server(uvicorn.Server):
    """uvicorn, with an end in two parts: no new work but all that was begun, then the connections."""

    def __init__(
        self, service: Service, settings: Settings, token: str | None, announce: Callable[[], None]
    ) -> None:
        bodies = BodyLimits(settings.max_body, min(BodyLimits.seconds, settings.stalled))
        app = make_app(service, token=token, bodies=bodies)
        backlog, connections = _room_for_connections()
        limits = ConnectionLimits(
            most=min(settings.max_connections or _MOST_CONNECTIONS, connections),
            head_seconds=min(_HEAD_SECONDS, settings.stalled),
            stalled=settings.stalled,
            request_bytes=2 * bodies.discarded,
        )
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, backlog=backlog,
                timeout_graceful_shutdown=_LAST_WORDS,
                http=protocol_for(limits, service.metrics.stalled),
            )
        )  # fmt: skip
        self._service, self._drain, self._announce = service, settings.drain, announce
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        service.thread.on_failure = lambda error: setattr(self, "should_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and say so."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers be finished, the second does not."""
        if self._service.draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._service.draining = True
        self._draining = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain
        while self._service.answering and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._service.abort_all("the server was shut down")
        self.should_exit = True


def _room_for_connections() -> tuple[int, int]:
    """How many connections may wait to be accepted, and how many there may be beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    # asyncio accepts a whole backlog before it looks at the first of them.
    backlog = min(_BACKLOG, soft // 4)
    return backlog, max(soft - backlog - _RESERVED_DESCRIPTORS, 1)


def _token(settings: Settings) -> str | None:
    """The token that requests must bear.

    Raises:
        RequestError: when it is named and not set, or too short; or when there is none and others could ask.
    """
    if not settings.token_env:
        if not _is_loopback(settings.host):
            raise RequestError(
                f"on {settings.host} others than this machine can ask, and no token is named",
                where="--host",
                remedy="export PERILUNE_TOKEN=$(openssl rand -hex 24), then --token-env PERILUNE_TOKEN",
            )
        return None
    token = os.environ.get(settings.token_env, "")
    if len(token) < SHORTEST_TOKEN:
        found = "is not set" if not token else f"has {len(token)} characters, fewer than {SHORTEST_TOKEN}"
        raise RequestError(f"{settings.token_env} {found}", where="--token-env")
    return token


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, whatever addresses it stands for."""
    addresses = _addresses(host, 0)
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in addresses)


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # type: ignore[return-value]
    except OSError as error:
        raise RequestError(
            f"{host!r} is no address of this machine: {error.strerror}", where="--host"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    """A socket bound to the address; bound before the model is read, so that a taken port is known at once.

    Raises:
        RequestError: when it is not free.
    """
    family, _, _, _, address = _addresses(host, port)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror}", where="--port",
            remedy="give another port; 0 takes a free one",
        ) from None  # fmt: skip
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
