"""Commands about rented machines: list them, show their cost, terminate them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, make_command_group, open_control
from perilune.cli.output import as_markup, echo, make_console, print_json
from perilune.control.record.home import Home
from perilune.control.record.transitions import AttemptState
from perilune.errors import PeriluneError, RequestError
from perilune.plural import plural
from perilune.units import format_duration

if TYPE_CHECKING:
    from perilune.control.machines.lifecycle import Fleet
    from perilune.control.record.store import Machine
    from perilune.control.runs.experiments import Control

app = make_command_group("List rented machines and terminate them.")
MachineArgument = Annotated[
    str, typer.Argument(metavar="MACHINE", help="Key of the machine, or the last characters of the key.")
]
NARROW_COLUMNS = 110  # columns below which each machine takes two lines
REAP_SECONDS = 1.0  # seconds between two rounds of `machines reap --wait`


@app.command("list")
def machines_list(
    everything: Annotated[bool, typer.Option("--all", help="Also list terminated machines.")] = False,
    as_json: Json = False,
) -> None:
    """List rented machines, first those that are being terminated.

    \b
    perilune machines list
    perilune machines list --all --json
    """
    control = open_control()
    machines = sorted(
        _fleet(control).machines(include_gone=everything), key=lambda machine: machine.state != "terminating"
    )
    if as_json:
        print_json({"machines": [machine_document(machine) for machine in machines]})
    elif machines:
        _print_table(machines)
    else:
        echo("no machines are rented")


@app.command("offers")
def machines_offers(as_json: Json = False) -> None:
    """List the machines and prices of the providers in providers.yaml, and check that file.

    Rents nothing. Exits with 1 when a provider does not answer, and with 2 when providers.yaml is wrong.

    \b
    perilune machines offers
    """
    from perilune.control.machines.providers import Providers

    providers = Providers(Home.open())
    rows: list[dict[str, Any]] = []
    problems: list[PeriluneError] = []
    for name in providers.names():
        try:
            offers = providers.get(name).offers()
            rows += [{"provider": name, **asdict(offer)} for offer in offers]
            problems += providers.problems(name, [offer.kind for offer in offers])
        except PeriluneError as error:
            problems.append(error)
    if as_json:
        print_json({"offers": rows, "problems": [str(problem) for problem in problems]})
    else:
        for row in rows:
            notes = ["preemptible"] if row["preemptible"] else []
            notes += [f"{row['capacity']} available"] if row["capacity"] is not None else []
            echo(f"{row['provider']}:{row['kind']}  {row['price']:.4g} per hour  {', '.join(notes)}".rstrip())
        for problem in problems:
            echo(f"error: {problem}", err=True)
        if not rows and not problems:
            echo("no machines are offered; providers.yaml lists the providers")
    if problems:
        raise typer.Exit(max(problem.exit_code for problem in problems))


@app.command("show")
def machines_show(machine: MachineArgument, as_json: Json = False) -> None:
    """Show one machine: its state and cause, lease, cost and events.

    \b
    perilune machines show perilune-7kq2m0x9ab-01jd0x-1-0
    """
    from perilune.control.queries.lookup import machine_events

    control = open_control()
    record = _find(_fleet(control), machine)
    events = [{"time": row.time, "kind": row.kind, **row.detail} for row in machine_events(control, record)]
    if as_json:
        print_json(machine_document(record) | {"events": events})
        return
    fields = machine_document(record)
    echo(f"machine {record.key}: {record.state}{f' ({record.reason})' if record.reason else ''}")
    echo(f"  for        attempt {record.epoch} of run {record.run_id}")
    echo(f"  kind       {record.provider}:{record.kind} at {record.price:.4g} per hour")
    echo(f"  cost       {fields['cost']:.4g} of at most {fields['promised']:.4g}")
    echo(f"  lease      {', '.join(f'{name} {value:g}' for name, value in record.lease.items())}")
    for condition in fields["conditions"]:
        echo(f"  note       {condition}")
    for event in events:
        echo(f"  event      {event['kind']}")


@app.command("reap")
def machines_reap(
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Keep unrecorded machines that are younger than this."),
    ] = 120.0,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Maximum time to wait for proof that all are gone."),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Terminate every machine that no run needs, including unrecorded machines with this home's tag.

    Exits with 1 when a machine is not yet proven to be gone. Later commands keep trying.

    \b
    perilune machines reap
    perilune machines reap --grace 0 --wait 60
    """
    from perilune.control.machines.sweep import terminate_unrecorded

    control = open_control()
    keys = terminate_unrecorded(_fleet(control), grace)
    until = time.monotonic() + wait
    while True:
        _fleet(control).reconcile_all()
        going = [machine for machine in _fleet(control).machines() if machine.state == "terminating"]
        if not going or time.monotonic() >= until:
            break
        time.sleep(REAP_SECONDS)
    if as_json:
        print_json({"found": keys, "terminating": [machine_document(machine) for machine in going]})
    else:
        for key in keys:
            echo(f"{key}: was not recorded here; terminating it")
        echo(f"{len(going)} not proven gone yet" if going else "no machine is left to terminate")
    if going:
        raise typer.Exit(1)


