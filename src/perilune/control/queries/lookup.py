"""Find runs and experiments by id or name, and describe them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from perilune.bundle.verify import manifest_hashes
from perilune.control.machines.budget import MachineUse, machine_uses
from perilune.control.record.store import Attempt, EarlierUse, Event, Experiment, Machine, Run, Stage
from perilune.control.record.transitions import Cleanup, Reachability, RunState
from perilune.control.runs.experiments import OVERRIDES_FILE, Control
from perilune.errors import RequestError, UnknownNameError, closest_name
from perilune.execution.launchers.docker import read_container
from perilune.files import read_json, sha256_file

SUMMARY_FILE = "artifacts/summary.json"
WAITING_STATE = "waiting"  # state of a stage without a run
MAX_COMPARED_NAMES = 500  # stages of the latest experiments, with whose names an unknown name is compared
OMITTED_KEYS = ("kind", "correct_per_task", "seconds")  # parts of a summary that listings omit

NamedRow = TypeVar("NamedRow", Run, Experiment)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The status of one stage of an experiment.

    Attributes:
        state: of its run, or "waiting".
        reachability, cleanup: of the run's current attempt.
        attempt_dir: directory of the current attempt; None before the first.
        seconds: from submission to end; None while the run is live.
        summary: the summary that the task wrote; empty before.
        requested: whether later stages of the experiment start by themselves.
        conditions: errors that keep the run from making progress.
        submitted: when the experiment was submitted last, in seconds since 1970.
        overrides: those that the experiment was created with.
    """

    experiment_id: str
    experiment: str
    name: str
    task: str
    run_id: str
    state: str
    reachability: str
    cleanup: str
    attempts: int
    attempt_dir: Path | None
    bundle_digest: str
    cause: str
    message: str
    created: float | None
    seconds: float | None
    retry_of: str | None
    summary: dict[str, Any]
    requested: bool = False
    conditions: tuple[str, ...] = ()
    submitted: float = 0.0
    overrides: tuple[str, ...] = ()

    @property
    def display_state(self) -> str:
        """The state to display: a stage without a run waits only if it is requested."""
        return "not started" if self.state == WAITING_STATE and not self.requested else self.state

    def document(self) -> dict[str, Any]:
        """Return the status as a flat JSON object, with an evaluation's figures beside the stage's name."""
        fields = asdict(self, dict_factory=rename_run_id)
        summary = fields.pop("summary")
        fields["stage"] = fields.pop("name")
        fields["attempt_dir"] = str(self.attempt_dir) if self.attempt_dir else None
        kind = {"kind": summary["kind"]} if "kind" in summary else {}
        return (
            fields
            | kind
            | {key: value for key, value in summary.items() if key not in {*OMITTED_KEYS, *fields}}
        )


