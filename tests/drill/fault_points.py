"""The points at which `perilune.control.record.faults.kill_point` can kill a command."""

POINTS = (
    "submit.frozen",
    "submit.published",
    "submit.accepted",
    "admit.committed",
    "stage.intended",
    "stage.done",
    "stage.committed",
    "start.intended",
    "start.done",
    "adopt.committed",
    "finalize.begun",
    "finalize.pulled",
    "end.committed",
    "finalize.committed",
)
REMOTE_POINTS = ("clean.done",)  # in addition, for runs whose files are on another machine
REMOVAL_POINTS = ("remove.recorded", "remove.renamed")  # of `perilune gc` and `perilune rm`
MACHINE_POINTS = (  # in addition, for runs on rented machines
    "rent.committed",
    "create.intended",
    "create.done",
    "create.committed",
    "machine.ready",
    "machine.draining",
    "terminate.intended",
    "terminate.done",
    "gone.committed",
)
HANDOVER_POINTS = ("handover.committed",)  # in addition, for a stage on the machine of the stage before
