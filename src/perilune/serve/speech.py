"""Serves a speech model: /v1/audio/speech as in OpenAI's API, the voices, and a page with a player."""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from functools import partial
from importlib.resources import files
from time import perf_counter, time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from prometheus_client import Counter, Histogram
from starlette.responses import Response

from perilune.errors import PeriluneError
from perilune.serve.bodies import read_request
from perilune.serve.engine_thread import EngineThread, Stream
from perilune.serve.errors import unknown_model_error
from perilune.serve.metrics import BUCKETS_S, Metrics
from perilune.serve.model_service import ModelService
from perilune.serve.responses import run_while_connected
from perilune.serve.schema import DEFAULT_VOICE, SpeechBody
from perilune.speech.prompt import AUTO_LANGUAGE, Utterance
from perilune.speech.stream import Samples, SpeechDelta, SpeechTimes
from perilune.speech.synthesis import Speaker

_FACTOR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 5, 10)  # of the real-time factor
_UNKNOWN_SIZE = 0xFFFFFFFF  # size in the header of a WAV stream
_PLAYER = {"/": ("player.html", "text/html"), "/player.js": ("player.js", "text/javascript")} | {
    "/player.css": ("player.css", "text/css")
}
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class SpeechMetrics(Metrics):
    """Metrics of a speech server, by the number of utterances in progress."""

    def __init__(self) -> None:
        super().__init__()
        by_load = partial(Histogram, labelnames=["streams"], registry=self.registry)
        self._first_code = by_load(
            "perilune_speech_first_code_seconds", "Seconds to the talker's first code", buckets=BUCKETS_S
        )
        self._first_audio = by_load(
            "perilune_speech_first_audio_seconds", "Seconds to the first samples", buckets=BUCKETS_S
        )
        self._factor = by_load(
            "perilune_speech_real_time_factor",
            "Seconds to the last sample divided by seconds of speech",
            buckets=_FACTOR_BUCKETS,
        )
        self._underruns = Counter(
            "perilune_speech_underruns",
            "Times at which playback waited for samples",
            ["streams"],
            registry=self.registry,
        )
        self._audio = Counter("perilune_speech_seconds", "Seconds of speech", registry=self.registry)

    def record_utterance(self, times: SpeechTimes) -> None:
        load = str(1 << (times.streams - 1).bit_length())  # number of streams, rounded up to a power of two
        self._first_code.labels(load).observe(times.first_code)
        self._underruns.labels(load).inc(times.underruns)
        if times.audio:
            self._first_audio.labels(load).observe(times.first_audio)
            self._factor.labels(load).observe(times.real_time_factor)
            self._audio.inc(times.audio)


