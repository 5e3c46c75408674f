"""Autoscaling by the rate of requests, as in Knative and KEDA: the number of replicas over time.

The autoscaler measures the rate of arrivals in a window. It requests replicas as soon as the rate requires
more, which serve requests after their startup. It releases replicas once the rate has required fewer for a
whole window. Decisions depend only on arrivals, so each replica can be simulated independently.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import count

from perilune.errors import RequestError


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The settings of an autoscaler.

    Attributes:
        min_replicas: number of replicas that always serve.
        rate: target number of requests per second of one replica.
        startup: seconds from requesting a replica until it serves.
        window: seconds over which the rate is measured.
    """

    min_replicas: int
    rate: float
    startup: float
    window: float = 60.0

    @classmethod
    def parse(cls, text: str) -> Autoscaling:
        """Parse LEAST:RATE:STARTUP.

        Raises:
            RequestError: when the text does not have this form.
        """
        try:
            min_replicas, rate, startup = text.split(":")
            settings = cls(int(min_replicas), float(rate), float(startup))
            valid = 0 < settings.rate < math.inf and 0 <= settings.startup < math.inf
            if settings.min_replicas < 1 or not valid:
                raise ValueError
        except ValueError:
            raise RequestError(
                f"{text!r} does not describe an autoscaler",
                where="--autoscale",
                remedy="give LEAST:RATE:STARTUP, such as 1:4:120: at least 1 replica, one replica for every 4"
                " requests per second, and 120 s until a new replica serves",
            ) from None
        return settings


@dataclass(slots=True)
class ScalingResult:
    """The decisions of an autoscaler for a trace.

    Attributes:
        replica_of: number of the replica of each request, in the order of their times. A replica that is
            started again gets a new number, because its cache is empty.
        seconds: replica seconds until the last request, summed over replicas, startups included.
        peak: largest number of replicas at the same time.
        last: number of replicas at the last request.
    """

    replica_of: list[int] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0
    last: int = 0


def assign_replicas(settings: Autoscaling, times: Sequence[float], max_replicas: int) -> ScalingResult:
    """Decide which replica serves each request.

    Args:
        times: arrival time of each request, ascending, in seconds.
        max_replicas: maximum number of replicas at once; at least `settings.min_replicas`.
    """
    result, last, numbers, window = ScalingResult(), times[0], count(), settings.window
    in_window = turn = 0
    # Pairs of a time and the largest number of replicas that was required since, the oldest first.
    demand: deque[tuple[float, int]] = deque()
    # The number of each replica, and the time from which it serves.
    replicas = [(next(numbers), -math.inf) for _ in range(settings.min_replicas)]
    # Each arrival changes the rate twice. Replicas can be released one window after the rate has fallen.
    left = [time + window for time in times]
    changes = (
        [(time, 1) for time in times],
        [(time, -1) for time in left],
        [(time + window, 0) for time in left],
    )
    for now, change in merge(*changes):
        result.seconds += (now - last) * len(replicas)
        last = now
        in_window += change
        required = math.ceil(min(max_replicas, in_window / window / settings.rate))
        required = max(settings.min_replicas, required)
        since = now
        while demand and demand[-1][1] <= required:
            since, _ = demand.pop()
        demand.append((since, required))
        while len(demand) > 1 and demand[1][0] + window <= now:
            demand.popleft()
        replicas += [(next(numbers), now + settings.startup) for _ in range(required - len(replicas))]
        del replicas[demand[0][1] :]
        result.peak = max(result.peak, len(replicas))
        if change == 1:
            serving = [number for number, since in replicas if since <= now]
            result.replica_of.append(serving[turn % len(serving)])
            turn += 1
        if turn == len(times):
            break
    result.last = len(replicas)
    return result
