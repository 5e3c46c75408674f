"""Compare two rules of asynchronous sampling in a queue model: paced admission, and dropping old episodes.

    python benchmarks/pacing.py [--seeds 0 1 2]

Paced admission uses the function of real runs (`admission_limit`). Writes results/pacing.json.
"""

import heapq
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scipy.stats import ks_2samp

from perilune.tasks.rl.asynchronous.sampler import admission_limit
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings
from recipe_runs import document, options, write

SLOTS, BATCH, TRAINING, STEPS = 64, 32, 0.4, 1500
ABOUT = f"""\
The model simulates {STEPS:,} training steps. {SLOTS} slots play episodes whose durations are lognormal with
sigma 1 and mean 1. A training step uses {BATCH} episodes and takes {TRAINING} units of time.

* `pace` starts an episode only while fewer than (completed steps + staleness + 1) × {BATCH} episodes have
  been started, and trains on the finished episodes that were started first.
* `drop` keeps all slots busy, trains on episodes in the order of completion, and drops episodes older than
  `staleness` steps.
* The *KS test* (two-sample Kolmogorov-Smirnov) compares the durations of trained and of sampled episodes. A
  small p means that they differ.
* The *age* of an episode is the number of steps between its start and its training, counted as if the weights
  did not change during the episode.
* *Dropped* is the share of the episodes. *Trainer idle* is the share of the time in which the trainer
  waits."""


@dataclass(frozen=True)
class Played:
    """An episode: its number, duration, and the completed steps when it began."""

    number: int
    duration: float
    version: int


class Model:
    """The queue model: slots that play episodes, and a trainer that takes batches of them."""

    def __init__(self, rule: str, staleness: int, seed: int) -> None:
        self.rule, self.settings = rule, AsynchronousSettings(staleness=staleness)
        self.random = random.Random(seed)
        self.now = self.idle = 0.0
        self.step = self.admitted = self.dropped = 0
        self.running: list[tuple[float, int, Played]] = []  # a heap by the time of the end
        self.finished: list[Played] = []
        self.sampled: list[float] = []
        self.trained: list[float] = []
        self.ages: list[int] = []

    def run(self) -> None:
        """Train all steps."""
        while self.step < STEPS:
            self._admit()
            while (batch := self._batch()) is None:
                before = self.now
                self._next()
                self.idle += self.now - before
            self._train(batch)

    def _admit(self) -> None:
        most = math.inf
        if self.rule == "pace":
            most = admission_limit(self.settings, BATCH, self.step, STEPS)
        while len(self.running) < SLOTS and self.admitted < most:
            duration = self.random.lognormvariate(-0.5, 1.0)
            episode = Played(self.admitted, duration, self.step)
            heapq.heappush(self.running, (self.now + duration, episode.number, episode))
            self.sampled.append(duration)
            self.admitted += 1

    def _next(self) -> None:
        """Advance to the next end of an episode."""
        self.now, _, episode = heapq.heappop(self.running)
        self.finished.append(episode)
        self._admit()

    def _batch(self) -> list[Played] | None:
        if self.rule == "pace":
            self.finished.sort(key=lambda episode: episode.number)
        else:
            young = [item for item in self.finished if self.step - item.version <= self.settings.staleness]
            self.dropped += len(self.finished) - len(young)
            self.finished = young
        if len(self.finished) < BATCH:
            return None
        batch, self.finished = self.finished[:BATCH], self.finished[BATCH:]
        return batch

    def _train(self, batch: list[Played]) -> None:
        """Train on a batch, during which other episodes end."""
        until = self.now + TRAINING
        while self.running and self.running[0][0] <= until:
            self._next()
        self.now = until
        self.trained += [episode.duration for episode in batch]
        self.ages += [self.step - episode.version for episode in batch]
        self.step += 1


def main() -> None:
    arguments = options(__doc__, "pacing").parse_args()
    began = time.monotonic()
    rows = list(measure(arguments.seeds))
    write(arguments.out, report(rows) | document("pacing.py", sys.argv[1:], began))


def measure(seeds: list[int]) -> Iterator[dict[str, Any]]:
    for rule in ("drop", "pace"):
        for staleness in (1, 2, 4):
            models = [Model(rule, staleness, seed) for seed in seeds]
            for model in models:
                model.run()
            yield {
                "rule": rule,
                "staleness": staleness,
                "mean duration, trained / sampled": mean(
                    fmean(model.trained) / fmean(model.sampled) for model in models
                ),
                "p of the KS test, by seed": [
                    float(ks_2samp(model.trained, model.sampled).pvalue) for model in models
                ],
                "mean age, steps": mean(fmean(model.ages) for model in models),
                "largest age, steps": max(max(model.ages) for model in models),
                "dropped": mean(model.dropped / model.admitted for model in models),
                "trainer idle": mean(model.idle / model.now for model in models),
                "trained episodes per unit of time": mean(len(model.trained) / model.now for model in models),
            }


def mean(values: Iterator[float]) -> float:
    return fmean(list(values))


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    drop, pace = ([row for row in rows if row["rule"] == rule] for rule in ("drop", "pace"))
    shares = [row["mean duration, trained / sampled"] for row in drop]
    findings = [
        f"Dropping changes which episodes are trained on: trained episodes last {min(shares):.2f} to"
        f" {max(shares):.2f} times as long as sampled ones on average (largest p of the KS test:"
        f" {max(p for row in drop for p in row['p of the KS test, by seed']):.2g}).",
        "Pacing does not change which episodes are trained on (smallest p of the KS test:"
        f" {min(p for row in pace for p in row['p of the KS test, by seed']):.2g}).",
        "Pacing bounds the mean age, not the largest age. The age of tokens is bounded, because new weights"
        " arrive during an episode.",
    ]
    return {
        "title": "Pacing against dropping in a queue model",
        "about": ABOUT,
        "findings": findings,
        "by rule": rows,
    }


if __name__ == "__main__":
    main()
