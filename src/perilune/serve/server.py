"""Starts the server for a checkpoint, and shuts it down gracefully."""

import asyncio
import gc
import resource
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import APIRouter

from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadSettings
from perilune.engine.openvino_runner import OpenVino
from perilune.engine.select_runner import fastest_runner
from perilune.engine.speculation import SpeculationSettings
from perilune.errors import RequestError, WorkFailedError
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.stored import StoredDecoder
from perilune.models.decoder import Decoder
from perilune.models.transformers_model import TransformersModel, load_for_inference
from perilune.serve.adapters import AdapterLoader, adapter_routes
from perilune.serve.address import bind_socket, load_token, server_url
from perilune.serve.app import make_app, text_routes
from perilune.serve.connection import ConnectionLimits, make_protocol
from perilune.serve.control import Control, control_routes
from perilune.serve.embeddings import Embeddings, embedding_routes
from perilune.serve.engine_thread import EngineThread
from perilune.serve.guard import BodyLimits
from perilune.serve.model import ServedModel, visible_marks
from perilune.serve.model_service import ModelService
from perilune.serve.response_routes import Conversations, response_routes
from perilune.serve.service import Service
from perilune.serve.settings import Settings
from perilune.serve.speech import SpeechService, speech_routes
from perilune.serve.tool_formats import FORMATS, detect_format
from perilune.serve.tracing import SpanWriter
from perilune.serve.weights import (
    MAX_CHUNK_BYTES,
    WeightUpdates,
    reload_routes,
    transfer_routes,
    weight_routes,
)
from perilune.speech.folder import is_speech_folder, load_speech_model
from perilune.speech.synthesis import Speaker

_SCORE_TOKENS = 512  # tokens of echoed prompts that are scored between two steps of the engine
_BACKLOG = 2048  # connections that may wait to be accepted
_DESCRIPTORS = 16_384  # requested number of file descriptors; the system may allow fewer
_RESERVED_DESCRIPTORS = 256  # for files, pipes and processes
_MAX_CONNECTIONS = 4096
_HEADER_TIMEOUT_S = 10.0  # to receive the headers of a request
_CLOSE_TIMEOUT_S = 5  # to send the ends of aborted answers


