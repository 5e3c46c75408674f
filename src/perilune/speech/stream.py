"""An utterance in the pipeline: its inputs, its state and its measured times."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.episode import FinishReason
from perilune.engine.request import Delta, Request
from perilune.errors import PeriluneError
from perilune.speech.prompt import TalkerPrompt
from perilune.speech.streaming import CodecState

Samples = NDArray[np.float32]


class FrameInputs:
    """The talker's inputs of one utterance: its prompt, then one row for each frame.

    Attributes:
        hidden: float[d], the hidden state from which the newest code was drawn.
        frames: number of rows after the prompt.
    """

    def __init__(self, prompt: TalkerPrompt) -> None:
        self.hidden: Tensor | None = None
        self.frames = 0
        self._prompt, self._length = prompt, len(prompt.inputs)
        self._rows = torch.cat([prompt.inputs, torch.empty_like(prompt.inputs)])

    def __len__(self) -> int:
        """Return the number of positions of the prompt."""
        return self._length

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the inputs float[stop - start, d] of these positions."""
        assert stop <= self._length + self.frames, "a frame is computed before its codes are known"
        return self._rows[start:stop]

    def receive_hidden_state(self, hidden: Tensor) -> None:
        """Keep the hidden state for the code predictor."""
        self.hidden = hidden

    def add(self, frame: Tensor) -> None:
        """Append the summed embeddings float[d] of the newest frame."""
        row = self._length + self.frames
        if row == len(self._rows):
            self._rows = torch.cat([self._rows, torch.empty_like(self._rows)])
        self._rows[row] = frame + self._prompt.text_of(self.frames)
        self.frames += 1


@dataclass(slots=True, eq=False)
class SpeechTimes:
    """Latencies of one utterance as its listener sees them, in seconds.

    Attributes:
        streams: utterances in progress when this one arrived, itself included.
        first_code, first_audio: from the arrival to the talker's first code and to the first samples.
        seconds: from the arrival to the last sample.
        audio: duration of the speech.
        underruns: number of times that playback waited for samples.
    """

    streams: int
    first_code: float = 0.0
    first_audio: float = 0.0
    seconds: float = 0.0
    audio: float = 0.0
    underruns: int = 0

    @property
    def real_time_factor(self) -> float:
        """Seconds from the arrival to the last sample, divided by the seconds of speech."""
        return self.seconds / self.audio if self.audio else 0.0


@dataclass(slots=True, eq=False)
class SpeechDelta(Delta):
    """New samples of an utterance.

    Attributes:
        audio: float32[N] in [-1, 1].
        times: the measured times, in the last delta.
    """

    audio: Sequence[Samples] = ()
    times: SpeechTimes | None = None

    def extend(self, later: Delta) -> None:
        """Append `later`, a delta of the same utterance."""
        Delta.extend(self, later)
        assert isinstance(later, SpeechDelta)
        self.audio, self.times = [*self.audio, *later.audio], later.times


@dataclass(slots=True, eq=False)
class SpeechStream:
    """An utterance in progress.

    Attributes:
        id: the engine's id of its request.
        arrived: time at which it was added, on the pipeline's clock.
        heard: time by which the listener has heard all samples so far; the arrival before the first samples.
        frames: int64[Q] codes that are not decoded yet.
        chunks: number of decoded chunks.
        finish_reason: the reason that no further frames follow.
    """

    id: int
    request: Request
    inputs: FrameInputs
    arrived: float
    heard: float
    times: SpeechTimes
    state: CodecState
    frames: list[Tensor] = field(default_factory=list)
    chunks: int = 0
    finish_reason: FinishReason | None = None
    failure: PeriluneError | None = None
