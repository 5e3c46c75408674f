"""Commands that look after the home directory, and those that are rarely needed."""

COMMANDS = {
    "artifacts": ("maintenance.artifacts:app", "Store the artifacts of runs in remote storage."),
    "collect": ("maintenance.artifacts:collect", "Download the artifacts of a run."),
    "rm": ("maintenance.disk:rm", "Remove an experiment and its runs."),
    "backup": ("maintenance.backup:backup", "Back up the home directory while it is in use."),
    "restore": ("maintenance.backup:restore", "Restore a backup."),
    "rebuild": ("maintenance.backup:rebuild", "Rebuild a damaged or lost database."),
    "adopt": ("maintenance.backup:adopt", "Take over the runs and machines of a restored home."),
    "worker": ("maintenance.worker:worker", "Execute a bundle here, as remote machines do."),
    "reconcile": ("machines.daemon:reconcile", "Update recorded state from what is running."),
    "gc": ("maintenance.disk:gc", "Show disk usage and delete files that no run needs."),
    "panic": ("machines.rented:panic", "Terminate every machine this home has rented."),
    "lab": ("maintenance.lab:lab", "Inject failures into short runs and check recovery."),
}