def serve(
    settings: Settings, announce: Callable[[str], None], notify: Callable[[str], None] = lambda notice: None
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish open requests.

    `announce` is called with the URL once the server answers, and `notify` with notices about the model.

    Raises:
        RequestError: when the checkpoint cannot be used, the address is not free, or the server would listen
            on a public address without a token.
        WorkFailedError: when the engine fails.
    """
    token = load_token(settings.host, settings.token_env)
    with bind_socket(settings.host, settings.port) as listener:
        spoken = is_speech_folder(settings.checkpoint)
        service: ModelService
        service, routers = _make_speech_service(settings) if spoken else _make_service(settings, notify)
        gc.collect()
        gc.freeze()  # later collections, which delay every request, skip permanent objects
        server = _Server(service, routers, settings, token, lambda: announce(f"{server_url(listener)}/v1"))
        server.run(sockets=[listener])
    if service.thread.failure is not None:
        raise WorkFailedError(f"the engine failed: {service.thread.failure}", where=str(settings.checkpoint))


def _make_service(settings: Settings, notify: Callable[[str], None]) -> tuple[Service, list[APIRouter]]:
    """Load the checkpoint; create the engine and the service, and the routes that the settings enable."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    loaded, tokenizer = load_for_inference(settings.checkpoint, _select_device(settings), dtype)
    if isinstance(loaded, TransformersModel):
        notify(loaded.notice)
    template = tokenizer.chat_template
    calls = (
        detect_format(None if template is None else template.source)
        if settings.tool_format == "auto"
        else FORMATS[settings.tool_format]
    )
    tokenizer = tokenizer.showing(visible_marks(calls, reasoning=settings.reasoning))
    config = loaded.config
    engine = Engine(
        loaded,
        slots=settings.slots,
        cache_tokens=settings.cache_tokens or None,
        score_tokens=_SCORE_TOKENS,
        tokenizer=tokenizer,
        runner=_openvino_settings(settings) or fastest_runner,
    )
    engine.limit_tokens(tokenizer.vocab_size)
    if settings.offload_memory or settings.offload_disk:
        memory, disk = round(settings.offload_memory * 2**30), round(settings.offload_disk * 2**30)
        engine.offload(OffloadSettings(memory, disk))
    _enable_speculation(engine, settings, dtype)
    for name, folder in settings.adapter_folders.items():
        if name == settings.name:
            raise RequestError(
                f"{name!r} is the name of the model", where="--adapter", remedy="use another name"
            )
        engine.add_adapter(name, Adapter.load(folder))
    ends = (*config.eos_token_ids, tokenizer.eos_token_id)
    model = ServedModel(
        name=settings.name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        context=engine.positions,
        end_tokens=tuple(end for end in dict.fromkeys(ends) if end < config.vocab_size),
        adapters=settings.adapter_folders,
        reasoning=settings.reasoning,
        tool_format=calls,
    )
    max_samples, gauges = settings.slots + settings.max_queue, partial(_engine_gauges, engine)
    service = Service(model, EngineThread(engine), engine.prompt_logprobs, max_samples, gauges)
    routers = [text_routes(service), response_routes(service, Conversations()), transfer_routes()]
    return service, [*routers, *_make_optional_routes(settings, engine, loaded, service)]


def _engine_gauges(engine: Engine) -> dict[str, float]:
    """Return the engine's values for /metrics."""
    return {
        "samples_running": engine.running,
        "requests_waiting": engine.waiting,
        "cache_use": engine.cache_use,
        "steps": engine.counters.steps,
        "preemptions": engine.counters.preemptions,
        "cached_tokens": engine.counters.cached_tokens,
        "computed_prompt_tokens": engine.counters.prompt_tokens,
        "sampled_tokens": engine.counters.sampled_tokens,
        "proposed_tokens": engine.counters.proposed_tokens,
        "accepted_tokens": engine.counters.accepted_tokens,
        "offload_loaded_memory_blocks": engine.offloaded.loaded_from_memory,
        "offload_loaded_disk_blocks": engine.offloaded.loaded_from_disk,
        "offload_refused_blocks": engine.offloaded.refused,
        "offload_corrupt_blocks": engine.offloaded.corrupt,
        "offload_disk_failures": engine.offloaded.disk_failures,
    }


def _make_speech_service(settings: Settings) -> tuple[SpeechService, list[APIRouter]]:
    """Load the speech model in the checkpoint, and create its service and routes."""
    unsupported = {
        "--dtype": settings.dtype != "float32",
        "--adapter": settings.adapters,
        "--adapters-from": settings.adapters_from,
        "--offload-memory": settings.offload_memory or settings.offload_disk,
        "--weight-updates": settings.weight_updates,
        "--control": settings.control,
        "--speculate": settings.speculate not in {"auto", "off"},
        "--draft": settings.draft,
        "--embeddings": settings.embeddings != "off",
        "--reasoning": settings.reasoning,
        "--tool-format": settings.tool_format != "auto",
    }
    option = next((option for option, value in unsupported.items() if value), None)
    if option is not None:
        raise RequestError("does not apply to a speech model", where=option, remedy="leave it out")
    model = load_speech_model(settings.checkpoint).to(_select_device(settings))
    speaker = Speaker(
        model,
        slots=settings.slots,
        cache_tokens=settings.cache_tokens or None,
        openvino=_openvino_settings(settings),
    )
    speaker.warm_up()
    service = SpeechService(settings.name, speaker, settings.slots + settings.max_queue)
    return service, [speech_routes(service)]


def _enable_speculation(engine: Engine, settings: Settings, dtype: torch.dtype) -> None:
    if settings.draft and settings.speculate != "draft":
        raise RequestError("--draft needs --speculate draft", where="--draft")
    if settings.speculate == "draft":
        draft = None
        if settings.draft:
            loaded, _ = load_for_inference(Path(settings.draft), _select_device(settings), dtype)
            if not isinstance(loaded, Decoder):
                raise RequestError(
                    "a draft must be a model that Perilune computes itself", where=settings.draft
                )
            draft = loaded
        engine.speculate(SpeculationSettings("draft", draft=draft))
    elif settings.speculate == "lookup" or (settings.speculate == "auto" and engine.speculates_exactly):
        engine.speculate(SpeculationSettings("lookup"))


def _make_optional_routes(
    settings: Settings, engine: Engine, loaded: Decoder | TransformersModel, service: Service
) -> list[APIRouter]:
    routers, weights_lock = [], asyncio.Lock()
    if settings.weight_updates:
        if not isinstance(loaded, StoredDecoder) or settings.adapters or settings.adapters_from:
            raise RequestError(
                "only a model that Perilune computes itself, served without adapters, can get new weights",
                where="--weight-updates",
                remedy="leave out --weight-updates, or --adapter and --adapters-from",
            )
        chunk = min(_body_bytes(settings), MAX_CHUNK_BYTES)
        updates = WeightUpdates(engine, loaded, service.thread, chunk, weights_lock)
        routers.append(weight_routes(updates))
        if settings.control:  # clients may then name any folder of this machine
            routers.append(reload_routes(updates))
    if settings.adapters_from is not None:
        if not settings.adapters_from.is_dir():
            raise RequestError(f"there is no folder {settings.adapters_from}", where="--adapters-from")
        engine.prepare_adapters()  # now, because it may take seconds
        model = service.model
        loads = AdapterLoader(
            engine, service.thread, model.name, model.adapters, settings.adapters_from, weights_lock
        )
        routers.append(adapter_routes(loads))
    if settings.embeddings != "off":
        if not isinstance(loaded, Decoder):
            raise RequestError(
                "transformers computes this model, and embeddings need Perilune's own decoder",
                where="--embeddings",
                remedy="leave out --embeddings, or serve another model",
            )
        engine.prepare_embeddings()  # now, because it may take seconds
        embeddings = Embeddings(service, engine, loaded.config.hidden_size, settings.embeddings)
        routers.append(embedding_routes(embeddings))
    if settings.control:
        routers.append(control_routes(Control(engine, service.thread, service.gate, weights_lock)))
    return routers


def _select_device(settings: Settings) -> str:
    if settings.backend == "openvino":
        return "cpu"  # OpenVINO copies the weights to its own device
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise RequestError(
            "device cuda was requested, but this machine has no CUDA device", remedy="perilune doctor"
        )
    return "cuda" if available and settings.device != "cpu" else "cpu"


def _openvino_settings(settings: Settings) -> OpenVino | None:
    if settings.backend == "native":
        return None
    return OpenVino(settings.device.upper(), settings.weights, settings.kv_cache, precision=settings.dtype)


def _body_bytes(settings: Settings) -> int:
    return round(settings.max_body * 2**20)


class _Server(uvicorn.Server):
    """A uvicorn server whose shutdown first finishes open requests and then closes connections."""

    def __init__(
        self,
        service: ModelService,
        routers: Sequence[APIRouter],
        settings: Settings,
        token: str | None,
        announce: Callable[[], None],
    ) -> None:
        bodies = BodyLimits(_body_bytes(settings), min(BodyLimits.seconds, settings.stall))
        app = make_app(
            service, token=token, bodies=bodies, routers=routers, spans=_open_spans(settings.traces)
        )
        backlog, connections = _connection_limits()
        limits = ConnectionLimits(
            max_connections=min(settings.max_connections or _MAX_CONNECTIONS, connections),
            head_seconds=min(_HEADER_TIMEOUT_S, settings.stall),
            stall_seconds=settings.stall,
            request_bytes=2 * bodies.max_discarded_bytes,
        )
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=backlog,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                http=make_protocol(limits, service.metrics.stalls.inc),
            )
        )
        self._service, self._drain, self._announce = service, settings.drain, announce
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        service.thread.on_failure = lambda error: setattr(self, "should_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, and announce the URL."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish open requests at the first signal, abort them at the second, and exit at the third."""
        if self._loop is None or self.should_exit:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._abort if self._service.draining else self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        self._service.draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        now, thread = asyncio.get_running_loop().time, self._service.thread
        deadline = now() + self._drain
        # A paused server can no longer be resumed, so its requests would never finish.
        while self._service.answering and not thread.paused and now() < deadline:
            await asyncio.sleep(0.05)
        self._abort()

    def _abort(self) -> None:
        self._service.abort_all("the server was shut down")
        self.should_exit = True


def _open_spans(path: Path | None) -> SpanWriter | None:
    try:
        return None if path is None else SpanWriter(path)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}", where="--traces") from None


def _connection_limits() -> tuple[int, int]:
    """Return the number of connections that may wait to be accepted, and of those that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    # asyncio accepts a whole backlog of connections before it serves the first of them.
    backlog = min(_BACKLOG, soft // 4)
    return backlog, max(soft - backlog - _RESERVED_DESCRIPTORS, 1)
