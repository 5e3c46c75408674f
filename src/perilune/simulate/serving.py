"""Simulates a fleet that serves a trace of requests: time to first token, time per output token, and goodput.

Requests go to the replicas round robin. So replicas are independent, and a large fleet is simulated one
replica after another. With disaggregated prefill, prefill replicas compute prompts and first tokens, and send
keys and values to decode replicas.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perilune.engine.offload import OffloadSettings
from perilune.errors import RequestError
from perilune.execution.processes import die_with_parent
from perilune.files import read_regular
from perilune.frozen import invalid_value
from perilune.models.card.model_card import ModelCard
from perilune.models.memory import DEFAULT_TOKEN_BUDGET
from perilune.simulate.autoscaling import Autoscaling, ScalingResult, assign_replicas
from perilune.simulate.engine import VOCABULARY_SIZE, SimulatedEngine, SimulatedModel
from perilune.simulate.hardware import ComputedSteps, Machines, cache_tokens, transfer_seconds
from perilune.simulate.offload import OffloadTimes, SimulatedOffloadStore
from perilune.simulate.step_cost import StepTimes, StepWork

Tokens = NDArray[np.int32]
Report = Callable[[int, int], None]  # reports progress: number of simulated replicas, and of all replicas
TOKENS_PER_HASH = 512  # tokens of a prompt for each of the trace's `hash_ids`
MAX_REQUESTS = 10_000_000  # of drawn arrivals
MAX_SECONDS = 1e10  # timestamps up to the year 2286, with a precision of microseconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace.

    Attributes:
        number: its position in the trace.
        time: seconds since the first request of the trace.
        prompt: number of tokens of the prompt. Tokens after those that `hashes` stand for are unique.
        output: number of tokens of the answer.
        hashes: one hash for each block of `TOKENS_PER_HASH` tokens, equal in prompts with equal beginnings.
    """

    number: int
    time: float
    prompt: int
    output: int
    hashes: tuple[int, ...] = ()

    def tokens(self) -> list[int]:
        """Return the tokens of the prompt."""
        shared = [_hash_tokens(digest) for digest in self.hashes[: self.prompt // TOKENS_PER_HASH]]
        rest = self.prompt - TOKENS_PER_HASH * len(shared)
        own = np.random.default_rng((1, self.number)).integers(VOCABULARY_SIZE, size=rest, dtype=np.int32)
        return np.concatenate([*shared, own]).tolist()  # type: ignore[no-any-return]


class _Line(BaseModel):
    """A line of a trace. The time is in milliseconds."""

    model_config = ConfigDict(strict=True)

    timestamp: float = Field(ge=0, le=1000 * MAX_SECONDS)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[Annotated[int, Field(ge=0)]] = []


@lru_cache(maxsize=4096)
def _hash_tokens(digest: int) -> Tokens:
    return np.random.default_rng((0, digest)).integers(VOCABULARY_SIZE, size=TOKENS_PER_HASH, dtype=np.int32)


def read_requests(path: Path) -> list[Arrival]:
    """Read a trace in Mooncake's format: JSON lines with `timestamp` in milliseconds, `input_length`,
    `output_length` and perhaps `hash_ids`.

    Raises:
        RequestError: when a line does not have this format, or the file has no requests.
    """
    arrivals = []
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = _Line.model_validate_json(line)
        except ValidationError as error:
            raise RequestError(
                f"not a request: {invalid_value(error).what}",
                where=f"{path}:{number}",
                remedy='a line is like {"timestamp": 27482, "input_length": 6955, "output_length": 52}',
            ) from None
        hashes = tuple(row.hash_ids)
        arrivals.append(Arrival(number, row.timestamp / 1000, row.input_length, row.output_length, hashes))
    if not arrivals:
        raise RequestError("the file has no requests", where=str(path))
    arrivals.sort(key=lambda arrival: arrival.time)
    return [replace(arrival, time=arrival.time - arrivals[0].time) for arrival in arrivals]


def poisson_requests(rate: float, seconds: float, prompt: float, output: float, seed: int) -> list[Arrival]:
    """Draw independent arrivals with lognormal lengths of these means, with sigma 0.5.

    Raises:
        ValueError: for a number outside 1e-6 to 1e9, or more than `MAX_REQUESTS` requests.
    """
    if not all(1e-6 <= number <= 1e9 for number in (rate, seconds, prompt, output)):
        raise ValueError("the numbers must be from 1e-6 to 1e9")
    if rate * seconds > MAX_REQUESTS:
        raise ValueError(f"more than {MAX_REQUESTS:,} requests")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, size=max(1, round(rate * seconds))))
    lengths = rng.lognormal(-0.125, 0.5, size=(2, len(times))) * [[prompt], [output]]
    rows = zip(times.tolist(), *np.maximum(1, lengths.round()).astype(int).tolist(), strict=True)
    return [Arrival(number, *row) for number, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was served.

    Attributes:
        first, end: times of the first token and of the end, in seconds since the start of the trace.
    """

    arrival: Arrival
    first: float
    end: float

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrival.time

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 for answers of one token."""
        return (self.end - self.first) / max(1, self.arrival.output - 1)


@dataclass(slots=True)
class Fleet:
    """The results of simulated replicas.

    Attributes:
        served: the served requests.
        busy: seconds in which replicas computed, summed over replicas.
        counts: engine `steps`, `preemptions`, prompt tokens (`computed`, or `cached` in the prefix cache) and
            offloaded blocks (`loaded_from_memory`, `loaded_from_disk`, or `refused`, as computing is faster).
        scaled: the decisions of the autoscaler; None without one.
    """

    served: list[Served] = field(default_factory=list)
    busy: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    scaled: ScalingResult | None = None

    def count(self, engine: SimulatedEngine) -> None:
        """Add the counts of an engine."""
        counters, offloaded = engine.counters, engine.offloaded
        self.counts.update(
            steps=counters.steps,
            preemptions=counters.preemptions,
            computed=counters.prompt_tokens,
            cached=counters.cached_tokens,
            loaded_from_memory=offloaded.loaded_from_memory,
            loaded_from_disk=offloaded.loaded_from_disk,
            refused=offloaded.refused,
        )

    def add(self, other: Fleet) -> None:
        """Add the results of other replicas."""
        self.served += other.served
        self.busy += other.busy
        self.counts.update(other.counts)


@dataclass(frozen=True, slots=True)
class _RoutedRequest:
    """A request as a replica receives it.

    Attributes:
        time: time at which the replica receives it.
        output: number of tokens that the replica samples.
        first: time at which another replica sampled the first token; None if this replica samples it.
    """

    time: float
    arrival: Arrival
    output: int
    first: float | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy of the model on `machines.cards_per_model` cards, and its engine.

    Attributes:
        slots: maximum number of requests in flight.
        offload: store for blocks that the prefix cache evicts; None to drop them.
    """

    machines: Machines
    model: ModelCard
    slots: int = 256
    offload: OffloadSettings | None = None

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that fit into the cache."""
        return min(cache_tokens(self.machines, self.model), self.slots * self.model.max_positions)

    def serve(self, share: Sequence[_RoutedRequest]) -> Fleet:
        """Serve requests, which are ordered by time. A request enters the engine between two steps."""
        received = share[0].first is not None
        engine = self._make_engine(receives=received)
        fleet, in_flight, clock, next_index = Fleet(), dict[int, _RoutedRequest](), engine.clock, 0
        while next_index < len(share) or engine.unfinished:
            if not engine.unfinished:
                clock.now = max(clock.now, share[next_index].time)
            while next_index < len(share) and share[next_index].time <= clock.now:
                sent = share[next_index]
                prompt = sent.arrival.tokens() + [0] * received
                answer = np.full(sent.output, sent.arrival.number % VOCABULARY_SIZE, dtype=np.int32)
                in_flight[engine.submit(prompt, [answer])] = sent
                next_index += 1
            before = clock.now
            for delta in engine.step():
                sent, first = in_flight.pop(delta.request_id), engine.first_token_times.pop(delta.request_id)
                began = first if sent.first is None else sent.first
                fleet.served.append(Served(sent.arrival, began, clock.now))
            fleet.busy += clock.now - before
        fleet.count(engine)
        return fleet

    def _make_engine(self, *, receives: bool) -> SimulatedEngine:
        """Make the engine of the replica.

        Args:
            receives: whether it receives keys and values of prompts from prefill replicas, so that prefill
                takes no time.
        """
        steps: StepTimes = ComputedSteps(self.machines, self.model)
        engine = SimulatedEngine(
            SimulatedModel.from_card(self.model),
            _ReceivingSteps(steps) if receives else steps,
            slots=self.slots,
            cache_tokens=self.cache_tokens,
            token_budget=self.cache_tokens if receives else DEFAULT_TOKEN_BUDGET,
        )
        if self.offload is not None and not receives:
            times = OffloadTimes.of(self.machines, self.model)
            engine.offload_to(SimulatedOffloadStore(self.offload, times, engine.clock))
        return engine


def serve(
    replica: Replica,
    arrivals: Sequence[Arrival],
    *,
    prefill: int = 0,
    autoscaling: Autoscaling | None = None,
    jobs: int = 1,
    report: Report = lambda done, count: None,
) -> Fleet:
    """Serve a trace.

    Args:
        replica: the replica of which the fleet has `replica.machines.replicas`.
        prefill: number of replicas that only compute prompts; with 0, every replica prefills and decodes.
        autoscaling: starts and releases replicas; by default all serve all the time.
        jobs: processes that simulate replicas. They do not change the result.
        report: called with the number of simulated replicas and of all replicas.

    Raises:
        RequestError: when the weights or a request do not fit, or no replica is left to decode.
    """
    count = replica.machines.replicas
    if not 0 <= prefill < count:
        raise RequestError(
            f"{prefill} of {count} replicas for prefill leave no replica to decode",
            where="--prefill",
            remedy=f"give 0 to {count - 1}",
        )
    if prefill and autoscaling is not None:
        raise RequestError(
            "an autoscaler cannot divide replicas between prefill and decoding yet",
            where="--autoscale",
            remedy="remove --autoscale or --prefill",
        )
    if autoscaling is not None and autoscaling.min_replicas > count:
        raise RequestError(
            f"at least {autoscaling.min_replicas} replicas were requested, and the machines hold {count}",
            where="--autoscale",
            remedy="name more cards with --machines, or lower LEAST",
        )
    _check_longest(arrivals, replica)
    if prefill:
        return _serve_disaggregated(replica, arrivals, prefill, jobs, report)
    requests = [_RoutedRequest(arrival.time, arrival, arrival.output) for arrival in arrivals]
    if autoscaling is None:
        return _simulate_replicas(replica, _split_round_robin(requests, count), jobs, report)
    scaled = assign_replicas(autoscaling, [arrival.time for arrival in arrivals], count)
    shares: dict[int, list[_RoutedRequest]] = {}
    for number, sent in zip(scaled.replica_of, requests, strict=True):
        shares.setdefault(number, []).append(sent)
    fleet = _simulate_replicas(replica, list(shares.values()), jobs, report)
    fleet.scaled = scaled
    return fleet


def _serve_disaggregated(
    replica: Replica, arrivals: Sequence[Arrival], prefill: int, jobs: int, report: Report
) -> Fleet:
    """Serve a trace with `prefill` replicas that compute prompts. The other replicas decode."""
    model, decoding = replica.model, replica.machines.replicas - prefill
    prompts = [_RoutedRequest(arrival.time, arrival, 1) for arrival in arrivals]
    fleet = _simulate_replicas(replica, _split_round_robin(prompts, prefill), jobs, report)
    prompted, fleet.served = fleet.served, []
    fleet.served += [request for request in prompted if request.arrival.output == 1]
    received = [
        _RoutedRequest(
            request.end + transfer_seconds(model, request.arrival.prompt),
            request.arrival,
            request.arrival.output - 1,
            request.first,
        )
        for request in prompted
        if request.arrival.output > 1
    ]
    received.sort(key=lambda request: (request.time, request.arrival.number))
    decoded = _simulate_replicas(replica, _split_round_robin(received, decoding), jobs, report)
    decoded.counts["computed"] = decoded.counts["cached"] = 0  # prompts count where they are computed
    fleet.add(decoded)
    return fleet


def _simulate_replicas(
    replica: Replica, shares: Sequence[Sequence[_RoutedRequest]], jobs: int, report: Report
) -> Fleet:
    """Simulate all replicas in `jobs` processes."""
    fleet, count = Fleet(), len(shares)
    with ExitStack() as stack:
        parts: Iterable[Fleet] = map(replica.serve, shares)
        if min(jobs, count) > 1:
            pool = stack.enter_context(
                ProcessPoolExecutor(jobs, get_context("spawn"), die_with_parent, (os.getpid(),))
            )
            parts = pool.map(replica.serve, shares, chunksize=max(1, count // (16 * jobs)))
        for done, part in enumerate(parts, 1):
            fleet.add(part)
            report(done, count)
    return fleet


class _ReceivingSteps:
    """Times of the steps of a replica that receives keys and values of prompts from another replica."""

    def __init__(self, steps: StepTimes) -> None:
        self._steps = steps

    def step_seconds(self, work: StepWork) -> float:
        """Count each received prompt as one more row, for its last token."""
        keys = work.keys + work.prefill
        return self._steps.step_seconds(StepWork(work.rows + work.chunks, keys))

    def bookkeeping_seconds(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        return self._steps.bookkeeping_seconds(begun=begun, copied=copied, ended=ended)


def _split_round_robin(items: Sequence[_RoutedRequest], count: int) -> list[Sequence[_RoutedRequest]]:
    """Return the requests of each replica, round robin, without replicas that get none."""
    return [items[number::count] for number in range(min(count, len(items)))]


def _check_longest(arrivals: Sequence[Arrival], replica: Replica) -> None:
    longest = max(arrivals, key=lambda arrival: arrival.prompt + arrival.output)
    tokens, limit = (
        longest.prompt + longest.output,
        min(replica.model.max_positions, replica.cache_tokens - 16),
    )
    if tokens > limit:
        raise RequestError(
            f"request {longest.number} has {tokens:,} tokens, and at most {limit:,} fit",
            where="--requests",
            remedy="remove the request, or use more cards for each copy of the model",
        )


def summarize_fleet(fleet: Fleet, machines: Machines, *, ttft: float, tpot: float) -> dict[str, float]:
    """Compute the figures of a served trace.

    Args:
        ttft, tpot: limits in seconds on the time to first token and the time per output token. Requests
            within both limits count for the goodput.
    """
    served, counts = fleet.served, fleet.counts
    begin, end = min(request.arrival.time for request in served), max(request.end for request in served)
    seconds, tokens = end - begin, sum(request.arrival.output for request in served)
    good = sum(request.ttft <= ttft and request.tpot <= tpot for request in served)
    replica_seconds = seconds * machines.replicas
    if fleet.scaled is not None:  # until the last request is served, those held at the last arrival are kept
        last = max(request.arrival.time for request in served)
        replica_seconds = fleet.scaled.seconds + (end - last) * fleet.scaled.last
    cost = machines.cost(replica_seconds / machines.replicas)
    result = {
        "requests": len(served),
        "seconds": seconds,
        **_distribution("ttft", [request.ttft for request in served]),
        **_distribution("tpot", [request.tpot for request in served if request.arrival.output > 1] or [0.0]),
        **_distribution("latency", [request.end - request.arrival.time for request in served]),
        "tokens_per_second": tokens / seconds,
        "goodput": good / seconds,
        "good_share": good / len(served),
        "busy": fleet.busy / replica_seconds,
        "prefix_hits": counts["cached"] / max(1, counts["cached"] + counts["computed"]),
        "preemptions": counts["preemptions"],
        "engine_steps": counts["steps"],
        **{f"blocks_{name}": counts[name] for name in ("loaded_from_memory", "loaded_from_disk", "refused")},
    }
    if fleet.scaled is not None:
        result |= {"replicas_mean": replica_seconds / seconds, "replicas_peak": fleet.scaled.peak}
    return result if cost is None else result | {"cost": cost, "cost_per_million_tokens": 1e6 * cost / tokens}


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    middle, tail = np.percentile(values, [50, 99]).tolist()
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p50": middle, f"{name}_p99": tail}
