"""`perilune doctor`: check this machine, and print the command that fixes each problem."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.bundle.machine import describe_machine, observe_machine, usable_threads
from perilune.cli.arguments import Json
from perilune.cli.output import echo, format_for_terminal, make_console, print_json
from perilune.control.record.home import Home
from perilune.engine.openvino_package import list_devices
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.readiness import (
    Finding,
    check_containers,
    check_home,
    check_machine,
    package_versions,
)
from perilune.models.native.build import native
from perilune.plan.calibration import calibrate_devices, save_calibrations
from perilune.plural import plural

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.plan.calibration import Calibration

MEASUREMENT_SECONDS = 10.0  # seconds to measure the sampling speed, and again to calibrate each device
BUSY_SHARE = 0.5  # load per core from which a calibration is too slow


@dataclass(frozen=True, slots=True)
class SamplingSpeed:
    """A measured sampling speed of the tiny preset."""

    device: str
    threads: int
    tokens_per_second: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the checks, which `--json` prints.

    Attributes:
        usable: True if everything that is required is present.
        machine: facts about this machine, as bundles record them.
        packages: installed version of each required package, None where absent.
        rollouts: measured speeds, the fastest first; empty without a measurement.
    """

    usable: bool
    machine: dict[str, Any]
    packages: dict[str, str | None]
    findings: tuple[Finding, ...]
    rollouts: tuple[SamplingSpeed, ...]


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the measurements, which take about a minute.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, print the command that fixes each problem, and measure its speed.

    The measurements calibrate the times that `perilune run --plan` estimates.

    Exits with 1 when something that Perilune requires is missing.

    \b
    perilune doctor
    perilune doctor --json
    """
    seconds, load = 0.0 if quick else MEASUREMENT_SECONDS, os.getloadavg()[0]
    calibrated: Sequence[Calibration] = ()
    if as_json:
        diagnosis = diagnose(seconds)
        calibrated = calibrate_home(diagnosis, seconds)
        print_json(asdict(diagnosis) | {"calibration": [asdict(calibration) for calibration in calibrated]})
    else:
        from rich.console import Console

        with Console(stderr=True).status("Checking this machine") as status:
            diagnosis = diagnose(seconds, say=status.update)
            status.update("Calibrating the estimates of --plan")
            calibrated = calibrate_home(diagnosis, seconds)
        show(diagnosis, make_console())
        if calibrated:
            warning = ""
            if load >= BUSY_SHARE * usable_threads():
                warning = f", but other programs were running (load {load:.1f}): measure again when idle"
            echo(f"The estimates of perilune run --plan are calibrated{warning}.")
    if not diagnosis.usable:
        raise typer.Exit(1)


def calibrate_home(diagnosis: Diagnosis, seconds: float) -> list[Calibration]:
    """Calibrate each device for `seconds`, and save the calibrations, from which `--plan` estimates times."""
    if not seconds or not diagnosis.usable:
        return []

    gpu = ["cuda"] if any(speed.device == "cuda" for speed in diagnosis.rollouts) else []
    devices = [*map(str, sorted({1, usable_threads()})), *gpu]
    calibrations = calibrate_devices(devices, seconds * len(devices))
    save_calibrations(Home.open().root, calibrations)
    return calibrations


def diagnose(seconds: float, say: Callable[[str], None] = lambda text: None) -> Diagnosis:
    """Run all checks, then measure the sampling speed for `seconds` in total unless that is 0.

    Raises:
        WorkFailedError: when a package that the checks need is not installed.
    """
    try:
        findings = [*check_machine(observe_machine()), *_home(), *_containers()]
        findings += [_confinement(), _kernels(), _openvino()]
    except ModuleNotFoundError as error:
        raise WorkFailedError(
            f"the package {error.name} is not installed", remedy="pip install --force-reinstall perilune"
        ) from None
    rollouts: list[SamplingSpeed] = []
    if seconds and not any(finding.status == "missing" for finding in findings):
        rollouts, more = _measure(seconds, say)
        findings += more
    return Diagnosis(
        usable=not any(finding.status == "missing" for finding in findings),
        machine=describe_machine(),
        packages=package_versions(),
        findings=tuple(findings),
        rollouts=tuple(rollouts),
    )


def _home() -> list[Finding]:
    try:
        root = Home.open().root
    except RequestError as error:
        return [Finding("home", "missing", f"{error.where}: {error.what}", error.remedy)]
    return list(check_home(root))


def _containers() -> list[Finding]:
    from perilune.control.runs.templates import LOCAL_TEMPLATE, load_template, template_names

    programs: dict[str, str] = {}  # by program: the first template that names it
    with suppress(RequestError):  # `perilune templates validate` reports invalid templates
        home = Home.open()
        for name in template_names(home):
            template = load_template(home, name)
            if template.container is not None and template.placement.name == LOCAL_TEMPLATE:
                programs.setdefault(template.container.program, name)
    return [check_containers(program, name) for program, name in programs.items()]


def _confinement() -> Finding:
    from perilune.sandbox.landlock import landlock_version
    from perilune.sandbox.seccomp import single_process_filter

    has_filter = sys.platform == "linux" and single_process_filter(1)
    seccomp = "seccomp" if has_filter else "no seccomp filter for this processor"
    if version := landlock_version():
        measures = f"Landlock version {version}, {seccomp}, no capabilities, resource limits"
        return Finding("scorer sandbox", "ok", measures)
    measures = f"{seccomp}, resource limits; without Landlock, scorers can read files"
    return Finding("scorer sandbox", "advice", measures, "boot Linux 5.13 or later with lsm=landlock")


def _kernels() -> Finding:
    kernels = native()
    if kernels.library is not None:
        return Finding("kernels", "ok", f"compiled for this processor: {kernels.reason}")
    problem = f"not available, so torch is used and is slower: {kernels.reason}"
    return Finding("kernels", "advice", problem, "apt-get install gcc  (or another C compiler)")


def _openvino() -> Finding:
    try:
        return Finding("OpenVINO", "ok", f"devices {', '.join(list_devices())}")
    except RequestError as error:
        return Finding(
            "OpenVINO", "advice", f"{error.what}; it is needed only for engine: openvino", error.remedy
        )


def _measure(seconds: float, say: Callable[[str], None]) -> tuple[list[SamplingSpeed], list[Finding]]:
    """Sample with the tiny preset on one core, on all, and on the GPU, sharing `seconds`."""
    say("Importing torch")
    try:
        import torch

        from perilune.engine.throughput import measure_throughput
        from perilune.models.checkpoints.loading import new_model
        from perilune.models.text.tokenizer import Tokenizer
    except (ImportError, OSError) as error:  # built for another platform, or installed in part
        return [], [
            Finding("torch", "missing", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        ]

    settings = [("cpu", threads) for threads in sorted({1, usable_threads()})]
    if torch.cuda.is_available():
        settings.append(("cuda", 1))
    rollouts = []
    before = torch.get_num_threads()
    for device, threads in settings:
        say(f"Sampling on {device} with {plural(threads, 'thread')}")
        torch.set_num_threads(threads)
        model = new_model("tiny", Tokenizer.characters(), seed=0).to(device)
        speed = measure_throughput(model, seconds=seconds / len(settings))
        rollouts.append(SamplingSpeed(device, threads, speed.tokens_per_second, speed.tokens, speed.seconds))
    torch.set_num_threads(before)
    return sorted(rollouts, key=lambda rollout: -rollout.tokens_per_second), list(_threads(rollouts))


def _threads(rollouts: Sequence[SamplingSpeed]) -> Iterator[Finding]:
    """Advise a single thread if several are slower, as they are when other processes use the cores too."""
    single, *more = (speed for speed in rollouts if speed.device == "cpu")
    if more and more[0].tokens_per_second < 0.8 * single.tokens_per_second:
        ratio = single.tokens_per_second / more[0].tokens_per_second
        slower = f"a small model samples {ratio:.1f} times slower on {more[0].threads} threads than on one"
        yield Finding("threads", "advice", slower, "taskset -c 0 perilune run RECIPE")


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings, the speeds, and the commands that fix problems, each on its own line."""
    from rich.table import Table
    from rich.text import Text

    marks = {
        "ok": Text("ok", "green"),
        "advice": Text("advice", "yellow"),
        "missing": Text("missing", "bold red"),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        table.add_row(finding.name, marks[finding.status], Text(finding.found))
    console.print(table)

    if diagnosis.rollouts:
        console.print("\nSampling speed of the tiny preset (0.3 million parameters):", style="bold")
        for speed in diagnosis.rollouts:
            device = f"cpu, {plural(speed.threads, 'thread')}" if speed.device == "cpu" else speed.device
            console.print(f"  {device:<16} {speed.tokens_per_second:>10,.0f} tokens/s", highlight=False)

    remedies = [finding for finding in diagnosis.findings if finding.remedy]
    if remedies:
        console.print("\nTo fix:" if not diagnosis.usable else "\nTo improve:", style="bold")
        for finding in sorted(remedies, key=lambda finding: finding.status != "missing"):
            # Not wrapped, so that the command can be pasted.
            console.print(
                Text(f"  {finding.name}: "),
                Text(format_for_terminal(finding.remedy), "cyan"),
                soft_wrap=True,
                sep="",
            )
    if diagnosis.usable:
        console.print(format_for_terminal("\nThis machine is ready: perilune quickstart"), style="green")
    else:
        console.print("\nThis machine is not ready yet.", style="bold red")
