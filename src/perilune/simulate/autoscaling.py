"""Autoscaling by the rate of requests, as Knative and KEDA do it: how many replicas serve at which time.

The rate is that of the arrivals in a window. Replicas are requested as soon as it asks for more, and serve
after their startup. They are released once the rate has asked for fewer in a whole window. The decision
depends on arrivals alone, so each replica can still be simulated by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from perilune.errors import RequestError


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The settings of an autoscaler.

    Attributes:
        least: replicas that always serve.
        rate: requests per second for which a replica is meant.
        startup: seconds from the request of a replica to its first request.
        window: seconds over which the rate is measured.
    """

    least: int
    rate: float
    startup: float
    window: float = 60.0

    @classmethod
    def parse(cls, text: str) -> Autoscaling:
        """From LEAST:RATE:STARTUP.

        Raises:
            RequestError: when it is not of that form.
        """
        try:
            least, rate, startup = text.split(":")
            found = cls(int(least), float(rate), float(startup))
            if found.least < 1 or not found.rate > 0 or not found.startup >= 0:
                raise ValueError
        except ValueError:
            raise RequestError(
                f"{text!r} does not describe an autoscaler",
                where="--autoscale",
                remedy="give LEAST:RATE:STARTUP, such as 1:4:120: at least one replica, another for each 4"
                " requests per second, which serves after 120 s",
            ) from None
        return found


@dataclass(slots=True)
class Scaled:
    """The decisions of an autoscaler for a trace.

    Attributes:
        replica_of: the replica of each request, in the order of their times. One that is started again has
            another number, because its cache is empty.
        seconds: for which all replicas were held until the last request, startups included.
        peak: most replicas held at once.
        last: replicas held at the last request.
    """

    replica_of: list[int] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0
    last: int = 0


def scale(settings: Autoscaling, times: Sequence[float], most: int) -> Scaled:
    """Decide which replica serves each request.

    Args:
        times: of the arrivals, ascending.
        most: replicas at once.
    """
    result, last, numbers = Scaled(), times[0], count()
    recent: deque[float] = deque()
    asked: deque[tuple[float, int]] = deque()  # (time, replicas), so that the first asks for most
    held = [(next(numbers), -math.inf) for _ in range(min(settings.least, most))]  # and since when they serve
    for turn, now in enumerate(times):
        result.seconds += (now - last) * len(held)
        last = now
        recent.append(now)
        while recent[0] <= now - settings.window:
            recent.popleft()
        wanted = math.ceil(len(recent) / settings.window / settings.rate)
        wanted = min(most, max(settings.least, wanted))
        while asked and asked[-1][1] <= wanted:
            asked.pop()
        asked.append((now, wanted))
        while asked[0][0] <= now - settings.window:
            asked.popleft()
        held += [(next(numbers), now + settings.startup) for _ in range(wanted - len(held))]
        del held[asked[0][1] :]
        serving = [number for number, since in held if since <= now]
        result.replica_of.append(serving[turn % len(serving)])
        result.peak = max(result.peak, len(held))
    result.last = len(held)
    return result
