"""Fault injection for the fake cloud: random with a seed, or scripted."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from perilune.files import append_json_line


class Fault(StrEnum):
    """A kind of fault."""

    ERROR_BEFORE = "error_before"  # status 500, without the effect
    ERROR_AFTER = "error_after"  # status 500, after the effect
    LOST_ANSWER = "lost_answer"  # the effect happens, and the connection closes without an answer
    LATE_EFFECT = "late_effect"  # status 500, and the machine is created later
    PREEMPTED = "preempted"  # the machine is preempted, with or without notice
    HOST_DEATH = "host_death"  # the machine and everything on it disappear at once
    LINK_CUT = "link_cut"  # the machine lives, but is unreachable for a while


@dataclass(frozen=True, slots=True)
class Weather:
    """The rates of faults, and the timing of the cloud.

    Attributes:
        seed: of all random decisions.
        latency: largest additional delay of a call, in seconds.
        error_before, error_after, lost_answer: probability per call.
        late_effect, late_seconds: probability per creation, and its delay.
        preemptions, host_deaths, link_cuts: expected number per machine and minute.
        notice_seconds: between the notice of a preemption and the preemption; 0 is without notice.
        cut_seconds: duration of an unreachable period.
        visibility_seconds: longest time until an effect is visible in answers.
        boot_seconds: from a creation until the machine accepts commands.
        forget_seconds: time after which an ended machine is no longer listed.
        clock_skew: error of the cloud's clock, in seconds.
    """

    seed: int = 0
    latency: float = 0.0
    error_before: float = 0.0
    error_after: float = 0.0
    lost_answer: float = 0.0
    late_effect: float = 0.0
    late_seconds: float = 2.0
    preemptions: float = 0.0
    notice_seconds: float = 0.0
    host_deaths: float = 0.0
    link_cuts: float = 0.0
    cut_seconds: float = 2.0
    visibility_seconds: float = 0.0
    boot_seconds: float = 0.0
    forget_seconds: float = 60.0
    clock_skew: float = 0.0


WEATHERS = {
    "calm": Weather(),
    "stormy": Weather(
        latency=0.05,
        error_before=0.05,
        error_after=0.05,
        lost_answer=0.05,
        late_effect=0.1,
        preemptions=1.0,
        notice_seconds=1.0,
        host_deaths=1.0,
        link_cuts=3.0,
        visibility_seconds=0.5,
        boot_seconds=0.2,
        forget_seconds=20.0,
        clock_skew=86400.0,
    ),
}


def weather(name: str, seed: int) -> Weather:
    """Return the named weather ("calm" or "stormy") with a seed."""
    return replace(WEATHERS[name], seed=seed)


class FaultInjector:
    """Decides which faults to inject, and records them.

    Args:
        journal: file that gets a line for every injected fault.
    """

    def __init__(self, weather: Weather, journal: Path) -> None:
        self.weather, self._journal = weather, journal
        self._chance = random.Random(weather.seed)
        self._scripts: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.injected: Counter[str] = Counter()

    def script(self, call: str, fault: Fault, times: int) -> None:
        """Inject `fault` into the next `times` calls named `call`, before any random fault."""
        with self._lock:
            self._scripts = [script for script in self._scripts if script["call"] != call]
            self._scripts.append({"call": call, "fault": fault, "times": times})

    def fault_for(self, call: str, key: str) -> Fault | None:
        fault = self._scripted(call) or self._by_chance(call)
        if fault is not None:
            self.note(fault, call=call, key=key)
        return fault

    def occurs(self, per_minute: float, seconds: float) -> bool:
        """Return whether an event with this rate per minute occurs within `seconds`."""
        with self._lock:
            return self._chance.random() < per_minute * seconds / 60.0

    def seconds(self, most: float) -> float:
        """Return a random time of at most `most` seconds."""
        with self._lock:
            return self._chance.uniform(0.0, most)

    def note(self, fault: Fault, **about: str) -> None:
        with self._lock:
            self.injected[fault.value] += 1
        append_json_line(self._journal, {"fault": fault.value, **about})

    def _scripted(self, call: str) -> Fault | None:
        with self._lock:
            for script in self._scripts:
                if script["call"] == call and script["times"] > 0:
                    script["times"] -= 1
                    return Fault(script["fault"])
        return None

    def _by_chance(self, call: str) -> Fault | None:
        kinds = {
            Fault.ERROR_BEFORE: self.weather.error_before,
            Fault.ERROR_AFTER: self.weather.error_after,
            Fault.LOST_ANSWER: self.weather.lost_answer,
            Fault.LATE_EFFECT: self.weather.late_effect if call == "create" else 0.0,
        }
        with self._lock:
            drawn = self._chance.random()
        for fault, probability in kinds.items():
            if drawn < probability:
                return fault
            drawn -= probability
        return None