@app.command("rm")
def machines_rm(
    machine: MachineArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Terminate the machine even while an attempt runs on it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Terminate one machine. Files of its attempt that are not downloaded yet are lost.

    A machine that an attempt waits for or runs on is terminated only with `--force`. An idle machine is
    terminated even if the next stage of its experiment would use it. For a machine that is being terminated
    or is gone, nothing changes. Until the provider proves that the machine is gone, its state is
    `terminating`, and every later command checks again.

    \b
    perilune machines rm perilune-7kq2m0x9ab-01jd0x-1-0
    """
    control = open_control()
    record = _find(_fleet(control), machine)
    if record.idle_since is None and record.state not in {"terminating", "gone"} and not force:
        raise RequestError(
            f"attempt {record.epoch} of run {record.run_id} needs it: it is {record.state}",
            where=record.key,
            remedy=f"perilune cancel {record.run_id}, or add --force",
        )
    _fleet(control).request_termination(record.key, "requested by the user")
    ended = _fleet(control).reconcile(record.key)
    assert ended is not None
    if as_json:
        print_json(machine_document(ended))
    else:
        notes = {"gone": "", "terminating": ", not proven gone yet; `perilune machines reap --wait 60` waits"}
        echo(f"{ended.key}: {ended.state}{notes.get(ended.state, '')}")


def cost(as_json: Json = False) -> None:
    """Show what rented machines have cost, cost now and may still cost.

    \b
    perilune cost
    perilune cost --json
    """
    from perilune.control.machines.budget import cost_today, machine_uses, remaining_cost

    control = open_control()
    machines = _fleet(control).machines(include_gone=True)
    alive = [machine for machine in machines if machine.state != "gone"]
    by_run: dict[str, float] = {}
    with control.store.snapshot() as session:
        for use in machine_uses(session):
            by_run[use.run_id] = by_run.get(use.run_id, 0.0) + use.cost
    fields = {
        "spent": sum(by_run.values()),
        "per_hour": sum(machine.price for machine in alive),
        "may_come": sum(remaining_cost(machine) for machine in alive),
        "today": cost_today(machines),
        "daily_cap": _fleet(control).providers.daily_cap(),
        "machines": len(machines),
        "alive": len(alive),
        "not_proven_gone": sum(machine.state == "terminating" for machine in alive),
        "runs": by_run,
    }
    if as_json:
        print_json(fields)
        return
    warn_about_machines(control)
    echo(f"spent       {fields['spent']:.4g} on {plural(len(machines), 'machine')}")
    echo(f"now         {fields['per_hour']:.4g} per hour for {plural(len(alive), 'machine')}")
    echo(f"to come     at most {fields['may_come']:.4g} until their leases end")
    echo(f"24 hours    {fields['today']:.4g} spent or reserved, of a cap of {fields['daily_cap']:.4g}")
    for run_id, spent in sorted(by_run.items(), key=lambda item: -item[1])[:10]:
        echo(f"  {spent:10.4g}  run {run_id}")


def panic(
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Maximum time to keep trying.")
    ] = 600.0,
    lift: Annotated[bool, typer.Option("--lift", help="Allow renting again. Terminates nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Terminate every machine that this home has rented, now, and stop renting. Works without the database.

    Asks every provider in providers.yaml for machines with this home's tag, until two listings in a row are
    empty. Runs that need machines wait until `perilune panic --lift`.

    Exits with 1 when a machine is left, or a provider or a recorded machine could not be reached.

    \b
    perilune panic
    perilune panic --lift
    """
    from perilune.control.machines.panic import allow_renting
    from perilune.control.machines.panic import panic as terminate_all

    if lift:
        lifted = allow_renting(Home.open())
        if as_json:
            print_json({"lifted": lifted})
        else:
            echo("machines may be rented again" if lifted else "renting was not stopped")
        return
    report = terminate_all(Home.open(), patience, lambda line: echo(line, err=True))
    if as_json:
        print_json(asdict(report))
    else:
        echo(
            f"{len(report.ended)} machines are proven gone; renting is stopped until `perilune panic --lift`"
        )
        for key in report.left:
            echo(f"not terminated: {key}")
        for key, why in report.unreached.items():
            echo(f"unreachable: {key} ({why})")
        for name, why in report.silent.items():
            echo(f"no answer from {name}: {why}")
    if not report.complete:
        raise typer.Exit(1)


def warn_about_cleanup(control: Control) -> None:
    """Warn on stderr about machines and attempts that are not proven to have stopped, and about errors."""
    warn_about_machines(control)
    for attempt in control.reconciler.unclean_attempts():
        stopped = attempt.state != AttemptState.LOST
        doubt = f"is not removed from {attempt.placement} yet" if stopped else "is not proven to have stopped"
        what = f"attempt {attempt.number} of run {attempt.run_id} {doubt}"
        echo(f"warning: {what}; every command tries again", err=True)
    for condition in control.reconciler.conditions.all():
        run = f"run {condition.run_id}: " if condition.run_id else ""
        echo(f"warning: {run}{condition}", err=True)


def warn_about_machines(control: Control) -> None:
    """Warn on stderr about machines that are being terminated and not proven gone, with their cost."""
    from perilune.control.machines.budget import accrued_cost
    from perilune.control.machines.panic import RENTING_STOPPED, renting_is_stopped

    if renting_is_stopped(control.home):
        echo(f"warning: {RENTING_STOPPED}", err=True)
    for machine in _fleet(control).machines():
        if machine.state == "terminating":
            silent = " (its provider does not answer)" if machine.unseen_since else ""
            costs = f"it has cost {accrued_cost(machine):.4g}; every command tries again"
            echo(f"warning: machine {machine.key} is not proven gone{silent}; {costs}", err=True)


def machine_document(machine: Machine) -> dict[str, Any]:
    from perilune.control.machines.budget import accrued_cost, max_total_cost

    columns = ("key", "provider", "kind", "epoch", "state", "reason", "price", "lease", "remote_id")
    conditions = [
        text
        for text, holds in (
            ("its provider does not answer", machine.unseen_since),
            ("its provider is about to preempt it", machine.notice and machine.state != "gone"),
            ("not listed by its provider, once so far", machine.missing_since and machine.state != "gone"),
            ("idle: no attempt needs it", machine.idle_since and machine.state != "gone"),
            (machine.refused, machine.refused),
        )
        if holds
    ]
    return {
        "run": machine.run_id,
        **{name: getattr(machine, name) for name in columns},
        "conditions": conditions,
        "cost": accrued_cost(machine),
        "promised": max_total_cost(machine),
        "terminate_calls": machine.terminate_calls,
        "created": machine.created,
        "ended": machine.ended,
    }


def _fleet(control: Control) -> Fleet:
    return control.reconciler.rentals.fleet


def _find(fleet: Fleet, reference: str) -> Machine:
    machines = fleet.machines(include_gone=True)
    fitting = [machine for machine in machines if machine.key == reference] or [
        machine for machine in machines if reference and machine.key.endswith(reference.lower())
    ]
    if len(fitting) == 1:
        return fitting[0]
    what = f"'{reference}' matches {len(fitting)} machines" if fitting else f"no machine '{reference}'"
    raise RequestError(what, remedy="perilune machines list --all")


def _print_table(machines: Sequence[Machine]) -> None:
    from rich.table import Table

    console = make_console(width=200)
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "kind", "state", "age", "cost", "at most", "note"):
        table.add_column(name, no_wrap=name != "note")
    for machine in machines:
        fields = machine_document(machine)
        kind = f"{machine.provider}:{machine.kind}"
        age = format_duration(max(0.0, (machine.ended or time.time()) - machine.created))
        costs = (f"{fields['cost']:.4g}", f"{fields['promised']:.4g}")
        notes = [*([machine.reason] if machine.reason else []), *fields["conditions"]]
        if console.width >= NARROW_COLUMNS:
            row = (machine.key, kind, machine.state, age, *costs, "; ".join(notes))
            table.add_row(*map(as_markup, row))
        else:  # the key alone takes most of a line
            echo(machine.key)
            echo("  ".join(["", kind, machine.state, age, f"cost {costs[0]} of at most {costs[1]}", *notes]))
    if table.row_count:
        console.print(table)