def rename_run_id(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object in which the id of a run is called `run`, as in all documents for users."""
    return {"run" if name == "run_id" else name: value for name, value in fields}


def list_ended_runs(control: Control) -> list[Run]:
    """Return all runs that have ended, oldest first."""
    ended = [state.value for state in RunState if state.is_terminal]
    return control.store.read(select(Run).where(Run.state.in_(ended)).order_by(Run.id))


def find_experiment(control: Control, reference: str | None = None) -> Experiment:
    """Return an experiment by id, unique prefix of an id, or name (its latest); the latest one for None.

    Raises:
        RequestError: there is none, or the prefix is ambiguous.
    """
    experiments = control.store.read(select(Experiment).order_by(Experiment.used.desc()))
    if reference is None:
        if not experiments:
            raise RequestError("there are no experiments yet", remedy="perilune quickstart")
        return experiments[0]
    for experiment in experiments:
        if reference in {experiment.id, experiment.name}:
            return experiment
    matching = [experiment for experiment in experiments if experiment.id.startswith(reference.upper())]
    return _require_single(control, matching, reference, "experiment")


def find_experiments(control: Control, reference: str) -> list[str]:
    """Return the ids of all experiments of that name, oldest first, or of one as in `find_experiment`."""
    with control.store.snapshot() as session:
        named = (
            select(Experiment.id)
            .where(Experiment.name == _as_unicode(reference))
            .order_by(Experiment.created)
        )
        ids = list(session.scalars(named))
    return ids or [find_experiment(control, reference).id]


def find_run_or_experiment(control: Control, reference: str) -> Run | Experiment:
    """Return a run as in `find_run`, or else an experiment as in `find_experiment`.

    Raises:
        RequestError: there is neither, or the prefix of an id is ambiguous.
    """
    reference = _as_unicode(reference)
    with control.store.snapshot() as session:
        if experiment := session.get(Experiment, reference.upper()):
            return experiment
    try:
        return find_run(control, reference)
    except RequestError as no_run:
        try:
            return find_experiment(control, reference)
        except UnknownNameError:
            if isinstance(no_run, UnknownNameError):
                raise _unknown_name(control, reference, "run or experiment") from None
            what = no_run.what.replace("no run is", "no run or experiment is", 1)
            raise RequestError(what, where=no_run.where, remedy=no_run.remedy) from None


def find_current_stage_run(session: Session, experiment_id: str) -> Run | None:
    """Return the run of an experiment's current stage: the first that has not succeeded, or else the last."""
    query = select(Run).join(Stage, Stage.run_id == Run.id).where(Stage.experiment_id == experiment_id)
    begun = list(session.scalars(query.order_by(Stage.position)))
    return next((run for run in begun if run.state != RunState.SUCCEEDED), begun[-1] if begun else None)


def find_run(control: Control, reference: str) -> Run:
    """Return a run by id, unique prefix of an id, "experiment/stage", or stage of the latest experiment.

    Raises:
        RequestError: there is none, or the prefix is ambiguous.
    """
    reference = _as_unicode(reference)
    experiment_name, slash, stage_name = reference.rpartition("/")
    with control.store.snapshot() as session:
        if not slash and (run := session.get(Run, reference.upper())):
            return run
        prefix = func.substr(Run.id, 1, len(reference))  # LIKE has a limit on the length of its pattern
        matching = session.scalars(select(Run).where(prefix == reference.upper()))
        prefixed = [] if slash else list(matching)
        stages = []
        if slash or session.scalars(select(Experiment.id).limit(1)).first():
            try:
                experiment = find_experiment(control, experiment_name if slash else None)
            except UnknownNameError:
                raise _unknown_name(control, reference, "run") from None
            query = select(Stage).where(Stage.experiment_id == experiment.id, Stage.name == stage_name)
            stages = list(session.scalars(query))
        if stages and stages[0].run_id is None:
            raise RequestError(
                f"stage {stage_name} of {experiment.name} has not started", remedy="perilune runs"
            )
        if stages:
            return session.get_one(Run, stages[0].run_id)
    if not prefixed and (names := _list_run_names(control, reference)):
        raise RequestError(f"'{reference}' is an experiment", remedy=f"one of its runs: {names}")
    if not prefixed and (other := _find_experiment_with(control, reference)):
        raise RequestError(
            f"no run is called '{reference}', and the latest experiment has no stage of that name",
            remedy=f"{other}/{reference}",
        )
    return _require_single(control, prefixed, reference, "run")


def _as_unicode(reference: str) -> str:
    """Escape bytes of the command line that are no UTF-8, which the database cannot compare."""
    return reference.encode(errors="backslashreplace").decode()


def _find_experiment_with(control: Control, stage: str) -> str:
    query = select(Experiment.name).join(Stage, Stage.experiment_id == Experiment.id)
    query = query.where(Stage.name == stage, Stage.run_id.is_not(None)).order_by(Experiment.used.desc())
    return next(iter(control.store.read(query.limit(1))), "")


def _list_run_names(control: Control, reference: str) -> str:
    with control.store.snapshot() as session:
        named = select(Experiment).where(Experiment.name == reference).order_by(Experiment.used.desc())
        experiment = session.scalars(named.limit(1)).first()
        if experiment is None:
            return ""
        query = select(Stage.name).where(Stage.experiment_id == experiment.id, Stage.run_id.is_not(None))
        return ", ".join(f"{reference}/{name}" for name in session.scalars(query.order_by(Stage.position)))


def latest_experiments(control: Control, most: int | None = None) -> list[str]:
    """Return the ids of the experiments that were submitted last, at most `most` of them."""
    return control.store.read(select(Experiment.id).order_by(Experiment.used.desc()).limit(most))


def count_experiments(control: Control) -> int:
    return control.store.read(select(func.count()).select_from(Experiment))[0]


def stage_statuses(control: Control, experiment_ids: Sequence[str]) -> list[StageStatus]:
    """Return all stages of experiments in order, oldest experiment first."""
    query = (
        select(Experiment, Stage, Run, Attempt)
        .join(Stage, Stage.experiment_id == Experiment.id)
        .outerjoin(Run, Run.id == Stage.run_id)
        .outerjoin(Attempt, (Attempt.run_id == Run.id) & (Attempt.number == Run.current_epoch))
        .where(Experiment.id.in_(experiment_ids))
        .order_by(Experiment.created, Stage.position)
    )
    with control.store.snapshot() as session:
        rows = session.execute(query).all()
    conditions: dict[str, list[str]] = {}
    for condition in control.reconciler.conditions.all():
        conditions.setdefault(condition.run_id, []).append(str(condition))
    overrides = {key: read_overrides(control, key) for key in {row[0].id for row in rows}}
    return [_make_status(control, row, conditions, overrides[row[0].id]) for row in rows]


def group_stage_statuses(control: Control, experiment_ids: Sequence[str]) -> dict[str, list[StageStatus]]:
    groups: dict[str, list[StageStatus]] = {key: [] for key in experiment_ids}
    for status in stage_statuses(control, experiment_ids):
        groups[status.experiment_id].append(status)
    return groups


def read_overrides(control: Control, experiment_id: str) -> tuple[str, ...]:
    path = control.home.experiment(experiment_id) / OVERRIDES_FILE
    return tuple(map(str, read_json(path))) if path.exists() else ()


def _make_status(
    control: Control,
    row: Row[Experiment, Stage, Run | None, Attempt | None],
    conditions: Mapping[str, Sequence[str]],
    overrides: tuple[str, ...],
) -> StageStatus:
    experiment, stage, run, attempt = row
    begun = run is not None and attempt is not None
    errors, summary = list(conditions.get(run.id, ())) if run else [], {}
    try:
        summary = dict(control.summary(run)) if run else {}
    except (RequestError, TypeError, ValueError) as damaged:
        errors.append(f"artifacts: {damaged}")
    return StageStatus(
        experiment_id=experiment.id,
        experiment=experiment.name,
        name=stage.name,
        task=stage.task,
        run_id=run.id if run else "",
        state=run.state if run else WAITING_STATE,
        reachability=attempt.reachability if attempt else Reachability.UNKNOWN.value,
        cleanup=attempt.cleanup if attempt else Cleanup.NONE.value,
        attempts=run.current_epoch if run else 0,
        attempt_dir=control.directory(run) if run is not None and begun else None,
        bundle_digest=run.bundle_digest if run else "",
        cause=run.cause if run else "",
        message=run.message if run else "",
        created=run.created if run else None,
        seconds=round(run.ended - run.created, 3) if run and run.ended else None,
        retry_of=run.retry_of if run else None,
        summary=summary,
        requested=experiment.requested,
        conditions=tuple(errors),
        submitted=experiment.used,
        overrides=overrides,
    )


def list_attempts(control: Control, run_id: str) -> list[Attempt]:
    return control.store.read(select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.number))


