"""The three stages of speech: talker, code predictor, codec decoder. Each batches all utterances."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.engine.random import uniforms
from perilune.engine.request import Request
from perilune.engine.runner import TorchRunner
from perilune.engine.step import StepBatch
from perilune.models.attention import AttentionLayer, attend, round_up_columns
from perilune.models.decoder import Decoder
from perilune.speech.config import CodecConfig, SpeechConfig
from perilune.speech.pipeline import Stage
from perilune.speech.sampling import SpeechSampling, sample_codes
from perilune.speech.stream import FrameInputs, SpeechDelta, SpeechStream, SpeechTimes
from perilune.speech.streaming import CodecState
from perilune.speech.talker import Talker

Clock = Callable[[], float]
NextLogits = Callable[[Tensor, int], Tensor]
"""Logits float[B, codes] of a code, given its number, from inputs float[B, N, d] of N new positions."""

_MAX_DECODER_BATCH = 64  # utterances in a batch of the codec decoder


class Codec(Protocol):
    """The codec decoder, or a graph of it."""

    @property
    def config(self) -> CodecConfig: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, codes: Tensor, state: CodecState) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Numbers of frames that are decoded together.

    Attributes:
        first: sizes of the first chunks of an utterance. A small first chunk starts playback early. The next
            chunks may be larger, because the previous ones are still playing.
        later: size of all other chunks.
    """

    first: tuple[int, ...] = (2, 3, 4, 6, 8)
    later: int = 12

    def of(self, chunk: int) -> int:
        """Return the number of frames of chunk number `chunk`."""
        return self.first[chunk] if chunk < len(self.first) else self.later


@dataclass(slots=True, eq=False)
class Frame:
    """The first code of a frame; None after the last frame."""

    stream: SpeechStream
    first: int | None


