"""`perilune lab`: inject failures into short runs on a fake cloud and check that they recover."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from perilune.cli.arguments import Json, check_output_folder
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.lab.laboratory import Laboratory, Snapshot

TICK_SECONDS, LINE_SECONDS = 0.5, 10.0  # seconds between two ticks; between two lines without a terminal
KILLS_PER_MINUTE = {"calm": 0.0, "stormy": 3.0}  # expected kills of the control process per minute


def lab(
    *,
    weather: Annotated[
        Literal["calm", "stormy"], typer.Option(help="calm: no failures; stormy: with failures.")
    ] = "stormy",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to submit runs.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed that selects the failures.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Number of runs that are live at a time.")] = 4,
    patience: Annotated[
        float,
        typer.Option(
            min=1, help="Maximum seconds to wait, without further failures, until the last runs end."
        ),
    ] = 300.0,
    keep: Annotated[
        Path | None,
        typer.Option(
            callback=check_output_folder,
            help="New folder to keep all files in. By default the files are deleted.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run many short runs on a fake cloud, inject failures, and check the invariants I1 to I8.

    Calls to the cloud fail before or after they take effect, responses are lost, machines start late, are
    preempted or die, connections drop, and the control process and the cloud are killed with SIGKILL. No real
    machine is rented. docs/how-to/lab.md lists the invariants. Exits with 1 when an invariant is broken.

    \b
    perilune lab
    perilune lab --weather calm --seconds 20
    perilune lab --seconds 600 --seed 7 --json
    """
    from perilune.execution.providers.fake.weather import weather as weather_of
    from perilune.lab.invariants import check_invariants
    from perilune.lab.laboratory import Laboratory, Plan

    plan = Plan(weather_of(weather, seed), seed=seed, at_once=at_once, kills=KILLS_PER_MINUTE[weather])
    with _lab_folder(keep) as folder, Laboratory(folder, plan) as laboratory:
        _run_lab(laboratory, seconds, patience, silent=as_json)
        verdicts, last = check_invariants(laboratory), laboratory.snapshot()
    broken = [verdict for verdict in verdicts if verdict.broken]
    if as_json:
        print_json(asdict(last) | {"seed": seed, "invariants": [asdict(verdict) for verdict in verdicts]})
    else:
        for line in _format_lines(last):
            echo(line)
        for verdict in verdicts:
            echo(f"{'BROKEN' if verdict.broken else 'holds '}  {verdict.name}  {verdict.says}")
            for example in verdict.broken[:5]:
                echo(f"            {example}")
    if broken:
        raise typer.Exit(1)


def _run_lab(laboratory: Laboratory, seconds: float, patience: float, *, silent: bool) -> None:
    with _show_snapshots(silent) as show:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            show(laboratory.tick(), "")
            time.sleep(TICK_SECONDS)
        laboratory.stop_failures()
        deadline = time.monotonic() + patience
        while not laboratory.is_settled() and time.monotonic() < deadline:
            show(laboratory.tick(submitting=False), "no more runs are submitted; waiting for the last ones")
            time.sleep(TICK_SECONDS)


@contextmanager
def _show_snapshots(silent: bool) -> Iterator[Any]:
    """Show snapshots: live in a terminal, else one line every few seconds."""
    printed = 0.0

    def print_line(now: Snapshot, note: str) -> None:
        nonlocal printed
        if not silent and (time.monotonic() - printed >= LINE_SECONDS):
            printed = time.monotonic()
            echo(f"{now.elapsed:6.0f} s  " + "; ".join(_format_lines(now)), err=True)

    if silent or not sys.stderr.isatty():
        yield print_line
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda now, note: live.update("\n".join([f"{now.elapsed:.0f} s  {note}", *_format_lines(now)]))


def _format_lines(now: Snapshot) -> list[str]:
    names = ("runs", "attempts", "machines", "faults")
    return [
        *(f"{name:<10}{_format_counts(getattr(now, name))}" for name in names),
        f"{'cost':<10}{now.cost:.4f}",
    ]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


@contextmanager
def _lab_folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="perilune-lab-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    if keep.exists():
        raise RequestError("the folder exists already", where=str(keep), remedy="name a new folder")
    keep.mkdir(parents=True)
    yield keep.absolute()