class SpeechService(ModelService):
    """Answers requests with one speech model.

    Args:
        max_streams: maximum number of utterances in progress or waiting; further requests get 429.
    """

    metrics: SpeechMetrics
    open_paths = frozenset(_PLAYER)

    def __init__(self, name: str, speaker: Speaker, max_streams: int) -> None:
        super().__init__(EngineThread(speaker.pipeline), SpeechMetrics(), max_streams)
        self.name, self.speaker = name, speaker

    def gauges(self) -> Mapping[str, float]:
        engine = self.speaker.engine
        return {
            **super().gauges(),
            "speech_streams": self.speaker.open(),
            "samples_running": engine.running,
            "requests_waiting": engine.waiting,
            "cache_use": engine.cache_use,
            "steps": engine.counters.steps,
            "preemptions": engine.counters.preemptions,
        }

    async def speak(self, request: Request) -> Response:
        """Answer POST /v1/audio/speech."""
        began = perf_counter()
        body, size = await read_request(request, SpeechBody, self.lanes)
        if body.model != self.name:
            raise unknown_model_error(body.model, self.name)
        self.check_capacity()

        async def respond() -> Response:
            stream = await run_while_connected(self._begin(body, size), request.receive)
            if not body.stream:
                return await self._respond(stream, body, request, began)
            pieces = self._encode_stream(stream, wav=body.response_format == "wav")
            return self.stream(pieces, partial(self._close, stream, began), f"audio/{body.response_format}")

        return await self.count_answering(respond())

    async def _begin(self, body: SpeechBody, size: int) -> Stream:
        """Embed the text and submit it to the talker."""
        self.entering += 1
        try:
            voice = None if body.voice == DEFAULT_VOICE else body.voice
            utterance = Utterance(
                body.input,
                voice,
                body.language,
                body.instructions,
                streamed_text=not body.non_streaming_mode,
            )
            seed = body.seed if body.seed is not None else int(np.random.default_rng().integers(2**63))
            request = await self.lanes.short_or_long(size, lambda: self.speaker.request(utterance, seed))
            return await self.thread.submit([request], per_token=True)
        finally:
            self.entering -= 1

    async def _respond(self, stream: Stream, body: SpeechBody, request: Request, began: float) -> Response:
        try:
            samples = await run_while_connected(self._collect(stream), request.receive)
        finally:
            self._close(stream, began)
        data = b"".join(map(encode_pcm, samples))
        if body.response_format == "pcm":
            headers = {"X-Sample-Rate": str(self.speaker.config.codec.sample_rate)}
            return Response(data, media_type="audio/pcm", headers=headers)
        return Response(self._header(len(data)) + data, media_type="audio/wav")

    async def _collect(self, stream: Stream) -> list[Samples]:
        return [part async for part in self._samples(stream)]

    async def _samples(self, stream: Stream) -> AsyncIterator[Samples]:
        while deltas := await stream.next_deltas():
            for _, delta in deltas:
                assert isinstance(delta, SpeechDelta)
                if delta.times is not None:
                    self.metrics.record_utterance(delta.times)
                for part in delta.audio:
                    yield part

    async def _encode_stream(self, stream: Stream, *, wav: bool) -> AsyncIterator[bytes]:
        if wav:
            yield self._header(None)
        try:
            async for part in self._samples(stream):
                yield encode_pcm(part)
        except PeriluneError as error:
            # The status has been sent. A dropped connection tells the client that samples are missing.
            raise ConnectionAbortedError(error.what) from None

    def _close(self, stream: Stream, began: float) -> None:
        stream.abort()
        self.metrics.record_finished(began, prompt=len(stream.requests[0].token_ids), completion=0, cached=0)

    def _header(self, size: int | None) -> bytes:
        return wav_header(self.speaker.config.codec.sample_rate, size)

    def voices(self) -> dict[str, Any]:
        """Return the values that requests can give as `voice` and `language`."""
        config = self.speaker.config
        spoken = [name for name in config.languages if "dialect" not in name]
        return {
            "model": self.name,
            "voices": [DEFAULT_VOICE, *config.speakers],
            "languages": [AUTO_LANGUAGE, *spoken],
            "sample_rate": config.codec.sample_rate,
        }


def speech_routes(service: SpeechService) -> APIRouter:
    router = APIRouter()
    started = int(time())
    router.post("/v1/audio/speech", response_model=None)(service.speak)

    @router.get("/v1/audio/voices")
    async def voices() -> dict[str, Any]:
        return service.voices()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": service.name, "object": "model", "created": started, "owned_by": "perilune"}
        return {"object": "list", "data": [card]}

    for path, (name, kind) in _PLAYER.items():
        router.get(path, response_model=None)(partial(_asset, name, kind))
    return router


async def _asset(name: str, kind: str) -> Response:
    data = await asyncio.to_thread((files("perilune.serve") / "player" / name).read_bytes)
    headers = {
        "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(data, media_type=kind, headers=headers)


def encode_pcm(samples: Samples) -> bytes:
    """Encode samples as 16-bit little-endian integers."""
    return (samples * 32767).round().astype("<i2").tobytes()


def wav_header(rate: int, size: int | None) -> bytes:
    """Return the header of a mono WAV file with `size` bytes of 16-bit samples; None if unknown yet."""
    riff_size, data = (_UNKNOWN_SIZE, _UNKNOWN_SIZE) if size is None else (36 + size, size)
    shape = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE") + shape + struct.pack("<4sI", b"data", data)
