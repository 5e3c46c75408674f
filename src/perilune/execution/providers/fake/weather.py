"""What goes wrong in the fake cloud: by chance, seeded, or as a script says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from perilune.files import append_json_line


class Fault(StrEnum):
    """One kind of failure."""

    ERROR_BEFORE = "error_before"  # 500, and nothing was done
    ERROR_AFTER = "error_after"  # 500, and it was done
    LOST_ANSWER = "lost_answer"  # it was done, and the connection closes without a word
    LATE_EFFECT = "late_effect"  # 500 to a creation that happens later
    PREEMPTED = "preempted"  # the machine is taken away, after a notice or without
    HOST_DEATH = "host_death"  # the machine and all on it are gone at once
    LINK_CUT = "link_cut"  # the machine lives, and cannot be reached for a while


@dataclass(frozen=True, slots=True)
class Weather:
    """How often things go wrong, and how the cloud behaves when they do not.

    Attributes:
        seed: of all chance here.
        latency: most seconds that a call takes longer.
        error_before, error_after, lost_answer: probability a call.
        late_effect, late_seconds: probability a creation, and after how long it happens.
        preemptions, host_deaths, link_cuts: expected number a machine and minute.
        notice_seconds: between the notice of a preemption and the preemption; 0 is without notice.
        cut_seconds: how long a link stays cut.
        visibility_seconds: most seconds until what was done is seen in answers.
        boot_seconds: from a creation to a machine that answers.
        forget_seconds: after which an ended machine is not listed any more.
        clock_skew: seconds by which the cloud's clock is wrong.
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

    def asdict(self) -> dict[str, Any]:
        """As JSON-able fields."""
        return asdict(self)


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
    """The weather of that name ("calm" or "stormy")."""
    return replace(WEATHERS[name], seed=seed)


class Storm:
    """Decides what goes wrong next, and writes down what did.

    Args:
        journal: file that gets a line for every fault that was thrown.
    """

    def __init__(self, weather: Weather, journal: Path) -> None:
        self.weather, self._journal = weather, journal
        self._chance = random.Random(weather.seed)
        self._scripts: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.thrown: Counter[str] = Counter()

    def script(self, call: str, fault: Fault, times: int) -> None:
        """Throw `fault` at the next `times` calls named `call`, before any chance is asked."""
        with self._lock:
            self._scripts = [one for one in self._scripts if one["call"] != call]
            self._scripts.append({"call": call, "fault": fault, "times": times})

    def at_call(self, call: str, key: str) -> Fault | None:
        """What befalls this call, or None."""
        fault = self._scripted(call) or self._by_chance(call)
        if fault is not None:
            self.note(fault, call=call, key=key)
        return fault

    def befalls(self, per_minute: float, seconds: float) -> bool:
        """Whether something that is expected so often happens within `seconds`."""
        with self._lock:
            return self._chance.random() < per_minute * seconds / 60.0

    def seconds(self, most: float) -> float:
        """A random time up to `most` seconds."""
        with self._lock:
            return self._chance.uniform(0.0, most)

    def note(self, fault: Fault, **about: str) -> None:
        """Write down that a fault was thrown."""
        with self._lock:
            self.thrown[fault.value] += 1
        append_json_line(self._journal, {"fault": fault.value, **about})

    def _scripted(self, call: str) -> Fault | None:
        with self._lock:
            for script in self._scripts:
                if script["call"] == call and script["times"] > 0:
                    script["times"] -= 1
                    return Fault(script["fault"])
        return None

    def _by_chance(self, call: str) -> Fault | None:
        now = self.weather
        kinds = {
            Fault.ERROR_BEFORE: now.error_before,
            Fault.ERROR_AFTER: now.error_after,
            Fault.LOST_ANSWER: now.lost_answer,
            Fault.LATE_EFFECT: now.late_effect if call == "create" else 0.0,
        }
        with self._lock:
            drawn = self._chance.random()
        for fault, probability in kinds.items():
            if drawn < probability:
                return fault
            drawn -= probability
        return None
