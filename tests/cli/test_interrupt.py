"""A second Ctrl-C at the worst moment does not lose the request to stop."""

import os
import signal
from types import SimpleNamespace

import pytest

from perilune.cli.train import follow
from perilune.control.runs.progress import StageStarted


def test_ctrl_c_twice_records_the_request_before_the_command_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested, said = [], []

    def request(control: object, name: str) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        requested.append(name)
        return ["RUN"]

    def cancel(control: object, run_id: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(follow, "request_experiment_cancel", request)
    monkeypatch.setattr(follow, "request_cancel", request)
    monkeypatch.setattr(follow, "cancel", cancel)
    started = StageStarted("rl", "RUN", "rl", 1, 1, attached=False)
    with pytest.raises(KeyboardInterrupt):
        follow._interrupt(None, "EXPERIMENT", started, SimpleNamespace(say=said.append))
    assert requested == ["EXPERIMENT", "RUN"]
    assert said[-1] == "rl is still stopping; `perilune reconcile` completes it"
