"""A second Ctrl-C while the command records the cancel request does not lose the request."""

import os
import signal
from types import SimpleNamespace

import pytest

from perilune.cli.train import follow
from perilune.control.runs.progress import StageStarted


def test_second_ctrl_c_exits_after_recording_the_cancel_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested, messages = [], []

    def request(control: object, name: str, only: str) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        requested.append((name, only))
        return [only]

    def cancel(control: object, run_id: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(follow, "request_experiment_cancel", request)
    monkeypatch.setattr(follow, "cancel_run", cancel)
    started = StageStarted("rl", "RUN", "rl", 1, 1, attached=False)
    with pytest.raises(KeyboardInterrupt):
        follow._interrupt(None, "EXPERIMENT", started, SimpleNamespace(print=messages.append))
    assert requested == [("EXPERIMENT", "RUN")]
    assert messages[-1] == "rl is still stopping; `perilune reconcile` completes it"
