"""The process in which a task runs: `python -m perilune.execution.task_process BUNDLE [SUPERVISOR_PID]`.

It dies with its supervisor, so that no attempt continues unsupervised, and reports a failure in
runtime/failure.json if it can. Several processes may run a task together: the worker, or torchrun, then sets
RANK and WORLD_SIZE.
"""

import faulthandler
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from perilune.bundle.plugin import TaskPlugin, is_parallel, load_plugin
from perilune.bundle.provenance import record_precheck
from perilune.bundle.secret_sources import register_secrets
from perilune.bundle.workspace import SUMMARY, FollowerWorkspace, Workspace
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.processes import die_with_parent
from perilune.execution.ranks import rank_directory
from perilune.execution.verdict import FAILURE_FILE, RESERVE_FILE, Cause, describe_error, find_cause
from perilune.files import write_json
from perilune.garbage import reduce_garbage_collection
from perilune.watchdog import write_stacks_to

STOPPED_EXIT_CODE = 128 + signal.SIGTERM


def run_task(bundle: Path) -> None:
    """Run the bundle's task and write its precheck, artifacts and summary.

    Of several processes, only the first writes them.

    Raises:
        WorkFailedError: the task returned without its output.
        RequestError: the task cannot run in several processes.
    """
    if _rank() > 0:
        follower = FollowerWorkspace(bundle)
        register_secrets(follower.job.secrets)
        plugin = load_plugin(follower.job.task)
        if not is_parallel(plugin):
            raise RequestError(
                f"the task {plugin.name} cannot run in several processes",
                where=f"stage {follower.job.stage}",
                remedy="start a single process, without torchrun",
            )
        if not was_finished(follower, plugin):
            plugin.run(follower)
        return
    workspace = Workspace(bundle)
    register_secrets(workspace.job.secrets)
    plugin = load_plugin(workspace.job.task)
    record_precheck(workspace)  # now, because the task may be killed
    if not was_finished(workspace, plugin):
        try:
            summary = plugin.run(workspace)
        except Exception:
            with suppress(OSError, MemoryError):  # the disk or the memory may be full
                record_precheck(workspace)
            raise
        record_precheck(workspace)  # and again, once all its modules are loaded
        workspace.finish(summary)
    if not (bundle / plugin.output).exists():  # the output may be the summary itself
        raise WorkFailedError(f"the task ended without its output {plugin.output}") from _MissingOutputError()


def was_finished(workspace: Workspace, plugin: TaskPlugin) -> bool:
    """Return whether an earlier attempt wrote the summary, but died before its result was recorded.

    Always False with several machines, because the others may not see that summary.
    """
    single = workspace.job.resources.nodes == 1
    return single and (workspace.artifacts / SUMMARY).exists() and (workspace.root / plugin.output).exists()


class _MissingOutputError(Exception):
    """The task did not produce its output. Only used as the `__cause__` of a WorkFailedError."""


def main() -> None:
    """Run the task of the bundle named on the command line; the exit code is 0, 1 or 2."""
    reduce_garbage_collection()
    bundle = Path(sys.argv[1]).absolute()
    own = rank_directory(bundle, _rank())
    own.mkdir(parents=True, exist_ok=True)
    die_with_parent(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    faulthandler.enable()
    write_stacks_to(own)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    try:
        run_task(bundle)
    except Exception as error:
        cause = (
            Cause.ARTIFACT_MISSING if isinstance(error.__cause__, _MissingOutputError) else find_cause(error)
        )
        if not isinstance(error, PeriluneError):
            traceback.print_exc()
        message = describe_error(error)
        print(f"failed: {message}", file=sys.stderr, flush=True)
        _report_failure(own, {"cause": cause.value, "message": message})
        sys.exit(error.exit_code if isinstance(error, PeriluneError) else 1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _report_failure(runtime: Path, report: dict[str, str]) -> None:
    try:
        write_json(runtime / FAILURE_FILE, report)
    except OSError:  # the disk is full: use the space that the worker reserved
        (runtime / RESERVE_FILE).unlink(missing_ok=True)
        write_json(runtime / FAILURE_FILE, report)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(STOPPED_EXIT_CODE)  # runs the task's own `finally` blocks


if __name__ == "__main__":
    main()
