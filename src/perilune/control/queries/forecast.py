"""Forecast a submission: which stages are reused, what is uploaded, what it may cost, what is missing.

Nothing is recorded or started. Bundles are frozen to learn their digests, then discarded. A provider is asked
only for its price. If a value cannot be determined now, the forecast says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.freeze import freeze
from perilune.bundle.secret_sources import secret_value
from perilune.bundle.shared_files import SharedFiles
from perilune.control.machines.budget import cost_today, query_price
from perilune.control.machines.leases import compute_cost
from perilune.control.record.store import Machine, Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, StagePlan, resolve_inputs
from perilune.control.runs.queue import find_new_position
from perilune.control.runs.submission import find_reusable_run
from perilune.control.runs.templates import LocalTarget, RentedTarget, SshTarget, Template
from perilune.errors import PeriluneError, RequestError
from perilune.recipe.schema import MODEL

MOST_COMPARED_RUNS = 50  # latest finished runs of a stage whose job is compared


@dataclass(frozen=True, slots=True)
class StageForecast:
    """The forecast for one stage.

    Attributes:
        action: "reuse" a finished run, "join" a live one, "begin" now, or "later", after the stages in
            `after`.
        run_id: the run to reuse or join.
        after: consumed stages that have not succeeded with these inputs yet.
        files: bytes to copy by name: names of inputs, "wheel" (Perilune itself), "scripts".
        digest: of the bundle; "" for a stage whose inputs do not exist yet.
        other_code: a finished run of the same job that is not reused, because Perilune or the recipe's code
            has changed since; "" if there is none.
    """

    name: str
    action: str
    run_id: str = ""
    after: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    nodes: int = 1
    digest: str = ""
    other_code: str = ""

    @property
    def bytes(self) -> int:
        """Bytes to copy, in all."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class CostForecast:
    """The cost of rented machines, in currency units.

    Attributes:
        problem: why the cost is unknown, or why no machine would be rented; otherwise "".
        per_hour: price of one machine; `seconds` is the longest lifetime under its lease.
        attempt: most that one attempt on one machine may cost under its lease.
        stages: most that all remaining stages may cost without retries.
        retried: the same with as many retries as the template allows. Preemptions are unlimited and not
            included.
        daily_cap: limit on spent and committed cost in any 24 hours; `left` is what remains of it.
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
    """The forecast for a submission.

    Attributes:
        placement, launcher: as in the list of runs; `workspace` is the folder there, "" for this home.
        turn: occupied slots of the placement; `has_turn` is whether a run would start at once.
        cost: None if nothing is rented.
        secrets: name to the problem with it, "" if it is set. Values are never shown.
        bring: which checkpoints are fetched; "" on this machine.
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
    bring: str


def forecast_submission(control: Control, plans: Sequence[StagePlan], template: Template | None) -> Forecast:
    """Forecast the submission of these stages with this template.

    Raises:
        RequestError: a stage cannot be frozen.
    """
    chosen = template or Template()
    stages = _forecast_stages(control, plans)
    placement = control.reconciler.placements.build(chosen)
    with control.store.snapshot() as session:
        turn = find_new_position(session, control.reconciler.placements, template)
    site = getattr(chosen.placement, "site", None)
    return Forecast(
        placement=_describe_placement(chosen) or placement.name,
        launcher=placement.launcher,
        workspace=site.workspace if site is not None else "",
        turn=str(turn) if turn.slots is not None else "",
        has_turn=turn.can_start,
        stages=stages,
        cost=_forecast_cost(control, chosen, chosen.placement, stages)
        if isinstance(chosen.placement, RentedTarget)
        else None,
        secrets={
            name: _secret_problem(name)
            for name in sorted({name for plan in plans for name in plan.job.secrets})
        },
        retry=chosen.retry.model_dump(),
        limits=_effective_limits(chosen) if chosen.is_remote else {},
        bring=chosen.effective_bring if chosen.is_remote else "",
    )


def _describe_placement(template: Template) -> str:
    match template.placement:
        case SshTarget() as there:
            return f"ssh {there.host}"
        case RentedTarget() as rental:
            return f"rented {rental.provider}:{rental.kind}"
        case LocalTarget():
            return "this machine"


