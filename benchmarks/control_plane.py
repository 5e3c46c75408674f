"""Time the control plane in a home with ten thousand runs and a million events.

    python benchmarks/control_plane.py

The benchmark writes such a home in the format of the control plane, in which the hash of each event covers
the previous event. 500 attempts are active, each with a directory, the claim of a living process and a
heartbeat. Each round lists the latest runs, finds a run, submits a frozen bundle, runs the pass of the
reconciler over all active attempts (every command runs it before it answers), and verifies the record. The
times are medians of the rounds, in one process on one core. The commands are also timed from outside,
including the start of Python. Writes results/control_plane.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from perilune.bundle.freeze import copy_for_attempt, freeze
from perilune.bundle.job import Job, Resources
from perilune.bundle.machine import describe_machine
from perilune.control.queries.lookup import find_run, latest_experiments, stage_statuses
from perilune.control.record.home import Home
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Attempt, Event, Experiment, Run, Stage, event_hash, verify_events
from perilune.control.runs.experiments import Control
from perilune.control.runs.submission import Submission, submit_stage
from perilune.execution.claim import Claim
from perilune.execution.processes import ProcessIdentity
from perilune.files import write_json

RESULT = Path(__file__).parent / "results" / "control_plane.json"
STAGES = 5  # of an experiment
BATCH = 20_000  # rows per insert


def fill(control: Control, runs: int, events: int, live: int, worker: ProcessIdentity) -> None:
    """Write `runs` runs and `events` events. The last `live` runs are active."""
    began = time.time() - runs * 60
    experiments, stages, rows, attempts = [], [], [], []
    for number in range(runs):
        run, created = new_ulid(), began + number * 60
        experiment = f"{number // STAGES:026d}"
        name, position, is_live = f"stage{number % STAGES}", number % STAGES, number >= runs - live
        if position == 0:
            fields = {"name": f"recipe{number // STAGES}", "recipe_digest": experiment}
            experiments.append({"id": experiment, "created": created, "used": created, **fields})
        stages.append(
            {"experiment_id": experiment, "position": position, "name": name, "task": "rl", "run_id": run}
        )
        state = "active" if is_live else "succeeded" if number % 7 else "failed"
        ended = None if is_live else created + 50
        rows.append(
            {
                "id": run,
                "submit_key": run,
                "experiment_id": experiment,
                "stage": name,
                "task": "rl",
                "bundle_digest": f"{number:064x}",
                "state": state,
                "current_epoch": 1,
                "created": created,
                "ended": ended,
            }
        )
        attempts.append(
            {
                "run_id": run,
                "number": 1,
                "state": "running" if is_live else state,
                "reachability": "reachable",
                "placement": "local",
                "launcher": "process",
                "created": created,
                "ended": ended,
            }
        )
        under_way(control.home, run, worker if is_live else None)
    with control.store.transaction() as session:
        for model, values in ((Experiment, experiments), (Run, rows), (Stage, stages), (Attempt, attempts)):
            session.execute(insert(model), values)
    previous, values = "", []
    for number in range(events):
        row = Event(
            time=began + number,
            run_id=rows[number % runs]["id"],
            epoch=1,
            kind="attempt.running",
            detail={"cause": ""},
        )
        previous = row.hash = event_hash(previous, row)
        names = ("time", "run_id", "epoch", "kind", "detail", "hash")
        values.append({name: getattr(row, name) for name in names})
        if len(values) == BATCH or number == events - 1:
            with control.store.transaction() as session:
                session.execute(insert(Event), values)
            values = []


def under_way(home: Home, run: str, worker: ProcessIdentity | None) -> None:
    """Make the directory of a run, and with a worker also that of its active attempt."""
    runtime = home.attempt(run, 1) / "runtime"
    if worker is None:
        home.run(run).mkdir()
        return
    runtime.mkdir(parents=True)
    claim = Claim(1, worker.host, worker.boot_id, worker.pid, worker.starttime, run)
    write_json(runtime / "claim.json", asdict(claim))
    write_json(runtime / "heartbeat.json", {"count": 60, "epoch": 1})


def seconds(work: Callable[[], Any], rounds: int) -> list[float]:
    """Wall seconds of each round, after a warm-up round."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def measure(runs: int, events: int, live: int, rounds: int) -> dict[str, Any]:
    """Measure all operations."""
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with tempfile.TemporaryDirectory() as folder:
        home = Home.open(Path(folder) / "home")
        control = Control(home)
        worker = ProcessIdentity.of(sleeping.pid)
        assert worker is not None
        fill(control, runs, events, live, worker)
        last = control.reconciler.reconcile_all(act=False)[-1].id
        bundle = Path(folder) / "bundle"
        model = {"preset": "tiny"}
        job = Job(
            task="new_model", stage="new", spec={}, model=model, environment={}, seed=0, resources=Resources()
        )
        digest = freeze(job, {}, bundle)
        experiment = f"{0:026d}"

        def submit_one() -> None:
            def copied(destination: Path) -> str:
                copy_for_attempt(bundle, destination)
                return digest

            run = submit_stage(home, control.store, Submission(experiment, "stage0", "new_model"), copied)
            with control.store.transaction() as session:  # so that the next submission makes a new run
                row = session.get_one(Run, run.id)
                row.state, row.desired = "cancelled", "cancelled"

        def verify() -> None:
            with control.store.snapshot() as session:
                assert verify_events(session) is None

        def command(*words: str) -> Callable[[], None]:
            environment = os.environ | {"PERILUNE_HOME": str(home.root)}
            line = [sys.executable, "-m", "perilune.cli.main", *words]
            return lambda: (
                subprocess.run(line, env=environment, stdout=subprocess.DEVNULL, check=True) and None
            )

        try:
            measured = {
                "list the latest runs": seconds(
                    lambda: stage_statuses(control, latest_experiments(control, 20)), rounds
                ),
                "find a run by the beginning of its id": seconds(
                    lambda: find_run(control, last[:20]), rounds
                ),
                "submit a frozen bundle": seconds(submit_one, rounds),
                f"reconcile {live} live runs": seconds(
                    lambda: control.reconciler.reconcile_all(act=False), rounds
                ),
                f"verify {events:,} events": seconds(verify, 1),
                "`perilune runs`, including process start": seconds(command("runs"), 3),
                "`perilune --version`, including process start": seconds(command("--version"), 3),
            }
        finally:
            sleeping.kill()
            sleeping.wait()
            control.store.close()
        size = home.database.stat().st_size
    return {
        "runs": runs,
        "events": events,
        "live runs": live,
        "database_bytes": size,
        "milliseconds": {
            name: {"median": round(1e3 * statistics.median(times), 2), "maximum": round(1e3 * max(times), 2)}
            for name, times in measured.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    figures = measure(arguments.runs, arguments.events, arguments.live, arguments.rounds)
    document = {
        "title": "Control plane with 10,000 runs",
        "about": "Each live run has a directory, the claim of a living process and a heartbeat. *Reconcile* "
        "is the pass over all live runs that every command makes before it answers. *Verify* checks the "
        "hash of each event, which covers the previous event. The rows *including process start* are times "
        "of a whole command.",
        "command": "python benchmarks/control_plane.py",
        **figures,
        "machine": describe_machine(),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
