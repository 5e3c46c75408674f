"""Run an experiment stage by stage: reuse finished stages, join live ones, start the others.

Several commands may work on the same recipe. They follow the same runs, and each continues if another dies.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select

from perilune.bundle.freeze import freeze
from perilune.bundle.job import InputReference, Job
from perilune.bundle.plugin import consumed_fields, load_plugin
from perilune.bundle.remote.runner import stays_on_machine
from perilune.bundle.secret_sources import register_secrets
from perilune.bundle.shared_files import SharedFiles
from perilune.control.evidence.attempt_evidence import find_evidence_problem
from perilune.control.evidence.attestation import removed_artifacts
from perilune.control.record.home import Home, announce_starter
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Attempt, Event, Experiment, Run, Stage, Store, record_event
from perilune.control.record.transitions import AttemptState, Reachability, RunState
from perilune.control.runs.current_submission import complete_submission, find_run_of_stage
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.progress import (
    StageEvent,
    StageFailed,
    StageFinished,
    StageNotice,
    StageProgress,
    StageResumed,
    StageReused,
    StageStarted,
)
from perilune.control.runs.reconcile import Reconciler
from perilune.control.runs.submission import Submission, submit_stage
from perilune.control.runs.templates import BUILT_IN, LOCAL_TEMPLATE, Template
from perilune.errors import RequestError
from perilune.execution.background import in_background, wait_until
from perilune.execution.log import log_tail
from perilune.execution.placements.upload import read_upload_progress
from perilune.execution.verdict import read_verdict
from perilune.files import canonical_json, read_json, sha256_bytes, write_json
from perilune.recipe.schema import MODEL, Recipe, build_job
from perilune.recipe.staging import stage_files

POLL_INTERVAL_S = 0.2
LOOK_TIMEOUT_S = 1.0  # to wait for one reconciliation of a run before looking at other machines
_UNREACHABLE = "its machine is unreachable"
OVERRIDES_FILE = "overrides.json"  # in an experiment's directory: the overrides that it was created with


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a recipe, for the control plane.

    Attributes:
        job: the job without inputs.
        consumes: field of the task's spec to the stage whose output it takes, or to "model".
    """

    name: str
    job: Job
    consumes: Mapping[str, str] = field(default_factory=dict)


class Control:
    """The control plane of one home: its store and its reconciler."""

    def __init__(self, home: Home | None = None, policy: RetryPolicy | None = None) -> None:
        self.home = home or Home.open()
        self.store = Store(self.home)
        self.reconciler = Reconciler(self.home, self.store, policy)

    def run(self, run_id: str) -> Run:
        """Return the run as recorded. Raises sqlalchemy.exc.NoResultFound if there is none."""
        return self.reconciler.run(run_id)

    def directory(self, run: Run) -> Path:
        """Return the directory of the run's current attempt; the frozen bundle before the first attempt."""
        if run.current_epoch == 0:
            return self.home.bundle(run.id)
        return self.home.attempt(run.id, run.current_epoch)

    def existing_directory(self, run: Run) -> Path:
        """Return `directory`. Raises RequestError if it is missing."""
        folder = self.directory(run)
        if not folder.is_dir():
            raise RequestError(
                f"the files of the run are missing: {folder}",
                where=f"run {run.id}",
                remedy="run its recipe again; only `perilune backup --evidence` copies the files of runs",
            )
        return folder

    def summary(self, run: Run) -> Mapping[str, Any]:
        """Return the summary that the run's task wrote; empty before."""
        path = self.directory(run) / "artifacts" / "summary.json"
        summary: Mapping[str, Any] = read_json(path) if path.exists() else {}
        return summary

    def is_intact(self, run: Run) -> bool:
        """Return whether the committed evidence of a succeeded run is still in place."""
        try:
            verdict = read_verdict(self.directory(run) / "runtime", run.current_epoch)
        except RequestError:
            return False
        if verdict is None or verdict.manifest_digest != run.manifest_digest:
            return False
        removed = removed_artifacts(self.home, run.id, run.current_epoch)
        return not find_evidence_problem(self.directory(run), verdict, removed)


