"""`perilune doctor`: what this machine can do, what is missing, and the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.output import print_json
from perilune.errors import RequestError, WorkFailedError

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.execution.readiness import Finding

MEASURED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RolloutWorker:
    """A measured sampling speed of the tiny preset."""

    device: str
    threads: int
    tokens_per_second: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found; `--json` prints it.

    Attributes:
        usable: nothing that is required is missing.
        machine: facts, as bundles record them.
        packages: installed version of each required package, None where absent.
        findings: everything that was looked at.
        rollouts: measured speeds, the fastest first; empty when not measured.
    """

    usable: bool
    machine: dict[str, Any]
    packages: dict[str, str | None]
    findings: tuple[Finding, ...]
    rollouts: tuple[RolloutWorker, ...]


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the ten-second measurement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what this machine has, what is missing and the command that mends it; measure rollout speed.

    Exits with 0 when Perilune can be used here, and with 1 when something it requires is missing.

    \b
    perilune doctor
    perilune doctor --json
    """
    seconds = 0.0 if quick else MEASURED_SECONDS
    if as_json:
        diagnosis = diagnose(seconds)
        print_json(asdict(diagnosis))
    else:
        from rich.console import Console

        with Console(stderr=True).status("Looking at this machine") as status:
            diagnosis = diagnose(seconds, say=status.update)
        show(diagnosis, Console())
    if not diagnosis.usable:
        raise typer.Exit(1)


def diagnose(seconds: float, say: Callable[[str], None] = lambda text: None) -> Diagnosis:
    """Look at everything; measure rollouts for `seconds` in all unless it is 0.

    Raises:
        WorkFailedError: when a package that the examination itself needs is absent.
    """
    try:
        from perilune.bundle.machine import describe_machine, observe_machine
        from perilune.execution.readiness import examine, package_versions

        machine = observe_machine()
        findings = [*examine(machine), *_home(), *_containers(), _confinement(), _kernels()]
    except ModuleNotFoundError as error:
        raise WorkFailedError(
            f"the package {error.name} is not installed", remedy="pip install --force-reinstall perilune"
        ) from None
    rollouts: list[RolloutWorker] = []
    if seconds and not any(finding.status == "missing" for finding in findings):
        rollouts, found = _measure(seconds, say)
        findings += found
    return Diagnosis(
        usable=not any(finding.status == "missing" for finding in findings),
        machine=describe_machine(),
        packages=package_versions(),
        findings=tuple(findings),
        rollouts=tuple(rollouts),
    )


def _home() -> list[Finding]:
    from perilune.control.record.home import Home
    from perilune.execution.readiness import Finding, examine_home

    try:
        root = Home.open().root
    except RequestError as error:
        return [Finding("home", "missing", f"{error.where}: {error.what}", error.remedy)]
    return list(examine_home(root))


def _containers() -> list[Finding]:
    """What runs containers here, where a template asks for it."""
    from perilune.control.record.home import Home
    from perilune.control.runs.templates import LOCAL, load_template, template_names
    from perilune.execution.readiness import examine_containers

    asking: dict[str, str] = {}  # program to the first template that names it
    with suppress(RequestError):  # `perilune templates validate` says what is wrong with one
        home = Home.open()
        for name in template_names(home):
            template = load_template(home, name)
            if template.container is not None and template.placement.name == LOCAL:
                asking.setdefault(template.container.program, name)
    return [examine_containers(program, name) for program, name in asking.items()]


def _confinement() -> Finding:
    from perilune.execution.readiness import Finding
    from perilune.sandbox.landlock import landlock_version
    from perilune.sandbox.seccomp import loner_filter

    filtered = (
        "seccomp" if sys.platform == "linux" and loner_filter(1) else "no seccomp filter for this processor"
    )
    if version := landlock_version():
        kept = f"Landlock version {version}, {filtered}, no capabilities, resource limits"
        return Finding("scorer sandbox", "ok", kept)
    found = f"{filtered}, resource limits; this kernel has no Landlock to keep scorers from files"
    return Finding("scorer sandbox", "advice", found, "boot Linux 5.13 or later with lsm=landlock")


def _kernels() -> Finding:
    from perilune.execution.readiness import Finding
    from perilune.models.native.build import native

    kernels = native()
    if kernels.library is not None:
        return Finding("kernels", "ok", f"compiled for this processor: {kernels.reason}")
    found = f"torch computes everything, more slowly: {kernels.reason}"
    return Finding("kernels", "advice", found, "apt-get install gcc  (or another C compiler)")


def _measure(seconds: float, say: Callable[[str], None]) -> tuple[list[RolloutWorker], list[Finding]]:
    """Sample with the tiny preset on one core, on all, and on the GPU, sharing `seconds`."""
    from perilune.bundle.machine import usable_threads
    from perilune.execution.readiness import Finding

    say("Importing torch")
    try:
        import torch

        from perilune.engine.throughput import measure_throughput
        from perilune.models.checkpoints.loading import new_model
        from perilune.models.text.tokenizer import Tokenizer
    except (ImportError, OSError) as error:  # a package of another platform, or half installed
        return [], [
            Finding("torch", "missing", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        ]

    settings = [("cpu", threads) for threads in sorted({1, usable_threads()})]
    if torch.cuda.is_available():
        settings.append(("cuda", 1))
    rollouts = []
    before = torch.get_num_threads()
    for device, threads in settings:
        say(f"Sampling on {device} with {threads} thread{'s' if threads > 1 else ''}")
        torch.set_num_threads(threads)
        model = new_model("tiny", Tokenizer.characters(), seed=0).to(device)
        speed = measure_throughput(model, seconds=seconds / len(settings))
        rollouts.append(RolloutWorker(device, threads, speed.tokens_per_second, speed.tokens, speed.seconds))
    torch.set_num_threads(before)
    return sorted(rollouts, key=lambda one: -one.tokens_per_second), list(_threads(rollouts))


def _threads(rollouts: Sequence[RolloutWorker]) -> Iterator[Finding]:
    """Threads wait for each other; where other processes want the cores too, they mostly wait."""
    from perilune.execution.readiness import Finding

    one, *more = (speed for speed in rollouts if speed.device == "cpu")
    if more and more[0].tokens_per_second < 0.8 * one.tokens_per_second:
        ratio = one.tokens_per_second / more[0].tokens_per_second
        found = f"a small model samples {ratio:.1f} times slower on {more[0].threads} threads than on one"
        yield Finding("threads", "advice", found, "taskset -c 0 perilune run RECIPE")


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings as a table, then the speeds, then what to do, each command on its own line."""
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
        console.print("\nRollouts of the tiny preset (0.3 million parameters), measured:", style="bold")
        for one in diagnosis.rollouts:
            device = (
                one.device if one.device != "cpu" else f"cpu, {one.threads} thread{'s' * (one.threads > 1)}"
            )
            console.print(f"  {device:<16} {one.tokens_per_second:>10,.0f} tokens/s", highlight=False)

    remedies = [finding for finding in diagnosis.findings if finding.remedy]
    if remedies:
        console.print("\nTo mend:" if not diagnosis.usable else "\nTo have more:", style="bold")
        for finding in sorted(remedies, key=lambda one: one.status != "missing"):
            # Not wrapped: a command that was cut in two cannot be pasted.
            console.print(Text(f"  {finding.name}: "), Text(finding.remedy, "cyan"), soft_wrap=True, sep="")
    if diagnosis.usable:
        console.print("\nThis machine is ready: perilune quickstart", style="green")
    else:
        console.print("\nThis machine is not ready yet.", style="bold red")
