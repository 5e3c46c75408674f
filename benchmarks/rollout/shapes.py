"""Compared models and workloads, as plain data that every virtual environment can import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16")
WORKLOADS = ("group", "ragged", "single")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Qwen3 decoder. Its weights are random, because they do not affect the speed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    theta: float = 1e4
    positions: int = 2048
    tied: bool = True

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the matrices of all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        """Number of weights in the output matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of weights in all matrices."""
        return self.layer_parameters + (1 if self.tied else 2) * self.head_parameters


SHAPES = MappingProxyType(
    {
        "T": Shape(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, inner=1024, vocab=512),
        "S": Shape(layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64, inner=2304, vocab=8192),
        # Qwen3-0.6B
        "M": Shape(
            layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, inner=3072, vocab=151936, theta=1e6
        ),
        # Qwen3-1.7B, for GPUs
        "L": Shape(
            layers=28,
            hidden=2048,
            heads=16,
            kv_heads=8,
            head_dim=128,
            inner=6144,
            vocab=151936,
            theta=1e6,
            positions=16384,
        ),
        # Qwen3-8B
        "XL": Shape(
            layers=36,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            inner=12288,
            vocab=151936,
            theta=1e6,
            positions=16384,
            tied=False,
        ),
        "smoke": Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=128, vocab=128),
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of the workloads for one model.

    Attributes:
        groups, samples, new: `group`: prompts, samples of each, and tokens of each sample.
        requests, shortest, longest: `ragged`: requests, and the bounds of their tokens.
        context, answer: `single`: tokens of the one prompt, and of its one sample.
        prompt: tokens of a prompt of `group` and `ragged`.
    """

    groups: int
    samples: int
    new: int
    requests: int
    shortest: int
    longest: int
    context: int
    answer: int
    prompt: int = 64


WORK = MappingProxyType(
    {
        "T": Work(16, 16, 128, 64, 8, 256, 1024, 128),
        "S": Work(8, 8, 128, 64, 8, 256, 1024, 128),
        "M": Work(2, 8, 64, 16, 8, 128, 1024, 64),
        "smoke": Work(2, 4, 8, 6, 2, 12, 48, 8, prompt=8),
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue `n` times by exactly `new_tokens` tokens."""

    prompt: Sequence[int]
    n: int
    new_tokens: int

    def as_json(self) -> dict[str, Any]:
        """JSON for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Request:
        """The inverse of `as_json`."""
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison, in which every engine does the same work on the same number of cores."""

    model: str
    workload: str
    dtype: str
    cores: int

    def __str__(self) -> str:
        cores = "one core" if self.cores == 1 else f"{self.cores} cores"
        return f"{self.model} {self.workload} {self.dtype} on {cores}"

    def requests(self) -> list[Request]:
        """The requests, which are equal for every engine and in every round."""
        return requests_of(WORK[self.model], self.workload, SHAPES[self.model].vocab)


def requests_of(work: Work, workload: str, vocab: int) -> list[Request]:
    """The requests of one workload."""
    random = np.random.default_rng(0)
    if workload == "group":
        sizes = [(work.prompt, work.samples, work.new)] * work.groups
    elif workload == "ragged":
        lengths = random.integers(work.shortest, work.longest + 1, size=work.requests)
        sizes = [(work.prompt, 1, int(length)) for length in lengths]
    else:
        sizes = [(work.context, 1, work.answer)]
    return [
        Request(random.integers(vocab, size=prompt).tolist(), n, new_tokens)
        for prompt, n, new_tokens in sizes
    ]


def greedy_requests(model: str) -> list[Request]:
    """A few prompts for which all engines should have the same most likely tokens."""
    vocab, random = SHAPES[model].vocab, np.random.default_rng(1)
    return [Request(random.integers(vocab, size=length).tolist(), 1, 16) for length in (5, 12, 17, 24)]