class TalkerRunner(TorchRunner):
    """Computes the talker, and masks all tokens other than codes and the end token."""

    def __init__(self, talker: Talker, decoder: Decoder, num_blocks: Sequence[int]) -> None:
        super().__init__(decoder, num_blocks)
        self._forbidden = forbidden_tokens(talker.config).to(self._device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        return super().run(batch).masked_fill_(self._forbidden, -torch.inf)


def forbidden_tokens(config: SpeechConfig) -> Tensor:
    """bool[V], true for the tokens that the talker must not draw."""
    tokens = torch.arange(config.talker.vocab_size)
    return (tokens >= config.codec.codebook_size) & (tokens != config.marks.eos)


class TalkerStage(Stage[SpeechStream]):
    """Draws the first code of each utterance's next frame, on the engine.

    The queue has the utterances that have not ended. The engine forms the batch: it admits utterances,
    prefills them in chunks, and decodes all running ones.

    Attributes:
        open: returns the number of utterances in progress, for `SpeechTimes.streams`.
    """

    def __init__(self, engine: Engine, codec: Codec, clock: Clock) -> None:
        super().__init__()
        self._engine, self._codec, self._clock = engine, codec, clock
        self.open: Callable[[], int] = lambda: len(self.queue)

    def deadline(self) -> float | None:
        seconds = self._codec.config.frame_seconds
        return min((item.heard + len(item.frames) * seconds for item in self.queue.values()), default=None)

    def feed(self, items: Sequence[tuple[int, Request]]) -> None:
        for request_id, request in items:
            assert isinstance(request.inputs, FrameInputs)
            now, times = self._clock(), SpeechTimes(self.open() + 1)
            state = CodecState.start(1, self._codec.device)
            self.queue[request_id] = SpeechStream(request_id, request, request.inputs, now, now, times, state)

    def step(self) -> list[Frame]:
        frames = []
        for delta in self._engine.step():
            stream = self.queue[delta.request_id]
            stream.failure, stream.finish_reason = delta.failure, delta.finish_reason
            if _has_ended(stream):
                del self.queue[delta.request_id]
            has_code = stream.failure is None and delta.finish_reason != "stop"  # the end token is no code
            frames.append(Frame(stream, delta.token_ids[0] if has_code else None))
            if not stream.times.first_code:
                stream.times.first_code = self._clock() - stream.arrived
        return frames


class PredictorStage(Stage[Frame]):
    """Draws the other codes of each frame, one code of all frames at a time.

    Frames are due at once, because the talker needs them for its next step.

    Args:
        begin: returns the computation of a batch of B frames.
    """

    def __init__(self, talker: Talker, begin: Callable[[int], NextLogits], sampling: SpeechSampling) -> None:
        super().__init__()
        self._talker, self._begin, self._sampling = talker, begin, sampling

    def deadline(self) -> float | None:
        return float("-inf") if self.queue else None

    def feed(self, items: Sequence[Frame]) -> None:
        self.queue.update((frame.stream.id, frame) for frame in items)

    def step(self) -> list[SpeechStream]:
        frames = list(self.queue.values())
        self.clear()
        begun = [frame for frame in frames if frame.first is not None]
        if begun:
            codes = self._complete(begun)
            for frame, row, embedded in zip(begun, codes, self._talker.embed_frames(codes), strict=True):
                frame.stream.frames.append(row)
                frame.stream.inputs.add(embedded)
        return [frame.stream for frame in frames]

    def _complete(self, frames: Sequence[Frame]) -> Tensor:
        """Return the codes int64[B, Q] of all frames."""
        talker = self._talker
        hidden = torch.stack([frame.stream.inputs.hidden for frame in frames])  # type: ignore[misc]
        first = torch.tensor([frame.first for frame in frames], device=hidden.device)
        groups, next_logits = talker.config.code_groups, self._begin(len(frames))
        draws = _random_numbers(frames, groups - 1)
        inputs = torch.stack([hidden, talker.embed_codec(first)], dim=1)
        codes = [first]
        for code in range(1, groups):
            logits = next_logits(inputs, code)
            codes.append(sample_codes(logits, draws[:, code - 1], self._sampling))
            if code + 1 < groups:
                inputs = talker.predictor.embeddings[code - 1](codes[-1])[:, None]
        return torch.stack(codes, dim=1)


def _random_numbers(frames: Sequence[Frame], codes: int) -> np.ndarray:
    """Return random numbers float64[B, codes], which depend only on the request and the frame."""
    keys = np.array(
        [(key[0], key[1] + 1, key[2], 0) for key in (f.stream.request.key for f in frames)], np.uint64
    )
    first = np.array([frame.stream.inputs.frames * codes for frame in frames])
    return uniforms(keys, first[:, None] + np.arange(codes))


def begin_frames(talker: Talker, frames: int) -> NextLogits:
    """Return the code predictor's computation of B frames."""
    predictor, cache = talker.predictor, FrameAttention(talker, frames)

    def next_logits(inputs: Tensor, code: int) -> Tensor:
        new = inputs.shape[1]
        positions = torch.arange(cache.length, cache.length + new, device=inputs.device).repeat(frames)
        out = predictor.hidden(inputs.flatten(0, 1), positions, cache).view(frames, new, -1)[:, -1]
        cache.length += new
        return predictor.out[code - 1](out)

    return next_logits


class FrameAttention:
    """Attention of B frames at the same position, with their keys and values.

    Attributes:
        length: number of positions of each frame so far.
    """

    def __init__(self, talker: Talker, frames: int) -> None:
        config = talker.config.predictor
        shape = frames, config.num_kv_heads, round_up_columns(talker.config.code_groups), config.head_dim
        self._cache = [
            [torch.zeros(shape, device=talker.device) for _ in range(2)] for _ in range(config.num_layers)
        ]
        self.length = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        keys, values = self._cache[layer.index]
        frames, kv_heads, columns, size = keys.shape
        new, group = len(q) // frames, q.shape[1] // kv_heads
        for cache, x in ((keys, k), (values, v)):
            cache[:, :, self.length : self.length + new] = x.view(frames, new, kv_heads, size).transpose(1, 2)
        positions = torch.arange(self.length, self.length + new, device=q.device).repeat(group)
        mask = q.new_zeros(1, group * new, columns)
        mask.masked_fill_(torch.arange(columns, device=q.device) > positions[:, None], -torch.inf)
        q = q.view(frames, new, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(-1, group * new, size)
        options = None if layer.options is None else layer.options.for_sets(frames * kv_heads, kv_heads, new)
        out = attend(q, keys.flatten(0, 1), values.flatten(0, 1), mask, options)
        out = out.view(frames, kv_heads, group, new, size).permute(0, 3, 1, 2, 4)
        return out.reshape(frames * new, kv_heads * group, size)


class DecoderStage(Stage[SpeechStream]):
    """Decodes chunks of frames to samples.

    A stream is ready when it has all frames of its next chunk, or its last frames. A batch has the chunk size
    of the most urgent ready stream, and includes all ready streams with as many frames. First chunks are not
    batched with later ones. The codec is causal, so the last chunk of an utterance is padded with arbitrary
    codes and its samples are truncated. The queue has utterances with frames to decode or an end to report.
    """

    def __init__(self, codec: Codec, clock: Clock, chunks: ChunkSizes) -> None:
        super().__init__()
        self._codec, self._clock, self._chunks = codec, clock, chunks

    def deadline(self) -> float | None:
        return min((stream.heard for stream in self._ready()), default=None)

    def feed(self, items: Sequence[SpeechStream]) -> None:
        self.queue.update((stream.id, stream) for stream in items)

    def _ready(self) -> list[SpeechStream]:
        return [
            stream
            for stream in self.queue.values()
            if _has_ended(stream) or len(stream.frames) >= self._chunks.of(stream.chunks)
        ]

    def step(self) -> list[SpeechDelta]:
        ready = sorted(self._ready(), key=lambda stream: stream.heard)
        size, started = self._chunks.of(ready[0].chunks), ready[0].chunks > 0
        batch = [
            stream
            for stream in ready
            if (stream.chunks > 0) == started and (_has_ended(stream) or len(stream.frames) >= size)
        ][:_MAX_DECODER_BATCH]
        decoded = self._decode([stream for stream in batch if stream.frames], size)
        return [self._delta(stream, decoded.get(stream.id)) for stream in batch]

    def _decode(self, batch: Sequence[SpeechStream], size: int) -> dict[int, Tensor]:
        """Return the samples float[N] of the next `size` frames of each stream, by its id."""
        if not batch:
            return {}
        taken = [stream.frames[:size] for stream in batch]
        padding = [frames[-1:] * (size - len(frames)) for frames in taken]
        codes = torch.stack([torch.stack(frames + more) for frames, more in zip(taken, padding, strict=True)])
        state = CodecState.join([stream.state for stream in batch])
        samples = self._codec(codes, state)
        decoded = {}
        for stream, frames, after, row in zip(batch, taken, state.split(), samples, strict=True):
            del stream.frames[: len(frames)]
            stream.state, stream.chunks = after, stream.chunks + 1
            decoded[stream.id] = row[: len(frames) * self._codec.config.frame]
        return decoded

    def _delta(self, stream: SpeechStream, samples: Tensor | None) -> SpeechDelta:
        now, times = self._clock(), stream.times
        delta = SpeechDelta(stream.id, 0, [], [], [], failure=stream.failure)
        if samples is not None:
            delta.audio = [samples.cpu().numpy()]
            if times.audio == 0:
                times.first_audio, stream.heard = now - stream.arrived, now
            elif now > stream.heard:
                times.underruns, stream.heard = times.underruns + 1, now
            seconds = len(samples) / self._codec.config.sample_rate
            times.audio, stream.heard = times.audio + seconds, stream.heard + seconds
        if _has_ended(stream) and not stream.frames:
            del self.queue[stream.id]
            times.seconds = now - stream.arrived
            delta.finish_reason, delta.times = stream.finish_reason, times
        return delta


def _has_ended(stream: SpeechStream) -> bool:
    return stream.finish_reason is not None or stream.failure is not None
