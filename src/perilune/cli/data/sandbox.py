"""`perilune sandbox`: test the sandbox that runs code written by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, make_command_group
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError, WorkFailedError

if TYPE_CHECKING:
    from perilune.sandbox.audit import Finding, SandboxAudit

app = make_command_group("Audit the sandbox that runs code written by a model.")

SWITCHES = ("namespaces", "own_user", "landlock", "seccomp", "control_group")


@app.command(epilog="Example: perilune sandbox audit --without namespaces")
def audit(
    without: Annotated[
        list[str],
        typer.Option(metavar="MECHANISM", help=f"Switch a mechanism off: {', '.join(SWITCHES)}. Repeatable."),
    ] = [],  # noqa: B006  # typer reads the default and never changes it
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print what the sandbox refused.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run hostile code in the sandbox, and report what it can see, read, write, reach and exhaust.

    Exits with 1 when a probe gets past a protection that this machine has.
    """
    from perilune.sandbox.audit import audit_sandbox

    for name in without:
        if name not in SWITCHES:
            raise RequestError(
                f"unknown mechanism '{name}'", where="--without", remedy=f"one of: {', '.join(SWITCHES)}"
            )
    report = audit_sandbox(
        without=without, on_finding=None if as_json else lambda finding: _show(finding, verbose)
    )
    if as_json:
        print_json(report.document())
    else:
        _show_walls(report)
    if report.breached:
        raise WorkFailedError(
            f"{len(report.breached)} probes got past a protection of this machine, or could not run",
            where=report.breached[0].probe,
            remedy="do not run code of a model on this machine until this is fixed",
        )


def _show(finding: Finding, verbose: bool) -> None:
    missing = "" if finding.stands else f"  (this machine has no protection '{finding.wall}')"
    echo(f"{finding.verdict:10} {finding.probe:32} {finding.what.splitlines()[0]}{missing}")
    groups = {"reached": finding.reached, "could not run": finding.untried} | (
        {"refused": finding.refused} if verbose else {}
    )
    for outcome, attempts in groups.items():
        for name, evidence in attempts.items():
            echo(f"           {outcome} {name}: {evidence}")


def _show_walls(audit: SandboxAudit) -> None:
    echo("")
    for wall, mechanisms in audit.capabilities.walls.items():
        echo(f"{'present' if mechanisms else 'MISSING':10} {wall:24} {', '.join(mechanisms)}")
    for mechanism, why in audit.capabilities.reasons.items():
        echo(f"           no {mechanism}: {why}")
