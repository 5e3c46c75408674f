"""An old copy of the database under newer files: nothing is deleted, nothing runs twice."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from drill_cases import (
    carry_out,
    drill_control,
    drill_plan,
    family,
    has_event,
    only_run,
    start,
    wait_for,
    worker_of,
)

from perilune.control.runs.experiments import Control
from perilune.control.runs.requests import cancel_run
from perilune.execution.processes import ProcessIdentity


def copy_database(control: Control, destination: Path) -> None:
    with (
        closing(sqlite3.connect(control.home.database)) as source,
        closing(sqlite3.connect(destination)) as copy,
    ):
        source.backup(copy)


def restore_database(control: Control, copy: Path) -> Control:
    control.store.close()
    for leftover in control.home.root.glob("state.db-*"):
        leftover.unlink()
    shutil.copyfile(copy, control.home.database)
    return drill_control(control.home.root)


def test_unrecorded_runs_are_kept(control: Control, tmp_path: Path) -> None:
    carry_out(control, drill_plan("one", steps=1))
    copy_database(control, tmp_path / "yesterday.db")
    last = carry_out(control, drill_plan("two", steps=1))[-1]
    later = restore_database(control, tmp_path / "yesterday.db")
    later.reconciler.reconcile_all()
    assert (later.home.attempt(last.run_id, 1) / "artifacts" / "summary.json").is_file()
    events = carry_out(later, drill_plan("two", steps=1))  # a new run, because the old one is unknown
    assert events[-1].run_id != last.run_id
    later.store.close()


@pytest.mark.thorough
def test_unrecorded_attempt_is_stopped_before_the_next_starts(control: Control, tmp_path: Path) -> None:
    plan = drill_plan(steps=4, fail_at=2, how="hang", fresh_only=False)
    events, first = start(control, plan)
    wait_for(lambda: has_event(first, "hangs"), "the hang")
    copy_database(control, tmp_path / "yesterday.db")  # attempt 1 is running
    events.close()
    run_id = only_run(control).id
    identity = ProcessIdentity.of(worker_of(first))
    assert identity is not None
    identity.send(9)
    wait_for(
        lambda: control.reconciler.reconcile(run_id) and control.home.attempt(run_id, 2).is_dir(), "attempt 2"
    )
    second = control.home.attempt(run_id, 2)
    wait_for(
        lambda: control.reconciler.reconcile(run_id) and has_event(second, "hangs"), "the hang of attempt 2"
    )
    alive = family(second)
    assert alive
    later = restore_database(control, tmp_path / "yesterday.db")
    wait_for(lambda: later.reconciler.reconcile(run_id).current_epoch == 3, "attempt 3")
    assert not family(second)
    assert later.home.attempt(run_id, 2).is_dir()
    assert cancel_run(later, run_id).state == "cancelled"
    later.store.close()
