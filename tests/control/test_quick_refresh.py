"""Commands that only show state do not wait for an unresponsive machine."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from drill_cases import begin, drill_plan, only_run

from perilune.control.record.store import Attempt, Run, move_run
from perilune.control.record.transitions import AttemptState, RunState
from perilune.control.runs.experiments import Control, advance
from perilune.control.runs.templates import SshTarget, Template
from perilune.files import locked


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and never sends anything."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield int(listening.getsockname()[1])


def listing() -> tuple[str, str]:
    command = [sys.executable, "-m", "perilune.cli.main", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_runs_shows_last_known_state_when_machine_does_not_answer(control: Control, silent: int) -> None:
    there = SshTarget(host="127.0.0.1", port=silent, config="/dev/null")
    plan = drill_plan()
    next(advance(control, begin(control, [plan]), [plan], template=Template(placement=there)))
    run_id = only_run(control).id
    with control.store.transaction() as session:
        run = session.get_one(Run, run_id)
        run.current_epoch = 1
        session.add(
            Attempt(
                run_id=run_id,
                number=1,
                state=AttemptState.RUNNING.value,
                placement="ssh",
                launcher="process",
                created=time.time(),
            )
        )
        move_run(session, run, RunState.ACTIVE)

    out, err = listing()  # without waiting for the connection timeout
    assert "active" in out
    assert f"no answer from drill ({run_id}); showing the last known state" in err

    control.home.daemon.mkdir()
    with locked(control.home.daemon / "lock"):  # a daemon observes the machine anyway
        out, err = listing()
    assert "active" in out and err == ""