@dataclass(frozen=True, slots=True)
class AttemptUse:
    """The placement and outcome of an attempt, and the cost of its rented machines.

    Attributes:
        price: of these machines together, in currency units per hour.
        cost: its share of what they have cost so far, in currency units; None if nothing was rented.
        began, ended: in seconds since 1970; `ended` is None while it is live.
    """

    run_id: str
    number: int
    placement: str
    state: str
    cause: str
    machines: int
    price: float
    cost: float | None
    began: float
    ended: float | None


def attempt_uses(control: Control, run_ids: Collection[str]) -> list[AttemptUse]:
    with control.store.snapshot() as session:
        tries = session.scalars(select(Attempt).where(Attempt.run_id.in_(run_ids)).order_by(Attempt.created))
        rented: dict[tuple[str, int], list[MachineUse]] = {}
        for use in machine_uses(session, run_ids):
            rented.setdefault((use.run_id, use.epoch), []).append(use)
        return [_attempt_use(attempt, rented.get((attempt.run_id, attempt.number), [])) for attempt in tries]


def _attempt_use(attempt: Attempt, rented: Sequence[MachineUse]) -> AttemptUse:
    return AttemptUse(
        run_id=attempt.run_id,
        number=attempt.number,
        placement=attempt.placement,
        state=attempt.state,
        cause=attempt.cause,
        machines=len(rented),
        price=sum(use.machine.price for use in rented),
        cost=sum(use.cost for use in rented) if rented else None,
        began=attempt.created,
        ended=attempt.ended,
    )


