"""Metrics for Prometheus at /metrics."""

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_NEWEST_WEIGHT = 0.2  # weight of the newest answer in the running mean of answer times


class Metrics:
    """Counts and times of one server.

    Attributes:
        disconnects, stalls, restarts: counters of these events.
        answer_seconds: running mean of the seconds from a request to the end of its answer.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "perilune_requests", "Requests answered", ["path", "status"], registry=self.registry
        )
        self.disconnects = Counter(
            "perilune_disconnects", "Answers whose client disconnected", registry=self.registry
        )
        self.stalls = Counter(
            "perilune_stalls", "Connections closed because the client read nothing", registry=self.registry
        )
        self.restarts = Counter(
            "perilune_engine_restarts",
            "Times the engine failed and was restarted",
            registry=self.registry,
        )
        self._tokens = Counter("perilune_tokens", "Tokens", ["kind"], registry=self.registry)
        self._first = Histogram(
            "perilune_first_token_seconds",
            "Seconds from the request to the first token of a stream",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._whole = Histogram(
            "perilune_answer_seconds",
            "Seconds from the request to the end of its answer",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._gauges: dict[str, Gauge] = {}
        self.answer_seconds = 1.0

    def count_request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def record_first_token(self, since: float) -> None:
        """Record the first token of a stream, requested at `since` on the performance counter."""
        self._first.observe(time.perf_counter() - since)

    def record_finished(self, since: float, *, prompt: int, completion: int, cached: int) -> None:
        """Record a request that ends now, with its numbers of tokens."""
        seconds = time.perf_counter() - since
        self._whole.observe(seconds)
        self.answer_seconds += _NEWEST_WEIGHT * (seconds - self.answer_seconds)
        for kind, count in (("prompt", prompt), ("completion", completion), ("prompt_cached", cached)):
            self._tokens.labels(kind).inc(count)

    def render_page(self, now: Mapping[str, float]) -> Response:
        """Return the /metrics page, with the current values `now` as gauges."""
        for name, value in now.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"perilune_{name}", "Current value", registry=self.registry)
            self._gauges[name].set(value)
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
