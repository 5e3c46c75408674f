"""A rollout process: `python -m perilune.tasks.rl.asynchronous.process BUNDLE FOLDER`.

The process reads JSON lines from standard input, answers on standard output, and logs to standard error:

    {"weights": name, "version": v, "checksum": c}  -> {"holds": v}
    {"admit": group}                                -> {"group": key, "file": name, "version_runs": runs}
                                                       later
    {"snapshot": name}                              -> {"snapshot": name} with the turns sampled so far
    {"settle": n}                                   -> {"settled": n} once the process is idle
    at an error                                     -> {"failed": message}, then the process ends

Messages name files in FOLDER: weights, finished groups and snapshots. The process ends when its standard
input ends, so it never outlives the learner. It then removes FOLDER, because a killed learner cannot.
"""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from torch import Tensor

from perilune.bundle.secret_sources import register_secrets
from perilune.bundle.workspace import FollowerWorkspace
from perilune.environments.core.protocol import Task
from perilune.errors import REPORT_BUG, PeriluneError, WorkFailedError
from perilune.files import write_atomic
from perilune.rollout.continuous import ContinuousRollouts, Group, TurnTokens, raise_error
from perilune.rollout.groups import Groups, groups_to_bytes
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.player import Player, open_player
from perilune.weights.delta import WeightReader
from perilune.weights.precision import engine_dtypes


class RolloutProcess:
    """Handles the learner's messages between the steps of the engine."""

    def __init__(
        self, player: Player, spec: RLSpec, folder: Path, send: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._player, self._folder, self._send = player, folder, send
        params = spec.params(player.policy.stop_token_ids)
        self._rollouts = ContinuousRollouts(player.rollouts, params, spec.samples, self._deliver)
        self._reader = WeightReader(engine_dtypes(player.policy.decoder))
        self._loaded = Event()  # set when no update waits to be loaded
        self._loaded.set()
        self._samples = spec.samples
        self._settle: int | None = None
        Thread(target=self._read, name="learner", daemon=True).start()

    def run(self) -> None:
        """Sample until standard input ends, which ends the process."""
        while True:
            self._rollouts.advance()
            if self._settle is not None and self._rollouts.is_idle:
                self._send({"settled": self._settle})
                self._settle = None

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            self._rollouts.post(
                self._read_weights(message) if "weights" in message else partial(self._handle, message)
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "admit" in message:
            self._admit(message["admit"])
        elif "snapshot" in message:
            self._snapshot(message["snapshot"])
        else:
            self._settle = message["settle"]

    def _read_weights(self, message: Mapping[str, Any]) -> Callable[[], None]:
        """Read and check an update while the engine samples; return the event that loads it."""
        self._loaded.wait()
        try:
            state = self._reader.read(
                self._folder / message["weights"], self._player.policy.decoder.state_dict()
            )
        except FileNotFoundError:
            return lambda: None  # a newer version has replaced it, and its message follows
        except PeriluneError as error:
            return partial(raise_error, error)
        self._loaded.clear()
        return partial(self._load, state, message)

    def _load(self, state: Mapping[str, Tensor], message: Mapping[str, Any]) -> None:
        version = message["version"]
        self._player.policy.decoder.load_state_dict(state, strict=False)
        self._reader.commit()
        self._loaded.set()
        self._rollouts.update_weights(None, version)
        if (own := self._player.engine.checksum) != message["checksum"]:
            raise WorkFailedError(
                f"version {version} has checksum {message['checksum']}, but the rollout process loaded {own}",
                remedy=REPORT_BUG,
            )
        self._send({"holds": version})

    def _admit(self, message: Mapping[str, Any]) -> None:
        recorded = message["recorded"]
        version_runs = message["version_runs"]
        self._rollouts.admit(
            Group(
                tuple(message["key"]),
                Task(**message["task"]),
                None
                if recorded is None
                else [[TurnTokens.from_json(turn) for turn in sample] for sample in recorded],
                None if version_runs is None else [[(v, n) for v, n in sample] for sample in version_runs],
            )
        )

    def _deliver(self, group: Group, groups: Groups) -> None:
        step, index = group.key
        path = self._folder / f"{step}-{index}.arrow"
        write_atomic(path, groups_to_bytes(groups))
        version_runs = group.finished_version_runs(self._samples)
        self._send({"group": group.key, "file": path.name, "version_runs": version_runs})

    def _snapshot(self, name: str) -> None:
        recorded = [
            {"key": key, "samples": [[turn.to_json() for turn in sample] for sample in samples]}
            for key, samples in self._rollouts.recorded().items()
        ]
        write_atomic(self._folder / name, json.dumps(recorded).encode())
        self._send({"snapshot": name})


def main() -> None:
    """Run a rollout process for the bundle and the folder named on the command line."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the stage prints goes to its log

    def send(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    workspace = FollowerWorkspace(Path(sys.argv[1]).absolute())
    register_secrets(workspace.job.secrets)
    spec = RLSpec.model_validate(workspace.job.spec)
    assert spec.asynchronous is not None
    environments = spec.asynchronous.environments
    try:
        with open_player(
            workspace,
            spec.max_tokens,
            spec,
            spec.sampling_plan,
            environments=environments,
            record_routes=spec.routing_replay,
            backend=spec.openvino.runner() if spec.openvino else None,
        ) as player:
            RolloutProcess(player, spec, Path(sys.argv[2]), send).run()
    except Exception as error:
        traceback.print_exc()
        send({"failed": str(error) if isinstance(error, PeriluneError) else repr(error)})
        os._exit(1)  # the thread that reads standard input does not end


if __name__ == "__main__":
    main()
