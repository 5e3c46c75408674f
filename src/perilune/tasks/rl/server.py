"""Sampling from a server that gets the learner's weights before each step."""

import shutil
from collections.abc import Mapping
from dataclasses import replace

from perilune.errors import PeriluneError
from perilune.learn.trainer import Learner
from perilune.models.adapters.files import save_policy
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.tasks.rl.sampling import GroupSampler
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.player import Player
from perilune.tasks.stage.sampling import TrainedServerSpec, open_server
from perilune.watchdog import Watchdog
from perilune.weights.push import find_server


class ServerSampler(GroupSampler):
    """Samples the groups of each step from a server.

    The stage's own engine is used only for evaluations. The log-prob checker compares the server's log-probs
    with the learner's, so the run stops if the server did not load the weights.

    Raises:
        RequestError, WorkFailedError: as `RemoteEngine` and `find_server`.
    """

    def __init__(self, spec: RLSpec, server: TrainedServerSpec, player: Player, learner: Learner) -> None:
        workspace = player.workspace
        self._engine, self._learner = open_server(server, workspace), learner
        self._server = find_server(server.url, workspace.secret(server.token) if server.token else None)
        self._folder = workspace.runtime / "published"
        self._timings: Mapping[str, float] = {}
        self._sleeps = server.sleep
        if self._sleeps:
            self._server.sleep()
        super().__init__(spec, player, replace(player.rollouts, engine=self._engine), learner.memory)

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Send the learner's weights, sample the groups of a step, then put the server to sleep with `sleep`.

        Raises:
            RequestError, WorkFailedError: when the server does not load the weights, or sampling fails.
        """
        self._publish()
        groups = super().sample(step, watch)
        if self._sleeps:
            self._server.sleep()
        return groups

    def _publish(self) -> None:
        """Send the policy's weights. vLLM reads them from a folder of the stage."""
        policy = self._player.policy
        shutil.rmtree(self._folder, ignore_errors=True)  # of a killed attempt
        try:
            save_policy(self._folder, policy.decoder, policy.tokenizer)
            with Watchdog("weights for the server"):
                if self._sleeps:
                    self._server.wake_up("weights")
                pushed = self._server.push(self._folder, None, lambda sent, total: None)
                if self._sleeps:
                    self._server.wake_up("kv_cache")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._engine.version = self._learner.version
        self._timings = {"publish_lag": pushed.seconds, "weights_bytes": float(pushed.bytes)}

    def timings(self) -> Mapping[str, float]:
        return self._timings

    def close(self) -> None:
        if self._sleeps:
            try:
                self._publish()  # SGLang keeps no weights while it sleeps
            except PeriluneError as error:  # the run may be ending because the server has ended
                self._player.workspace.log(f"warning: the server could not be woken up: {error}")
        self._engine.close()
