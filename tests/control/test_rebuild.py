"""A damaged or lost database is detected and rebuilt from the files on disk."""

import json
import random
import shutil
from pathlib import Path

from drill_cases import Command, carry_out, drill_control, drill_plan, hanging, worker_of

from perilune.control.runs.experiments import Control
from perilune.control.runs.progress import StageReused
from perilune.control.runs.requests import cancel_run
from perilune.execution.processes import ProcessIdentity

PAGE = 4096


def delete_database(database: Path) -> None:
    for path in database.parent.glob("state.db*"):
        path.unlink()


def overwrite_pages(database: Path) -> None:
    """Overwrite 3 pages but not the first, which makes the file a database."""
    pages = database.stat().st_size // PAGE
    with database.open("r+b") as file:
        for page in random.Random(1).sample(range(pages // 2, pages), 3):
            file.seek(page * PAGE)
            file.write(random.Random(page).randbytes(PAGE))


def replace_by_garbage(database: Path) -> None:
    database.write_bytes(b"x" * 5000)


def test_rebuild_restores_damaged_or_lost_database(perilune: Command, control: Control) -> None:
    events, attempt = hanging(control)
    live, worker = attempt.parents[1].name, worker_of(attempt)
    one, two = drill_plan("one", steps=1), drill_plan("two", steps=2)
    carry_out(control, one, two)
    carry_out(control, drill_plan("bad", fail_at=0, how="work"), name="failing")
    assert perilune("verify")[0] == 0 and perilune("rebuild")[0] == 2  # nothing is damaged yet
    control.store.close()

    def runs() -> dict[str, object]:
        rows = json.loads(perilune("runs", "--json")[1])["runs"]
        same = ("stage", "state", "cause", "message")
        return {run["run"]: [run[key] for key in same] for run in rows}

    before = runs()
    for damage in (delete_database, overwrite_pages, replace_by_garbage):
        damage(control.home.database)
        code, out, err = perilune("verify")
        assert code == 1 and "perilune rebuild" in out + err
        code, out, err = perilune("rebuild")
        assert code == 0 and "runs: 1 active, 1 failed, 2 succeeded" in out and "not rebuilt" not in out, err
        assert "is kept: " in out and "state.damaged-" in out
        code, out, err = perilune("verify")
        assert code == 0, out + err
        assert runs() == before
    reopened = drill_control(control.home.root)
    assert all(isinstance(event, StageReused) for event in carry_out(reopened, one, two))
    assert ProcessIdentity.of(worker) is not None and reopened.reconciler.reconcile(live).state == "active"
    assert cancel_run(reopened, live).state == "cancelled" and ProcessIdentity.of(worker) is None
    reopened.store.close()
    events.close()  # type: ignore[attr-defined]


def test_rebuild_ignores_the_experiment_of_a_killed_command(perilune: Command, control: Control) -> None:
    *_, event = carry_out(control, drill_plan("one", steps=1))
    experiment = control.run(event.run_id).experiment_id
    control.store.close()
    left = control.home.experiment("0" * len(experiment))
    shutil.copytree(control.home.experiment(experiment), left)
    delete_database(control.home.database)
    code, out, err = perilune("rebuild")
    assert code == 0 and f"experiment {left.name}: a newer one has the same recipe" in out, err
    assert drill_control(control.home.root).run(event.run_id).experiment_id == experiment


def test_rebuild_recovers_runs_with_unreadable_files(perilune: Command, control: Control) -> None:
    *_, event = carry_out(control, drill_plan("one", steps=1))
    run = control.home.run(event.run_id)
    control.store.close()
    (run / "submission.json").unlink()  # as from an earlier version
    for path in control.home.experiments.glob("*/recipe.json"):
        path.write_text("{")
    (control.home.runs / "stray").mkdir()
    delete_database(control.home.database)
    code, out, _ = perilune("rebuild")
    assert code == 0 and "not rebuilt: experiment" in out and "not rebuilt: run stray" in out
    (row,) = json.loads(perilune("runs", "--json")[1])["runs"]
    assert (row["run"], row["state"]) == (event.run_id, "succeeded")
    assert perilune("verify", event.run_id)[0] == 0
