"""Remove folders that killed commands left: runs that were not accepted, experiments that were removed."""

from sqlalchemy import select

from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import remove_tree
from perilune.control.record.home import Home
from perilune.control.record.store import Event, Experiment, Run, Store
from perilune.files import locked

REMOVED_EVENT = "experiment.removed"  # event of `perilune rm`, with the ids of the experiment and its runs


def remove_stale_folders(home: Home, store: Store) -> None:
    """Remove scratch directories, and the folders of runs and experiments that are not in the record.

    A run that has attempts but no record, as after restoring an older database, is evidence. It is removed
    only if `perilune rm` recorded its removal.
    """
    home.sweep()
    SharedFiles(home.root).remove_unused()
    names = {path.name for path in home.runs.iterdir()}
    for run_id in names - _recorded_ids(store):
        # The submitter holds the lock until the run is accepted.
        with locked(home.run(run_id) / "lock") as acquired:
            if not acquired or run_id in _recorded_ids(store):
                continue
            if run_id in _removed_ids(store):
                home.discard(home.run(run_id))
            elif not home.newest_attempt(run_id):
                remove_tree(home.run(run_id))
    experiments = {path.name for path in home.experiments.iterdir()}
    if unknown := experiments - _recorded_ids(store, Experiment):
        for experiment_id in unknown & _removed_ids(store):
            home.discard(home.experiment(experiment_id))


def _recorded_ids(store: Store, table: type[Run | Experiment] = Run) -> set[str]:
    return set(store.read(select(table.id)))


def _removed_ids(store: Store) -> set[str]:
    events = store.read(select(Event).where(Event.kind == REMOVED_EVENT))
    return {name for event in events for name in (event.detail["experiment"], *event.detail["runs"])}