def plan_stages(recipe: Recipe, template: Template | None = None) -> list[StagePlan]:
    """Return the stages of a recipe in execution order, with the resources that the template sets.

    Raises:
        RequestError: the template cannot run a stage, or leaves a checkpoint behind that a stage takes.
    """
    where = template or BUILT_IN[LOCAL_TEMPLATE]
    tasks = {stage.name: stage.task for stage in recipe.stages}
    for stage in recipe.stages:
        for source in stage.consumes.values():
            left = source in tasks and stays_on_machine(
                f"{load_plugin(tasks[source]).output}/", where.effective_bring
            )
            if left and where.is_remote:
                raise RequestError(
                    f"stage {stage.name} takes the checkpoint of stage {source}, which stays on its machine",
                    where="bring: metrics in the template",
                    remedy="bring: final",
                )
    jobs = {stage.name: where.apply_resources(build_job(recipe, stage)) for stage in recipe.stages}
    return [StagePlan(stage.name, jobs[stage.name], stage.consumes) for stage in recipe.stages]


def open_experiment(control: Control, recipe: Recipe, overrides: Sequence[str] = ()) -> str:
    """Return the id of this resolved recipe's experiment, created if it is new, and marked as the latest.

    Args:
        overrides: those that the recipe was loaded with; a new experiment records them, for listings.
    """
    register_secrets(recipe.secrets)
    document = recipe.model_dump(mode="json")
    stages = [(stage.name, stage.task) for stage in recipe.stages]
    return register_experiment(control, recipe.name, document, stages, overrides)


def register_experiment(
    control: Control,
    name: str,
    document: Mapping[str, Any],
    stages: Sequence[tuple[str, str]],
    overrides: Sequence[str] = (),
) -> str:
    """Open an experiment from the resolved recipe as a JSON document and its (stage, task) pairs."""
    digest = sha256_bytes(canonical_json(document))
    fresh = new_ulid()
    now = time.time()
    with control.store.transaction() as session:
        known = session.scalars(select(Experiment).where(Experiment.recipe_digest == digest)).one_or_none()
        if known is not None:
            known.used = now
            return known.id
        write_json(control.home.experiment(fresh) / "recipe.json", document)
        if overrides:
            write_json(control.home.experiment(fresh) / OVERRIDES_FILE, list(overrides))
        session.add(Experiment(id=fresh, name=name, recipe_digest=digest, created=now, used=now))
        session.flush()
        for position, (stage, task) in enumerate(stages):
            session.add(Stage(experiment_id=fresh, position=position, name=stage, task=task))
        record_event(session, "experiment.created", experiment=fresh, name=name)
    return fresh


def advance(
    control: Control,
    experiment_id: str,
    plans: Sequence[StagePlan],
    *,
    template: Template | None = None,
    new_submission: bool = True,
    poll: float = POLL_INTERVAL_S,
) -> Iterator[StageEvent]:
    """Run an experiment to its end or first failure, and yield its events.

    New runs go where `template` says; live and finished runs stay where they are. The caller may stop at any
    event or be killed: runs continue by themselves, and the next call continues from there. Several processes
    may call this at once. The last event is StageFailed if a stage failed or was cancelled.

    Args:
        new_submission: True if a user submits the experiment now: each stage is examined again, and the
            submission is recorded with the first. False continues the current submission with the runs that
            its stages have.

    Raises:
        RequestError: the inputs or the job of a stage cannot be frozen.
        ExperimentCancelledError: the experiment is cancelled while none of its runs is live.
    """
    began, joined = time.time(), False
    done: dict[str, Run] = {}
    with announce_starter(control.home, experiment_id):
        for position, plan in enumerate(plans, start=1):
            part: Literal["first", "later"] = "first" if new_submission and position == 1 else "later"
            run = None
            if part == "later":
                with control.store.snapshot() as session:
                    run = find_run_of_stage(session, experiment_id, plan.name)
            if run is None:
                submission = Submission(experiment_id, plan.name, plan.job.task, template=template, part=part)
                job, inputs = resolve_inputs(control, plan, plans, done)
                freezing = partial(freeze, job, inputs, shared=SharedFiles(control.home.root))
                run = submit_stage(control.home, control.store, submission, freezing, control.is_intact)
            if run.state == RunState.SUCCEEDED:
                yield StageReused(plan.name, run.id, control.summary(run))
            else:
                joined = joined or (run.current_epoch > 0 and run.created < began)
                yield StageStarted(plan.name, run.id, plan.job.task, position, len(plans), joined)
                yield from follow_run(control, run.id, poll=poll, stage=plan.name)
                run = control.run(run.id)
                if run.state != RunState.SUCCEEDED:
                    return
            done[plan.name] = run
        complete_submission(control.store, experiment_id)


