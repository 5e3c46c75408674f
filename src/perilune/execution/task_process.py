"""The process in which a task runs: `python -m perilune.execution.task_process BUNDLE [SUPERVISOR_PID]`.

It dies with its supervisor, so that no attempt goes on unseen, and leaves its last words in
runtime/failure.json when it has the time. Several may run a task together: RANK and WORLD_SIZE say so, which
the worker sets, or torchrun.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from perilune.bundle.plugin import TaskPlugin, load_plugin, runs_in_several
from perilune.bundle.provenance import record_precheck
from perilune.bundle.secret_sources import learn_secrets
from perilune.bundle.workspace import SUMMARY, FollowerWorkspace, Workspace
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.processes import die_with
from perilune.execution.ranks import directory_of
from perilune.execution.verdict import LAST_WORDS, RESERVE, Cause, cause_of, describe_error
from perilune.files import write_json
from perilune.watchdog import leave_stacks_in

STOPPED_EXIT_CODE = 128 + signal.SIGTERM


def run_task(bundle: Path) -> None:
    """Run the bundle's task and write what it observed: precheck, then the task's own, then the summary.

    Of several processes, those beside the first write none of it.

    Raises:
        WorkFailedError: when the task returned without what it promises to produce.
        RequestError: when it cannot run in several processes.
    """
    if _rank() > 0:
        follower = FollowerWorkspace(bundle)
        learn_secrets(follower.job.secrets)
        plugin = load_plugin(follower.job.task)
        if not runs_in_several(plugin):
            raise RequestError(f"the task {plugin.name} runs in one process", remedy="start one")
        if not was_finished(follower, plugin):
            plugin.run(follower)
        return
    workspace = Workspace(bundle)
    learn_secrets(workspace.job.secrets)
    plugin = load_plugin(workspace.job.task)
    record_precheck(workspace)  # now, because the task may not live to its end
    if not was_finished(workspace, plugin):
        summary = plugin.run(workspace)
        record_precheck(workspace)  # and again, when everything it uses has been loaded
        workspace.finish(summary)
    if not (bundle / plugin.output).exists():  # which may be the summary itself
        raise WorkFailedError(f"the task ended without making {plugin.output}") from _Missing()


def was_finished(workspace: Workspace, plugin: TaskPlugin) -> bool:
    """Whether an earlier attempt wrote the summary, and died before its result was recorded.

    Only on a single machine: the processes of another one may not see that summary.
    """
    together = workspace.job.resources.nodes == 1
    return together and (workspace.artifacts / SUMMARY).exists() and (workspace.root / plugin.output).exists()


class _Missing(Exception):  # noqa: N818 - marks a cause, is never raised by itself
    """The task did not make its output."""


def main() -> None:
    """Run the task of the bundle named on the command line; the exit code is 0, 1 or 2."""
    bundle = Path(sys.argv[1]).absolute()
    own = directory_of(bundle, _rank())
    own.mkdir(parents=True, exist_ok=True)
    die_with(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    faulthandler.enable()
    leave_stacks_in(own)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to judge
    try:
        run_task(bundle)
    except Exception as error:
        cause = Cause.ARTIFACT_MISSING if isinstance(error.__cause__, _Missing) else cause_of(error)
        if not isinstance(error, PeriluneError):
            traceback.print_exc()
        message = describe_error(error)
        print(f"failed: {message}", file=sys.stderr, flush=True)
        _leave_last_words(own, {"cause": cause.value, "message": message})
        sys.exit(error.exit_code if isinstance(error, PeriluneError) else 1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave_last_words(runtime: Path, words: dict[str, str]) -> None:
    try:
        write_json(runtime / LAST_WORDS, words)
    except OSError:  # the disk is full: use the room that the worker keeps for this
        (runtime / RESERVE).unlink(missing_ok=True)
        write_json(runtime / LAST_WORDS, words)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(STOPPED_EXIT_CODE)  # runs the task's own `finally` blocks


if __name__ == "__main__":
    main()
