"""What asking for a recipe would do: what is reused, what is copied where, what it may cost, what is missing.

Nothing is recorded and nothing is begun. Bundles are frozen to learn their digests, and thrown away; of what
lies elsewhere only a provider is asked, for the price. Whatever cannot be told now says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from perilune.bundle.freeze import freeze
from perilune.bundle.secret_sources import secret_value
from perilune.control.machines.budget import price_of, today
from perilune.control.machines.leases import cost
from perilune.control.record.store import Machine, Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, StagePlan, with_inputs
from perilune.control.runs.queue import turn_ahead
from perilune.control.runs.submission import same_work
from perilune.control.runs.templates import Here, OnRented, OverSsh, Template
from perilune.errors import PeriluneError, RequestError
from perilune.recipe.schema import MODEL


@dataclass(frozen=True, slots=True)
class StageForecast:
    """What would become of one stage.

    Attributes:
        action: "reuse" what was finished before, "join" what is under way, "begin" now, or "later", once the
            stages in `after` have made what it takes.
        run_id: of what is reused or joined.
        after: stages that it takes from, and that have not been done with these inputs.
        files: bytes by what is copied: names of inputs, "wheel" (Perilune itself), "scripts".
        nodes: machines of each of its attempts.
    """

    name: str
    action: str
    run_id: str = ""
    after: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    nodes: int = 1

    @property
    def bytes(self) -> int:
        """What is copied for it, in all."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class CostForecast:
    """What machines would cost, in currency units.

    Attributes:
        problem: why nothing can be told now, or why nothing would be rented; empty when all is well.
        per_hour: of one machine; `seconds` is how long its lease lets it exist.
        attempt: that one attempt on one machine may cost at most, under its lease.
        stages: that all stages to be run may cost at most, when nothing is tried again.
        retried: the same when everything is tried again as often as the template has it. Preemptions, which
            are not counted, come on top.
        daily_cap: that may be spent or promised in any 24 hours; `left` of it is.
    """

    problem: str = ""
    per_hour: float = 0.0
    seconds: float = 0.0
    attempt: float = 0.0
    stages: float = 0.0
    retried: float = 0.0
    daily_cap: float = 0.0
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """All of it.

    Attributes:
        placement, launcher: as runs show them; `workspace` is where files go there, "" for this home.
        turn: slots of the placement and who has them; `has_turn` is whether a run would begin at once.
        cost: None where nothing is rented.
        secrets: name to the problem with it; "" where it is set. Values are looked at and never shown.
        retry, limits: as the template has them.
    """

    placement: str
    launcher: str
    workspace: str
    turn: str
    has_turn: bool
    stages: tuple[StageForecast, ...]
    cost: CostForecast | None
    secrets: Mapping[str, str]
    retry: Mapping[str, Any]
    limits: Mapping[str, Any]


def forecast(control: Control, plans: Sequence[StagePlan], template: Template | None) -> Forecast:
    """Say what carrying out these stages there would do.

    Raises:
        RequestError: a stage cannot be frozen, as it could not be when it is submitted.
    """
    chosen = template or Template()
    stages = _stages(control, plans)
    placement = control.reconciler.placements.make(chosen)
    with control.store.snapshot() as session:
        turn = turn_ahead(session, control.reconciler.placements, template)
    site = getattr(chosen.placement, "site", None)
    elsewhere = isinstance(chosen.placement, OverSsh | OnRented)
    return Forecast(
        placement=_where(chosen) or placement.name,
        launcher=placement.launcher,
        workspace=site.workspace if site is not None else "",
        turn=str(turn) if turn.slots is not None else "",
        has_turn=turn.has_come,
        stages=stages,
        cost=_cost(control, chosen, chosen.placement, stages)
        if isinstance(chosen.placement, OnRented)
        else None,
        secrets={
            name: _problem(name) for name in sorted({name for plan in plans for name in plan.job.secrets})
        },
        retry=chosen.retry.model_dump(),
        limits=_limits(chosen) if elsewhere or chosen.container else {},
    )


def _where(template: Template) -> str:
    match template.placement:
        case OverSsh() as there:
            return f"ssh {there.host}"
        case OnRented() as rental:
            return f"rented {rental.provider}:{rental.kind}"
        case Here():
            return "this machine"


def _limits(template: Template) -> dict[str, Any]:
    limits = template.limits.model_dump()
    if isinstance(template.placement, OnRented):
        limits["max_lifetime"] = min(limits["max_lifetime"], template.placement.lease.max_lifetime)
    return limits


def _stages(control: Control, plans: Sequence[StagePlan]) -> tuple[StageForecast, ...]:
    done: dict[str, Run] = {}
    found = []
    for plan in plans:
        sources = {source for source in plan.consumes.values() if source != MODEL}
        if missing := sorted(sources - done.keys()):
            found.append(
                StageForecast(plan.name, "later", after=tuple(missing), nodes=plan.job.resources.nodes)
            )
            continue
        job, inputs = with_inputs(control, plan, plans, done)
        with control.home.scratch() as scratch:
            digest = freeze(job, inputs, scratch / "bundle")
            files = _sizes(scratch / "bundle", list(inputs))
        with control.store.snapshot() as session:
            run = same_work(session, control.home, digest, control.intact)
        action = "begin"
        if run is not None:
            action = "reuse" if run.state == RunState.SUCCEEDED else "join"
        if run is not None and action == "reuse":
            done[plan.name] = run
        run_id = "" if run is None else run.id
        found.append(StageForecast(plan.name, action, run_id, (), files, job.resources.nodes))
    return tuple(found)


def _sizes(bundle: Path, inputs: Sequence[str]) -> dict[str, int]:
    """Bytes of a bundle's files, by input, and of its scripts; the wheel apart."""
    sizes = dict.fromkeys([*inputs, "wheel", "scripts"], 0)
    for path in bundle.rglob("*"):
        if path.is_file():
            top, *rest = path.relative_to(bundle).parts
            name = rest[0] if top == "inputs" else "wheel" if path.suffix == ".whl" else "scripts"
            sizes[name] += path.stat().st_size
    return sizes


def _problem(name: str) -> str:
    try:
        return "" if secret_value(name) else "not set"
    except RequestError as error:
        return error.what


def _cost(
    control: Control, template: Template, rental: OnRented, stages: Sequence[StageForecast]
) -> CostForecast:
    providers = control.reconciler.rentals.fleet.providers
    try:
        cap = providers.daily_cap()
        price = price_of(providers, rental)
    except PeriluneError as error:
        return CostForecast(str(error).partition("\n")[0])
    with control.store.snapshot() as session:
        committed = today(session.scalars(select(Machine)))
    seconds = rental.lease.seconds(price)
    attempt = cost(price, seconds)
    tries = 1 + sum(getattr(template.retry, kind) for kind in ("infrastructure", "lost", "user"))
    machines = sum(stage.nodes for stage in stages if stage.action in {"begin", "later"})
    most = max((stage.nodes for stage in stages if stage.action in {"begin", "later"}), default=0)
    left = max(0.0, cap - committed)
    over = attempt * most > left
    problem = f"an attempt waits until there is more of the daily cap of {cap:.4g} left" if over else ""
    return CostForecast(
        problem, price, seconds, attempt, attempt * machines, attempt * machines * tries, cap, left
    )
