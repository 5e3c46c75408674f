"""Speculation changes no bit of any sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Delta, Prompt, Request, SamplingParams
from perilune.engine.speculation import SpeculationSettings, look_up
from perilune.errors import RequestError
from perilune.models import kernels
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

exact = pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
TOKENIZER = Tokenizer.characters()
# Confident enough that it repeats itself at a low temperature.
CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2, max_position_embeddings=512)


def make(seed: int = 0, **changes: Any) -> Decoder:
    decoder = Decoder(CONFIG.replace(**changes))
    decoder.initialize(seed)
    return decoder


DECODER = make()
ALWAYS = SpeculationSettings(match=1, adaptive=False)


def engine(
    speculation: SpeculationSettings | None = ALWAYS, decoder: Decoder = DECODER, **options: Any
) -> Engine:
    one = Engine(decoder, **{"slots": 8, "cache_tokens": 2048, "tokenizer": TOKENIZER, **options})
    if speculation is not None:
        one.speculate(speculation)
    return one


def repeating(seed: int, length: int) -> list[int]:
    """A prompt that repeats pieces of itself."""
    rng = np.random.default_rng(seed)
    piece = rng.integers(98, size=12)
    tokens = [token for _ in range(1 + length // 8) for token in piece[rng.integers(6) :][:8].tolist()]
    return tokens[:length]


def finish(engine: Engine, requests: list[Request], between: int = 0) -> dict[tuple[int, int], list[Delta]]:
    """The deltas of every sample, of requests that arrive `between` steps apart."""
    found: dict[tuple[int, int], list[Delta]] = {}
    numbers: dict[int, int] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.unfinished:
        if waiting:
            number, request = waiting.pop(0)
            numbers[engine.add(request)] = number
        for _ in range(between if waiting else 1):
            for delta in engine.step():
                found.setdefault((numbers[delta.request_id], delta.sample), []).append(delta)
    return found


def facts(deltas: list[Delta]) -> list[Any]:
    return [
        (d.token_ids, d.logprobs, d.policy_version, d.text, d.finish_reason, d.raw_logprobs, d.top_logprobs)
        for d in deltas
    ]


def same(found: dict[Any, list[Delta]], expected: dict[Any, list[Delta]]) -> bool:
    return {key: facts(of) for key, of in found.items()} == {key: facts(of) for key, of in expected.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.5, "temperature": 0.5},
    {"min_p": 0.2, "stop_token_ids": (4, 5), "min_tokens": 6},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1, "temperature": 0.2},
    {"stop": ("a", "bc"), "raw_logprobs": True, "top_logprobs": 3, "temperature": 0.4},
]
requests = st.builds(
    lambda seed, length, tokens, n, option, key: Request(
        repeating(seed, length), SamplingParams(tokens, **OPTIONS[option]), (key, 0, 0), n
    ),
    st.integers(0, 3),
    st.integers(1, 60),
    st.integers(6, 32),
    st.integers(1, 3),
    st.integers(0, len(OPTIONS) - 1),
    st.integers(0, 3),
)


class Oracle:
    """Guesses the tokens of earlier samples, and errs in every fourth."""

    cost = 0.0

    def __init__(self, engine: Engine, known: dict[tuple[int, int], list[Delta]]) -> None:
        self._sequences, self._known = engine._sequences, known

    def propose(self, rows: Any, most: Any) -> list[Any]:
        return [self._guess(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _guess(self, row: int, count: int) -> Any:
        sequences = self._sequences
        deltas = self._known[sequences.entries[row].id, int(sequences.sample[row])]  # type: ignore[union-attr]
        drawn = sequences.length[row] - sequences.prompt_length[row]
        guesses = np.array([delta.token_ids[0] for delta in deltas][drawn : drawn + count], dtype=np.int64)
        wrong = (np.arange(drawn, drawn + len(guesses)) * 2654435761 >> 7) % 4 == 0
        return np.where(wrong, (guesses + 1) % CONFIG.vocab_size, guesses)


def with_oracle(asked: list[Request], between: int = 0, **options: Any) -> tuple[Engine, Engine]:
    """Engines with and without guesses that are mostly right, after the same requests."""
    slow, fast = engine(None, **options), engine(ALWAYS, **options)
    expected = finish(slow, asked, between)
    fast._scheduler.speculation._proposer = Oracle(fast, expected)  # type: ignore[union-attr]
    assert same(finish(fast, asked, between), expected)
    return slow, fast


@exact
@settings(max_examples=8, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=5),
    st.sampled_from([{}, {"cache_tokens": 160}, {"slots": 2, "token_budget": 5}]),
    st.integers(1, 3),
)
def test_samples_are_the_same_whatever_is_guessed(
    asked: list[Request], room: dict[str, int], between: int
) -> None:
    with_oracle(asked, between, **room)
    for speculation in (ALWAYS, SpeculationSettings("draft", tokens=3, adaptive=False)):
        assert same(
            finish(engine(speculation, **room), asked, between), finish(engine(None, **room), asked, between)
        )