def machine_events(control: Control, machine: Machine) -> list[Event]:
    """Return the events of a machine, in order; those of the attempts that had it are left out."""
    earlier = select(EarlierUse.run_id).where(EarlierUse.machine_key == machine.key)
    runs = (Event.run_id == machine.run_id) | Event.run_id.in_(earlier)
    rows = control.store.read(select(Event).where(runs).order_by(Event.seq))
    return [row for row in rows if row.detail.get("machine") == machine.key]


def events_after(control: Control, seq: int = 0, run_id: str | None = None) -> list[Event]:
    """Return the events after event `seq`, in order: all of them, or those of one run."""
    query = select(Event).where(Event.seq > seq).order_by(Event.seq)
    if run_id is not None:
        query = query.where(Event.run_id == run_id)
    return control.store.read(query)


def run_document(control: Control, run: Run) -> dict[str, Any]:
    """Return everything recorded about a run: its attempts, events, conditions, summary and paths."""
    with control.store.snapshot() as session:
        experiment = session.get_one(Experiment, run.experiment_id)
    summary, damage = _read_summary(control, run)
    conditions: list[dict[str, Any]] = [
        {"about": condition.about, "message": condition.message, "since": condition.since}
        for condition in control.reconciler.conditions.all(run.id)
    ]
    if damage:
        conditions.append({"about": "artifacts", "message": damage, "since": None})
    return {
        "run": run.id,
        **_columns(run),
        "experiment": experiment.name,
        "bundle": str(control.home.bundle(run.id)),
        "directory": str(control.directory(run)),
        "attempts": [
            {**_columns(attempt), "container": container and container.model_dump()}
            for attempt in list_attempts(control, run.id)
            for container in [read_container(control.home.attempt(run.id, attempt.number))]
        ],
        "conditions": conditions,
        "events": [
            {"time": row.time, "epoch": row.epoch, "kind": row.kind, **row.detail}
            for row in events_after(control, run_id=run.id)
        ],
        "summary": summary,
    }


def _read_summary(control: Control, run: Run) -> tuple[dict[str, Any], str]:
    summary: dict[str, Any] = {}
    succeeded = run.state == RunState.SUCCEEDED
    try:
        if intact := not succeeded or _is_attested(control, run):
            summary = dict(control.summary(run))
            intact = not succeeded or control.is_intact(run)
    except (RequestError, TypeError, ValueError):
        intact = False
    remedy = f"`perilune verify {run.id}` lists them, and `perilune run` runs the stage again"
    return summary, "" if intact else f"damaged or missing; {remedy}"


def _is_attested(control: Control, run: Run) -> bool:
    """Return whether the summary of a succeeded run is the one that its manifest lists."""
    path = control.directory(run) / SUMMARY_FILE
    digest = sha256_file(path) if path.is_file() else None
    return digest == manifest_hashes(control.directory(run)).get(SUMMARY_FILE)


def _columns(row: Run | Attempt) -> dict[str, Any]:
    names = [column.name for column in row.__table__.columns if column.name not in {"id", "run_id"}]
    return {name: getattr(row, name) for name in names}


def _require_single(control: Control, matching: list[NamedRow], reference: str, kind: str) -> NamedRow:
    if not matching or not reference:  # every id begins with an empty prefix
        raise _unknown_name(control, reference, kind)
    if len(matching) > 1:
        raise RequestError(
            f"'{reference}' matches {len(matching)} {kind}s", remedy=", ".join(row.id for row in matching[:4])
        )
    return matching[0]


def _unknown_name(control: Control, reference: str, kind: str) -> UnknownNameError:
    """Return the error for an unknown name, with the closest one of that kind as the remedy."""
    query = select(Experiment.id, Experiment.name, Stage.name).join(Stage).where(Stage.run_id.is_not(None))
    with control.store.snapshot() as session:
        rows = session.execute(query.order_by(Experiment.used.desc()).limit(MAX_COMPARED_NAMES)).all()
    names = [experiment for _, experiment, _ in rows] if "experiment" in kind else []
    if "run" in kind:
        names += [stage for identity, _, stage in rows if identity == rows[0][0]]
        names += [f"{experiment}/{stage}" for _, experiment, stage in rows]
    close = closest_name(reference, names)
    remedy = f"'{close}'; perilune runs lists all" if close else "perilune runs"
    return UnknownNameError(f"no {kind} is called '{reference}'", remedy=remedy)