def resolve_inputs(
    control: Control, plan: StagePlan, plans: Sequence[StagePlan], done: Mapping[str, Run]
) -> tuple[Job, dict[str, Path]]:
    """Return the job of a stage with its inputs named, and the paths of the inputs.

    Inputs are the outputs of the consumed stages, the weights of the recipe's model section (as input
    "model"), and the files of its environment section. The bundle thus contains everything that the stage
    needs, and its digest covers all of it.
    """
    tasks = {other.name: other.job.task for other in plans}
    kinds = consumed_fields(load_plugin(plan.job.task).spec)
    inputs: dict[str, Path] = {}
    references = []
    for name, source in sorted(plan.consumes.items()):
        if source == MODEL:
            continue
        output = control.directory(done[source]) / load_plugin(tasks[source]).output
        if not output.exists():
            remedy = f"perilune verify {done[source].id}"
            raise RequestError(
                f"stage {source} produced no {output.name}", where=str(output.parent), remedy=remedy
            )
        inputs[name] = output
        references.append(InputReference(name=name, path=f"inputs/{name}", digest="", kind=kinds[name]))
    weights = plan.job.model.get("path")
    if weights and MODEL in plan.consumes.values():
        inputs[MODEL] = Path(weights)
        references.append(InputReference(name=MODEL, path=f"inputs/{MODEL}", digest="", kind="checkpoint"))
    job, files = stage_files(plan.job.model_copy(update={"inputs": tuple(references)}))
    return job, inputs | files


def follow_run(
    control: Control, run_id: str, *, poll: float = POLL_INTERVAL_S, stage: str = ""
) -> Iterator[StageEvent]:
    """Follow a run to its end and reconcile it; the last event is StageFinished or StageFailed.

    Meanwhile, also during transfers, it reconciles the machines that this process manages, so that their
    leases are enforced.
    """
    last_progress: Any = None
    attempt, last_message = 0, ""
    look: Future[Run] | None = None
    while True:
        look = look or in_background(partial(control.reconciler.reconcile, run_id))
        wait_until(time.monotonic() + LOOK_TIMEOUT_S, look)
        if look.done():
            run, look = look.result(), None
        else:  # it is transferring files
            run = control.run(run_id)
            control.reconciler.rentals.reconcile_managed(live=True)
        name = stage or run.stage
        directory = control.directory(run)
        if run.current_epoch > attempt:
            if attempt > 0:
                yield StageResumed(
                    name, run_id, run.current_epoch, *_attempt_outcome(control, run_id, attempt)
                )
            attempt = run.current_epoch
        message = _attempt_message(control, run)
        if not message and last_message.startswith(_UNREACHABLE):
            message = "reachable again"
        if message not in {"", last_message}:
            last_message = message
            yield StageNotice(name, run_id, attempt, message)
        progress = read_progress(directory)
        if progress is not None and progress != last_progress:
            last_progress = progress
            yield StageProgress.of(name, run_id, attempt, progress)
        if look is None and RunState(run.state).is_terminal:
            yield _final_event(control, run, name)
            return
        time.sleep(poll)


def _final_event(control: Control, run: Run, stage: str) -> StageEvent:
    if run.state == RunState.SUCCEEDED:
        seconds = (run.ended or 0.0) - run.created
        return StageFinished(stage, run.id, control.summary(run), seconds)
    tail = log_tail(control.directory(run) / "runtime")
    return StageFailed(stage, run.id, run.cause, run.message, tail, run.state == RunState.CANCELLED)


def _attempt_message(control: Control, run: Run) -> str:
    """Return the message of the live attempt of a run or why it is unreachable, or ""."""
    with control.store.snapshot() as session:
        row = session.get(Attempt, (run.id, run.current_epoch))
        if row is None or AttemptState(row.state).is_terminal:
            return ""
        if row.reachability != Reachability.UNREACHABLE:
            return row.message
        found = select(Event).where(
            Event.run_id == run.id, Event.kind == f"attempt.{Reachability.UNREACHABLE}"
        )
        event = session.scalars(found.order_by(Event.seq.desc()).limit(1)).first()
        why = str(event.detail.get("why", "")) if event else ""
        return f"{_UNREACHABLE}: {why}" if why else _UNREACHABLE


def _attempt_outcome(control: Control, run_id: str, attempt: int) -> tuple[str, str]:
    with control.store.snapshot() as session:
        row = session.get_one(Attempt, (run_id, attempt))
        return row.cause, row.message


def read_progress(attempt: Path) -> dict[str, Any] | None:
    """Return the last progress that the task reported; during staging, the progress of the upload."""
    try:
        progress: dict[str, Any] = read_json(attempt / "runtime" / "progress.json")
    except RequestError:
        return read_upload_progress(attempt)
    return progress
