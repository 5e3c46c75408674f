"""Commands about rented machines: what there is, what it costs, and how to be rid of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, command_group, open_control
from perilune.cli.output import as_markup, echo, print_json
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.machines.lifecycle import Fleet
    from perilune.control.record.store import Machine
    from perilune.control.runs.experiments import Control

app = command_group("List rented machines, and end them.")
MachineArgument = Annotated[str, typer.Argument(metavar="MACHINE", help="Its key, or a unique end of it.")]
NARROW = 110  # columns below which a machine takes two lines
REAP_SECONDS = 1.0  # between two rounds of `machines reap --wait`


@app.command("list")
def machines_list(
    everything: Annotated[bool, typer.Option("--all", help="Those that are gone too.")] = False,
    as_json: Json = False,
) -> None:
    """List rented machines: first those that are to go and are not proven gone.

    \b
    perilune machines list
    perilune machines list --all --json
    """
    control = open_control()
    machines = sorted(_fleet(control).all(gone=everything), key=lambda one: one.state != "terminating")
    if as_json:
        print_json({"machines": [document(machine) for machine in machines]})
    elif machines:
        _print_table(machines)
    else:
        echo("no machines are rented")


@app.command("offers")
def machines_offers(as_json: Json = False) -> None:
    """List what the providers in providers.yaml rent out, at most for how much, and check it. Rents nothing.

    Leaves with 1 when a provider does not answer, and with 2 when a kind in providers.yaml is wrong.

    \b
    perilune machines offers
    """
    from perilune.control.machines.providers import Providers
    from perilune.control.record.home import Home
    from perilune.errors import PeriluneError

    providers = Providers(Home.open())
    found: list[dict[str, Any]] = []
    wrong: list[PeriluneError] = []
    for name in providers.names():
        try:
            offers = providers.get(name).offers()
            found += [{"provider": name, **asdict(offer)} for offer in offers]
            wrong += providers.problems(name, [offer.kind for offer in offers])
        except PeriluneError as error:
            wrong.append(error)
    if as_json:
        print_json({"offers": found, "problems": [str(problem) for problem in wrong]})
    else:
        for one in found:
            notes = ["may be taken away"] if one["preemptible"] else []
            notes += [f"{one['capacity']} to be had"] if one["capacity"] is not None else []
            echo(f"{one['provider']}:{one['kind']}  {one['price']:.4g} an hour  {', '.join(notes)}".rstrip())
        for problem in wrong:
            echo(f"error: {problem}", err=True)
        if not found and not wrong:
            echo("nobody rents out machines: see providers.yaml")
    if wrong:
        raise typer.Exit(max(problem.exit_code for problem in wrong))


@app.command("show")
def machines_show(machine: MachineArgument, as_json: Json = False) -> None:
    """Show one machine: its state and why, its lease, what it costs, what happened to it.

    \b
    perilune machines show perilune-7kq2m0x9ab-01jd0x-1-0
    """
    from perilune.control.queries.lookup import events_after

    control = open_control()
    found = _find(_fleet(control), machine)
    told = [
        row for row in events_after(control, run_id=found.run_id) if row.detail.get("machine") == found.key
    ]
    events = [{"time": row.time, "kind": row.kind, **row.detail} for row in told]
    if as_json:
        print_json(document(found) | {"events": events})
        return
    fields = document(found)
    echo(f"machine {found.key}: {found.state}{f' ({found.reason})' if found.reason else ''}")
    echo(f"  for        attempt {found.epoch} of run {found.run_id}")
    echo(f"  kind       {found.provider}:{found.kind} at {found.price:.4g} an hour")
    echo(f"  cost       {fields['cost']:.4g} of at most {fields['promised']:.4g}")
    echo(f"  lease      {', '.join(f'{name} {value:g}' for name, value in found.lease.items())}")
    for condition in fields["conditions"]:
        echo(f"  note       {condition}")
    for event in events:
        echo(f"  event      {event['kind']}")


@app.command("reap")
def machines_reap(
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Spare what is unknown and younger than this.")
    ] = 120.0,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Go on until all that is to go is proven gone.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """End every machine that nothing needs: also those that carry our tag and are not recorded here.

    Leaves with 1 when something that is to go is not proven gone yet; every command goes on trying.

    \b
    perilune machines reap
    perilune machines reap --grace 0 --wait 60
    """
    from perilune.control.machines.sweep import reconcile_all, sweep

    control = open_control()
    found = sweep(_fleet(control), grace)
    until = time.monotonic() + wait
    while True:
        reconcile_all(_fleet(control))
        going = [machine for machine in _fleet(control).all() if machine.state == "terminating"]
        if not going or time.monotonic() >= until:
            break
        time.sleep(REAP_SECONDS)
    if as_json:
        print_json({"found": found, "terminating": [document(machine) for machine in going]})
    else:
        for key in found:
            echo(f"{key}: nothing here knew of it")
        echo("all that was to go is gone" if not going else f"{len(going)} not proven gone yet")
    if going:
        raise typer.Exit(1)


@app.command("rm")
def machines_rm(
    machine: MachineArgument,
    force: Annotated[bool, typer.Option("--force", help="Even while an attempt runs on it.")] = False,
    as_json: Json = False,
) -> None:
    """End one machine. What its attempt has not sent home yet is lost.

    \b
    perilune machines rm perilune-7kq2m0x9ab-01jd0x-1-0
    """
    control = open_control()
    found = _find(_fleet(control), machine)
    if found.idle_since is None and found.state != "gone" and not force:
        raise RequestError(
            f"attempt {found.epoch} of run {found.run_id} needs it",
            where=found.key,
            remedy=f"perilune cancel {found.run_id}, or add --force",
        )
    _fleet(control).request_termination(found.key, "it was asked for")
    ended = _fleet(control).reconcile(found.key)
    assert ended is not None
    if as_json:
        print_json(document(ended))
    else:
        echo(f"{ended.key}: {ended.state}")


def cost(as_json: Json = False) -> None:
    """Say what rented machines have cost, cost now, and may cost yet.

    \b
    perilune cost
    perilune cost --json
    """
    from perilune.control.machines.budget import accrued, to_come, today

    control = open_control()
    machines = _fleet(control).all(gone=True)
    alive = [machine for machine in machines if machine.state != "gone"]
    by_run: dict[str, float] = {}
    for machine in machines:
        by_run[machine.run_id] = by_run.get(machine.run_id, 0.0) + accrued(machine)
    fields = {
        "spent": sum(by_run.values()),
        "per_hour": sum(machine.price for machine in alive),
        "may_come": sum(to_come(machine) for machine in alive),
        "today": today(machines),
        "daily_cap": _fleet(control).providers.daily_cap(),
        "machines": len(machines),
        "alive": len(alive),
        "not_proven_gone": sum(machine.state == "terminating" for machine in alive),
        "runs": by_run,
    }
    if as_json:
        print_json(fields)
        return
    tell_unproven(control)
    echo(f"spent       {fields['spent']:.4g} on {len(machines)} machines")
    echo(f"now         {fields['per_hour']:.4g} an hour for {len(alive)}")
    echo(f"may come    {fields['may_come']:.4g} by their leases")
    echo(f"24 hours    {fields['today']:.4g} spent or promised, of {fields['daily_cap']:.4g}")
    for run_id, spent in sorted(by_run.items(), key=lambda item: -item[1])[:10]:
        echo(f"  {spent:10.4g}  run {run_id}")


def panic(
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Go on for so long while something is left.")
    ] = 600.0,
    lift: Annotated[bool, typer.Option("--lift", help="Allow renting again. Ends nothing.")] = False,
    as_json: Json = False,
) -> None:
    """End every machine that this home has rented, at once, and rent no more. Needs no database.

    It asks every provider in providers.yaml for what carries this home's tag, and goes on until two looks
    found nothing alive. Runs that want machines wait until `perilune panic --lift`.

    Leaves with 1 when a machine is left, or a provider or a recorded machine could not be reached.

    \b
    perilune panic
    perilune panic --lift
    """
    from perilune.control.machines.panic import allow_renting
    from perilune.control.machines.panic import panic as end_everything
    from perilune.control.record.home import Home

    if lift:
        lifted = allow_renting(Home.open())
        if as_json:
            print_json({"lifted": lifted})
        else:
            echo("machines may be rented again" if lifted else "renting was not stopped")
        return
    report = end_everything(Home.open(), patience, lambda line: echo(line, err=True))
    if as_json:
        print_json(asdict(report))
    else:
        echo(f"{len(report.ended)} machines are proven gone; none is rented until `perilune panic --lift`")
        for key in report.left:
            echo(f"still there: {key}")
        for key, why in report.unreached.items():
            echo(f"not reached: {key} ({why})")
        for name, why in report.silent.items():
            echo(f"no answer from {name}: {why}")
    if not report.complete:
        raise typer.Exit(1)


def tell_unproven(control: Control) -> None:
    """Say first, and on stderr, which machines are to go and are not proven gone, and what they cost."""
    from perilune.control.machines.budget import accrued
    from perilune.control.machines.panic import STOPPED, renting_is_stopped

    if renting_is_stopped(control.home):
        echo(f"warning: {STOPPED}", err=True)
    for machine in _fleet(control).all():
        if machine.state == "terminating":
            silent = ", its provider does not answer" if machine.unseen_since else ""
            costs = f"it has cost {accrued(machine):.4g}; every command goes on trying"
            echo(f"warning: machine {machine.key} is not proven gone{silent}; {costs}", err=True)


def document(machine: Machine) -> dict[str, Any]:
    """A machine as JSON."""
    from perilune.control.machines.budget import accrued, promised

    columns = ("key", "provider", "kind", "run_id", "epoch", "state", "reason", "price", "lease", "remote_id")
    conditions = [
        said
        for said, holds in (
            ("its provider does not answer", machine.unseen_since),
            ("its provider takes it away", machine.notice and machine.state != "gone"),
            ("not found alive, once so far", machine.missing_since and machine.state != "gone"),
            ("no attempt needs it", machine.idle_since and machine.state != "gone"),
            (machine.refused, machine.refused),
        )
        if holds
    ]
    return {
        **{name: getattr(machine, name) for name in columns},
        "conditions": conditions,
        "cost": accrued(machine),
        "promised": promised(machine),
        "terminate_calls": machine.terminate_calls,
        "created": machine.created,
        "ended": machine.ended,
    }


def _fleet(control: Control) -> Fleet:
    return control.reconciler.rentals.fleet


def _find(fleet: Fleet, reference: str) -> Machine:
    machines = fleet.all(gone=True)
    fitting = [one for one in machines if one.key == reference] or [
        one for one in machines if one.key.endswith(reference.lower())
    ]
    if len(fitting) == 1:
        return fitting[0]
    what = (
        f"no machine is called '{reference}'"
        if not fitting
        else f"'{reference}' fits {len(fitting)} machines"
    )
    raise RequestError(what, remedy="perilune machines list --all")


def _print_table(machines: Sequence[Machine]) -> None:
    from rich.console import Console
    from rich.table import Table

    from perilune.cli.console import duration

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "kind", "state", "age", "cost", "at most", "note"):
        table.add_column(name, no_wrap=name != "note")
    for machine in machines:
        fields = document(machine)
        age = duration((machine.ended or time.time()) - machine.created)
        note = "; ".join([*([machine.reason] if machine.reason else []), *fields["conditions"]])
        kind = f"{machine.provider}:{machine.kind}"
        figures = (f"{fields['cost']:.4g}", f"{fields['promised']:.4g}")
        table.add_row(*map(as_markup, (machine.key, kind, machine.state, age, *figures, note)))
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    if console.width >= NARROW:
        console.print(table)
        return
    for machine in machines:  # its key alone takes most of a line
        fields = document(machine)
        costs = f"cost {fields['cost']:.4g} of at most {fields['promised']:.4g}"
        age = duration((machine.ended or time.time()) - machine.created)
        notes = [*([machine.reason] if machine.reason else []), *fields["conditions"]]
        echo(machine.key)
        echo("  ".join(["", f"{machine.provider}:{machine.kind}", machine.state, age, costs, *notes]))
