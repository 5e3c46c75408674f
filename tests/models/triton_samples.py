"""Compares samples of an engine with Triton kernels and one with torch."""

from typing import Any
from unittest import mock

import numpy as np

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.decoder import Decoder
from perilune.models.native import ops
from perilune.models.triton_attention import IS_INTERPRETED

DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def check_samples(decoder: Decoder, *runners: Any) -> None:
    """Assert that two runners sample the same tokens, with chunked prefill beside decoding samples."""
    samples = []
    with mock.patch.object(ops, "is_available", lambda: False):
        for runner in runners:
            engine = Engine(decoder.to(DEVICE), slots=4, cache_tokens=512, token_budget=12, runner=runner)
            prompts = [Prompt(list(range(5, 5 + length)), (0, 0, length)) for length in (3, 26)]
            groups = engine.sample(prompts, 1, SamplingParams(5))
            samples.append([sample for group in groups for sample in group])
    for sample, other in zip(*samples, strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4 if DEVICE == "cpu" else 5e-3)
