"""Speaks with a speech model: creates requests for utterances, and the pipeline that serves them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from perilune.engine.engine import Engine
from perilune.engine.openvino_runner import OpenVino
from perilune.engine.request import Request
from perilune.errors import RequestError
from perilune.speech.folder import SpeechModel
from perilune.speech.openvino import OpenVinoCodec, OpenVinoPredictor, OpenVinoTalker
from perilune.speech.pipeline import Pipeline
from perilune.speech.prompt import Utterance, embed_utterance
from perilune.speech.stages import (
    ChunkSizes,
    Clock,
    Codec,
    DecoderStage,
    NextLogits,
    PredictorStage,
    TalkerRunner,
    TalkerStage,
    begin_frames,
)
from perilune.speech.stream import FrameInputs, Samples, SpeechDelta

_CHARACTERS_PER_POSITION = 4  # maximum, checked before tokenization; speech takes most of the positions


class Speaker:
    """Speaks with one model.

    Args:
        slots: maximum number of utterances that run at a time; others wait.
        cache_tokens: size of the talker's KV cache in positions of all utterances.
        openvino: settings with which OpenVINO computes the three stages, instead of torch.
        clock: returns seconds, for deadlines and measured times.

    Raises:
        RequestError: when OpenVINO is missing, or cannot compute the model on its device.

    Attributes:
        pipeline: takes the requests that `request` makes.
        engine: the talker's.
        open: returns the number of utterances in progress.
    """

    def __init__(
        self,
        model: SpeechModel,
        *,
        slots: int = 16,
        cache_tokens: int | None = None,
        chunks: ChunkSizes | None = None,
        openvino: OpenVino | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        self.config, self.sampling = model.config, model.sampling
        self._tokenizer = model.tokenizer
        runner: Any
        codec: Codec
        begin: Callable[[int], NextLogits]
        if openvino is None:
            self._talker, codec = model.talker.frozen(), model.codec.frozen()
            runner = partial(TalkerRunner, self._talker)
            begin = partial(begin_frames, self._talker)
        else:
            self._talker, codec = model.talker, OpenVinoCodec(model.codec, openvino)
            runner = OpenVinoTalker(self._talker, openvino)
            begin = OpenVinoPredictor(self._talker, openvino).begin
        self.engine = Engine(self._talker.decoder, slots=slots, cache_tokens=cache_tokens, runner=runner)
        talker = TalkerStage(self.engine, codec, clock)
        predictor = PredictorStage(self._talker, begin, self.sampling)
        decoder = DecoderStage(codec, clock, chunks or ChunkSizes())
        talker.open = lambda: len(talker.queue.keys() | decoder.queue.keys())
        self.open = talker.open
        self.pipeline = Pipeline(self.engine, [talker, predictor, decoder])

    @torch.inference_mode()
    def request(self, utterance: Utterance, seed: int) -> Request:
        """Return the request for `utterance`. Safe to call from any thread.

        Raises:
            RequestError: when the model cannot speak the utterance, or it is too long.
        """
        positions = self.engine.positions
        characters = len(utterance.text) + len(utterance.instructions)
        if characters > _CHARACTERS_PER_POSITION * positions:
            message = f"text and instructions have {characters:,} characters"
            raise RequestError(message, where="input", remedy="shorten them")
        inputs = FrameInputs(embed_utterance(self._talker, self._tokenizer, utterance))
        frames = min(self.sampling.max_frames, positions - len(inputs))
        if frames < 2:
            message = f"the text takes {len(inputs)} of the model's {positions} positions"
            raise RequestError(message, where="input", remedy="shorten it")
        params = replace(self.sampling, max_frames=frames).params(self.config.marks.eos)
        return Request([self.config.marks.pad] * len(inputs), params, (seed, 0, 0), inputs=inputs)

    def say(self, utterances: Sequence[Utterance], seed: int = 0) -> list[Samples]:
        """Return the samples float32[N] of each utterance, batched. Utterance i has seed `seed` + i.

        Raises:
            RequestError: as `request`. No utterance is then spoken.
        """
        parts: dict[int, list[Samples]] = {}
        try:
            for i, utterance in enumerate(utterances):
                parts[self.pipeline.add(self.request(utterance, seed + i))] = []
            while self.pipeline.unfinished:
                for delta in self.pipeline.step():
                    if delta.failure is not None:
                        raise delta.failure
                    assert isinstance(delta, SpeechDelta)
                    parts[delta.request_id] += delta.audio
        finally:
            for request_id in parts:
                self.pipeline.abort(request_id)
        return [np.concatenate([np.zeros(0, np.float32), *samples]) for samples in parts.values()]

    def warm_up(self) -> None:
        """Speak a word, so that the first request does not wait for lazy initialization."""
        for word in ("a", "1"):
            with suppress(RequestError):  # the vocabulary may lack these characters
                self.say([Utterance(word)])
                return
