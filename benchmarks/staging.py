"""Measure the transfers to a machine and back: repeated staging, an interrupted upload, and status checks.

    python benchmarks/staging.py [--against COMMIT]

The benchmark stages a bundle with a large input twice, as two runs would, on this machine as a host and over
a private sshd on the loopback interface. It then interrupts an upload in the middle and stages it again, and
checks the status of a waiting attempt, as the reconciler does. With `--against`, it measures another commit
of this repository in the same way, in turns. Writes results/staging.json.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "staging.json"
ABOUT = """\
Perilune stages a bundle with one large input of random bytes on a new machine (*first*), and then again for
another run (*second*). The "new machine" is the local one, reached through a pipe or through a real `sshd` on
the loopback interface. The times therefore include no network.

* *After a cut* is the time to finish staging when the connection failed half-way.
* *A poll* is the reconciler's query about a live attempt, once per second: its CPU time on both ends together
  and its median elapsed time.
* *Now* and *before* are the commits named under *Setting*. The earlier one sent a whole tar file each time
  and needed two calls per poll."""


def arm(size: int, looks: int) -> dict[str, Any]:
    """The figures of the package that this process imports."""
    sys.path.insert(0, str(ROOT / "tests" / "drill"))
    from hosts_cases import NearbyHost, interpreter
    from sshd_cases import sshd

    from perilune.execution.hosts.protocol import HostUnreachableError
    from perilune.execution.hosts.ssh import SshHost
    from perilune.execution.limits import AttemptLimits
    from perilune.execution.placements.remote import RemotePlacement, Site

    class Counting(NearbyHost):
        """Counts the sent bytes. With `cuts`, it interrupts the first large upload in the middle."""

        sent, cuts = 0, False

        def run(self, command: Any, *, source: BinaryIO | None = None, **rest: Any) -> Any:
            data = b"" if source is None else source.read()
            if self.cuts and len(data) > size // 2:
                self.cuts = False
                super().run(command, source=io.BytesIO(data[: len(data) // 2]), **rest)
                raise HostUnreachableError("cut")
            self.sent += len(data)
            return super().run(command, source=io.BytesIO(data), **rest)

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        bundle = large_bundle(folder, size)
        python = interpreter(folder / "python")

        def placement(host: Any, workspace: str) -> RemotePlacement:
            site = Site(python=str(python), installed=True, workspace=str(folder / workspace))
            return RemotePlacement(host, site, AttemptLimits())

        near = Counting()
        target = placement(near, "near")
        for what in ("first", "second"):
            near.sent = 0
            results[f"pipe, {what}: seconds"] = staged(target, bundle, folder, what)
            results[f"pipe, {what}: megabytes"] = near.sent / 1e6
        shutil.rmtree(folder / "near")
        near.cuts = True
        try:
            staged(target, bundle, folder, "cut")
        except HostUnreachableError:
            near.sent = 0
        results["pipe, after a cut: seconds"] = staged(target, bundle, folder, "cut")
        results["pipe, after a cut: megabytes"] = near.sent / 1e6
        shutil.rmtree(folder / "near")
        results |= {f"pipe, a poll: {key}": value for key, value in looked(target, folder, looks, []).items()}
        with sshd(folder / "sshd") as server:
            host = SshHost(server.settings(), folder / "keys")
            target = placement(host, "far")
            for what in ("first", "second"):
                results[f"ssh, {what}: seconds"] = staged(target, bundle, folder, f"far-{what}")
            shutil.rmtree(folder / "far")
            figures = looked(target, folder, looks, [server.process.pid])
            results |= {f"ssh, a poll: {key}": value for key, value in figures.items()}
            host.disconnect()
    return results


def large_bundle(folder: Path, size: int) -> Path:
    """A bundle whose input is one file of random bytes."""
    from drill_cases import drill_job

    from perilune.bundle.freeze import freeze
    from perilune.bundle.job import InputReference

    model = folder / "model"
    with model.open("wb") as file:
        for _ in range(size // (1 << 20)):
            file.write(os.urandom(1 << 20))
    model.chmod(0o444)
    reference = InputReference(name="data", path="inputs/data", digest="", kind="dataset")
    job = drill_job(data="data").model_copy(update={"inputs": (reference,)})
    freeze(job, {"data": model}, folder / "bundle")
    return folder / "bundle"


def staged(placement: Any, bundle: Path, folder: Path, run: str) -> float:
    """Stage a bundle, and return the seconds."""
    from placement_conformance import assigned, stage

    attempt = assigned(folder / run, 1, f"01{run.replace('-', '').upper()}")
    began = time.perf_counter()
    stage(placement, attempt, bundle)
    return time.perf_counter() - began


def looked(placement: Any, folder: Path, looks: int, servers: list[int]) -> dict[str, float]:
    """Median milliseconds of a status check of a waiting attempt."""
    from drill_cases import drill_bundle
    from placement_conformance import assigned, stage, until

    gate = folder / f"gate-{len(servers)}"
    bundle = drill_bundle(folder / f"waiting-{len(servers)}", gate=str(gate), add_completion="a line")
    attempt = assigned(folder / f"looked-{len(servers)}")
    stage(placement, attempt, bundle)
    placement.start(attempt)

    def look() -> bool:
        """Check the status as the reconciler does for a running attempt."""
        status = placement.observe(attempt)
        if status.claim is not None and getattr(status, "more", True):
            placement.pull(attempt)
        return bool((attempt.directory / "runtime" / "runtime.log").exists())

    until(look, "a log")
    wall, before = [], processor_seconds(servers)
    for _ in range(looks):
        began = time.perf_counter()
        look()
        wall.append(time.perf_counter() - began)
    processor = processor_seconds(servers) - before
    gate.touch()
    until(lambda: placement.observe(attempt).verdict is not None, "its end")
    return {
        "CPU ms": 1e3 * processor / looks,
        "elapsed ms": 1e3 * statistics.median(wall),
    }


def processor_seconds(servers: list[int]) -> float:
    """CPU seconds of this process and `servers`, with all their ended and living children."""
    import psutil

    total = sum(os.times()[:4])
    for pid in servers:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:  # counted with its parent from now on
                continue
    return total


def turns(checkouts: dict[str, Path], rounds: int, size: int, looks: int) -> dict[str, list[dict[str, Any]]]:
    """Measure all checkouts in turns, each in its own process."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            command = [sys.executable, __file__, "--arm", "--size", str(size), "--looks", str(looks)]
            environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            results[name].append(json.loads(done.stdout))
    return results


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, in short."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", help="another commit of this repository, to take turns with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=500 << 20, help="bytes of the large input")
    parser.add_argument("--looks", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(arm(arguments.size, arguments.looks)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"now": ROOT}
        if arguments.against:
            checkouts = {"before": Path(folder) / "before", **checkouts}
            subprocess.run(["git", "clone", "-q", str(ROOT), str(checkouts["before"])], check=True)
            subprocess.run(
                ["git", "-C", str(checkouts["before"]), "checkout", "-q", arguments.against], check=True
            )
        results = turns(checkouts, arguments.rounds, arguments.size, arguments.looks)
    from perilune.bundle.machine import describe_machine

    document = {
        "title": "Time to stage a bundle and to poll an attempt",
        "about": ABOUT,
        "command": f"python benchmarks/staging.py --against {arguments.against}",
        "measured": {
            key: {name: [round(row[key], 3) for row in figures] for name, figures in results.items()}
            for key in results["now"][0]
        },
        "size of the large input, MB": round(arguments.size / 1e6, 1),
        "commit of `before`": arguments.against,
        "commit of `now`": commit_of(ROOT),
        "machine": describe_machine(),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["measured"], indent=1))


if __name__ == "__main__":
    main()
