"""Run one case after the other: load all engines, warm them up, and let each take its turn in every round.

Other load on the machine then affects all engines alike. Waiting processes are stopped, so that no engine's
threads spin while another engine is measured.
"""

import dataclasses
import datetime
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .checkpoints import checkpoint
from .environments import CACHE, ENGINES, LIMITS, Engine
from .floor import Limits, floor
from .outcome import agreement, drawn_alike
from .shapes import SHAPES, Case

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "transformers"
HELD = 2.0  # most memory of an engine as a multiple of the weights, in addition to:
PROCESS_BYTES = 500 << 20
SHARE = 0.8  # share of the free memory that may be used


class EngineError(Exception):
    """The process of an engine ended before it answered. The message is the end of its output."""


class Worker:
    """A process that samples with one engine, and is stopped between requests."""

    def __init__(self, name: str, engine: Engine, setup: Mapping[str, Any], *, here: bool) -> None:
        self.name = name
        self._log = CACHE / "logs" / f"{name}-{os.getpid()}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        cpus = sorted(os.sched_getaffinity(0))[: setup["threads"]]
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup["threads"]), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [engine.python(here=here), "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),  # noqa: PLW1509 - before any thread
            )
        self._send({"prepare": False, **setup, "module": engine.module, "options": engine.options})

    def wait(self) -> None:
        """Wait until the process has ended."""
        if self._process.wait():
            self._fail()
        self.close()

    def ready(self) -> None:
        """Wait until the process has loaded its checkpoint."""
        self._answer()

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Return the answer of the process, and stop the process again."""
        self._process.send_signal(signal.SIGCONT)
        self._send({"do": what, **more})
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.unlink(missing_ok=True)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        self._process.send_signal(signal.SIGSTOP)
        return dict(json.loads(line))

    def _fail(self) -> None:
        self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        raise EngineError(lines[-1] if lines else f"ended with {self._process.returncode}")


class Contestant:
    """One engine in one case. After a failure of its process, it does not take part.

    Attributes:
        failed: the end of the output of its failed process, or None.
        greedy: greedy tokens and their log-probs.
        rounds: results of the measured rounds.
        about: versions, memory and other facts, read at the end.
    """

    def __init__(self, name: str, setup: Mapping[str, Any], *, here: bool) -> None:
        self.name, self._setup, self._here = name, setup, here
        self.failed: str | None = None
        self.greedy: dict[str, Any] = {}
        self.rounds: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self._worker: Worker | None = None

    @contextmanager
    def _sitting_out(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self.failed = str(error)

    def enter(self) -> None:
        """Convert the checkpoint, load it, warm up."""
        with self._sitting_out():
            engine = ENGINES[self.name]
            if engine.prepares:
                Worker(self.name, engine, {**self._setup, "prepare": True}, here=self._here).wait()
            self._worker = Worker(self.name, engine, self._setup, here=self._here)
            self._worker.ready()
            self.greedy = self._worker.ask("greedy")
            self._worker.ask("round", seed=0)

    def play(self, seed: int) -> None:
        """Run a measured round."""
        if self._worker and self.failed is None:
            with self._sitting_out():
                self.rounds.append(self._worker.ask("round", seed=seed))

    def finish(self) -> None:
        """Ask for the facts in `about`."""
        if self._worker and self.failed is None:
            with self._sitting_out():
                self.about = self._worker.ask("about")

    def close(self) -> None:
        """End the process of the engine."""
        if self._worker:
            self._worker.close()

    def figures(self) -> dict[str, Any]:
        """Figures of the rounds, with the values of all rounds if they may differ."""
        rounds = self.rounds
        figures: dict[str, Any] = {
            "tokens": rounds[0]["tokens"],
            "seconds": [row["seconds"] for row in rounds],
            "processor_seconds": [row["processor_seconds"] for row in rounds],
            "first_token_seconds": [row["first_token_seconds"] for row in rounds],
            "faults": sorted({fault for row in rounds for fault in row["faults"]}),
        }
        for name in ("mean_logprob", "logprob_deviation"):
            values = [row[name] for row in rounds if row[name] is not None]
            figures[name] = statistics.fmean(values) if values else None
        return figures


def run(case: Case, engines: Sequence[str], repeats: int, *, here: bool = False) -> Iterator[dict[str, Any]]:
    """Yield one record for each of the named engines in `ENGINES`.

    The engines run one after the other, instead of in turns, if they do not fit into memory together.

    Args:
        repeats: measured rounds, after a warm-up round.
        here: use the running interpreter for every engine.
    """
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = checkpoint(CACHE / "checkpoints", case.model, case.dtype)
    setup = {
        "checkpoint": str(path),
        "model": case.model,
        "dtype": case.dtype,
        "threads": case.cores,
        "requests": [request.as_json() for request in case.requests()],
    }
    contestants = [Contestant(name, setup, here=here) for name in engines]
    measured: list[dict[str, Any]] = []
    load: list[float] = []
    together = (
        len(engines) * (HELD * (path / "model.safetensors").stat().st_size + PROCESS_BYTES)
        < SHARE * _available_bytes()
    )
    for group in [contestants] if together else [[contestant] for contestant in contestants]:
        with ExitStack() as stack:
            machine = Worker("limits", LIMITS, setup, here=here)
            stack.callback(machine.close)
            machine.ready()
            for contestant in group:
                stack.callback(contestant.close)
                contestant.enter()
            for number in range(repeats):
                load.append(round(os.getloadavg()[0], 2))
                measured.append(machine.ask("measure"))
                first = number % len(group)
                for contestant in group[first:] + group[:first]:
                    contestant.play(number + 1)
            for contestant in group:
                contestant.finish()
    limits = Limits(
        {dtype: max(row["product"][dtype] for row in measured) for dtype in measured[0]["product"]},
        max(row["read"] for row in measured),
    )
    least = floor(SHAPES[case.model], case.requests(), case.dtype, limits)
    well = {contestant.name: contestant for contestant in contestants if contestant.failed is None}
    reference = _reference(case, well[REFERENCE].greedy if REFERENCE in well else None)
    base = well[REFERENCE].figures() if REFERENCE in well else None
    for contestant in contestants:
        record = {
            "model": case.model,
            "workload": case.workload,
            "weights": case.dtype,
            "cores": case.cores,
            "engine": contestant.name,
            "measured_at": begun,
            "load_average": load,
            "took_turns": together,
        }
        if contestant.failed is not None:
            yield {**record, "failed": contestant.failed}
            continue
        figures = contestant.figures()
        if base and not drawn_alike(figures, base):
            figures["faults"].append(f"samples that are not distributed as those of {REFERENCE}")
        yield {
            **record,
            **contestant.about,
            **figures,
            "greedy": agreement(contestant.greedy, reference) if reference else None,
            "floor": dataclasses.asdict(least),
            "limits": dataclasses.asdict(limits),
        }


def _available_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _reference(case: Case, fresh: dict[str, Any] | None) -> dict[str, Any] | None:
    """Greedy tokens of transformers from this run, otherwise from the last run with it, or None."""
    path = CACHE / "references" / f"{case.model}-{case.dtype}.json"
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fresh))
    return json.loads(path.read_text()) if path.exists() else None