def _effective_limits(template: Template) -> dict[str, Any]:
    limits = template.limits.model_dump()
    if isinstance(template.placement, RentedTarget):
        limits["max_lifetime"] = min(limits["max_lifetime"], template.placement.lease.max_lifetime)
    if template.limits.on_box_stop_after is not None:
        limits["lost_after"] = template.limits.given_up_after
    return limits


def _forecast_stages(control: Control, plans: Sequence[StagePlan]) -> tuple[StageForecast, ...]:
    done: dict[str, Run] = {}
    forecasts = []
    for plan in plans:
        sources = {source for source in plan.consumes.values() if source != MODEL}
        if missing := sorted(sources - done.keys()):
            forecasts.append(
                StageForecast(plan.name, "later", after=tuple(missing), nodes=plan.job.resources.nodes)
            )
            continue
        job, inputs = resolve_inputs(control, plan, plans, done)
        with control.home.scratch() as scratch:
            digest = freeze(job, inputs, scratch / "bundle", SharedFiles(control.home.root))
            files = _bundle_sizes(scratch / "bundle", list(inputs))
            document = (scratch / "bundle" / "job.json").read_bytes()
        with control.store.snapshot() as session:
            run = find_reusable_run(session, control.home, digest, control.is_intact)
            other_code = "" if run else _find_other_code(control, session, plan.name, document)
        action = "begin"
        if run is not None:
            action = "reuse" if run.state == RunState.SUCCEEDED else "join"
        if run is not None and action == "reuse":
            done[plan.name] = run
        run_id = "" if run is None else run.id
        forecasts.append(
            StageForecast(plan.name, action, run_id, (), files, job.resources.nodes, digest, other_code)
        )
    return tuple(forecasts)


def _find_other_code(control: Control, session: Session, stage: str, document: bytes) -> str:
    """Return the newest finished run of the stage with this job.json; "" if there is none."""
    finished = select(Run).where(Run.stage == stage, Run.state == RunState.SUCCEEDED)
    for run in session.scalars(finished.order_by(Run.id.desc()).limit(MOST_COMPARED_RUNS)):
        job = Path(control.directory(run)) / "job.json"
        if job.exists() and job.read_bytes() == document:
            return run.id
    return ""


def _bundle_sizes(bundle: Path, inputs: Sequence[str]) -> dict[str, int]:
    """Return the sizes of a bundle's files in bytes, by input; scripts and wheel are separate."""
    sizes = dict.fromkeys([*inputs, "wheel", "scripts"], 0)
    for path in bundle.rglob("*"):
        if path.is_file():
            top, *rest = path.relative_to(bundle).parts
            name = rest[0] if top == "inputs" else "wheel" if path.suffix == ".whl" else "scripts"
            sizes[name] += path.stat().st_size
    return sizes


def _secret_problem(name: str) -> str:
    try:
        return "" if secret_value(name) else "not set"
    except RequestError as error:
        return error.what


def _forecast_cost(
    control: Control, template: Template, rental: RentedTarget, stages: Sequence[StageForecast]
) -> CostForecast:
    providers = control.reconciler.rentals.fleet.providers
    try:
        cap = providers.daily_cap()
        price = query_price(providers, rental)
    except PeriluneError as error:
        return CostForecast(str(error).partition("\n")[0])
    committed = cost_today(control.store.read(select(Machine)))
    seconds = rental.lease.max_seconds(price)
    attempt = compute_cost(price, seconds)
    tries = 1 + sum(getattr(template.retry, kind) for kind in ("infrastructure", "lost", "user"))
    machines = sum(stage.nodes for stage in stages if stage.action in {"begin", "later"})
    most = max((stage.nodes for stage in stages if stage.action in {"begin", "later"}), default=0)
    left = max(0.0, cap - committed)
    over = attempt * most > left
    problem = f"an attempt waits until enough of the daily cap of {cap:.4g} is left" if over else ""
    return CostForecast(
        problem, price, seconds, attempt, attempt * machines, attempt * machines * tries, cap, left
    )
