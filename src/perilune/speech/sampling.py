"""Sampling of the codes of a frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.request import SamplingParams
from perilune.engine.sampler import draw
from perilune.models.config.reader import Reader

_MIN_FRAMES = 2


@dataclass(frozen=True, slots=True)
class SpeechSampling:
    """The sampling settings of codes; the defaults are those of Qwen3-TTS.

    Attributes:
        temperature, top_k, top_p, repetition_penalty: of the talker's code, the first of each frame.
        rest_temperature, rest_top_k, rest_top_p: of the code predictor's codes. Temperature 0 takes the most
            likely code.
        max_frames: maximum number of frames of an utterance.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    rest_temperature: float = 0.9
    rest_top_k: int = 50
    rest_top_p: float = 1.0
    max_frames: int = 4096

    def __post_init__(self) -> None:
        self.params(1)  # raises for values out of range
        SamplingParams(1, self.rest_temperature, top_k=self.rest_top_k, top_p=self.rest_top_p)

    def params(self, eos: int) -> SamplingParams:
        """Return the talker's parameters; speech has at least two frames."""
        return SamplingParams(
            max_tokens=max(self.max_frames, _MIN_FRAMES),
            min_tokens=_MIN_FRAMES,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=(eos,),
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, where: str = "generation_config.json") -> SpeechSampling:
        """Read the content of generation_config.json.

        Raises:
            RequestError: on a value that is malformed or out of range.
        """
        read, default = Reader(raw, where), cls()
        draws, rest_draws = read.boolean("do_sample", True), read.boolean("subtalker_dosample", True)
        temperature = read.number("temperature", default.temperature)
        rest = read.number("subtalker_temperature", default.rest_temperature)
        return cls(
            temperature=temperature if draws else 0.0,
            top_k=read.count("top_k", default.top_k, least=0),
            top_p=read.number("top_p", default.top_p),
            repetition_penalty=read.number("repetition_penalty", default.repetition_penalty),
            rest_temperature=rest if rest_draws else 0.0,
            rest_top_k=read.count("subtalker_top_k", default.rest_top_k, least=0),
            rest_top_p=read.number("subtalker_top_p", default.rest_top_p),
            max_frames=read.count("max_new_tokens", default.max_frames),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the content of generation_config.json."""
        return {
            "do_sample": self.temperature > 0,
            "temperature": self.temperature or 1.0,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "subtalker_dosample": self.rest_temperature > 0,
            "subtalker_temperature": self.rest_temperature or 1.0,
            "subtalker_top_k": self.rest_top_k,
            "subtalker_top_p": self.rest_top_p,
            "max_new_tokens": self.max_frames,
        }


def sample_codes(logits: Tensor, uniform: NDArray[np.float64], sampling: SpeechSampling) -> Tensor:
    """Return codes int64[B], drawn from logits float[B, codes] with random numbers float64[B] in [0, 1)."""
    if not sampling.rest_temperature:
        return logits.argmax(-1)
    logits = logits / sampling.rest_temperature
    best = logits.sort(-1, descending=True).values
    lowest = best[:, -1]
    if sampling.rest_top_k:
        lowest = best[:, min(sampling.rest_top_k, best.shape[1]) - 1]
    if sampling.rest_top_p < 1:
        kept = best.masked_fill(best < lowest[:, None], -torch.inf).softmax(-1)
        before = kept.cumsum(-1) - kept
        last = (before < sampling.rest_top_p).sum(-1, keepdim=True) - 1
        lowest = torch.maximum(lowest, best.gather(1, last)[:, 0])
    logprobs = logits.masked_fill(logits < lowest[:, None], -torch.inf).log_softmax(-1)
    return draw(logprobs, torch.from_numpy(uniform).to(logits.device))
