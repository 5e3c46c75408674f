"""Sampling from a server that gets the learner's weights before each step."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.learn.trainer import Learner
from perilune.models.adapters.files import save_policy
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.tasks.rl.sampling import GroupSampler
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.player import Player
from perilune.tasks.stage.policy import Policy
from perilune.tasks.stage.sampling import ServerSpec, open_server
from perilune.watchdog import Watchdog

if TYPE_CHECKING:
    from perilune.weights.push import PushResult


class TrainedServer:
    """A server with the interface of `Engine`. All its tokens get the version that was published last.

    Raises:
        RequestError, WorkFailedError: as `RemoteEngine` and `find_server`.
    """

    def __init__(self, spec: ServerSpec, workspace: Workspace) -> None:
        self._engine = open_server(spec, workspace)
        from perilune.weights.push import find_server  # needs httpx, which `open_server` has found

        token = None if spec.token is None else workspace.secret(spec.token)
        self._weights, self._folder = find_server(spec.url, token), workspace.runtime / "published"
        self._version = 0

    @property
    def positions(self) -> int | None:
        return self._engine.positions

    def publish(self, policy: Policy, version: int) -> "PushResult":
        """Send the policy's weights. A server on this machine may read them from a folder.

        Raises:
            RequestError, WorkFailedError: when the server does not load them.
        """
        shutil.rmtree(self._folder, ignore_errors=True)  # of a killed attempt
        try:
            save_policy(self._folder, policy.decoder, policy.tokenizer)
            with Watchdog("weights for the server"):
                pushed = self._weights.push(self._folder, None, lambda sent, total: None)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._version = version
        return pushed

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample as `RemoteEngine.sample` does."""
        return [
            [
                replace(sample, policy_version=np.full_like(sample.token_ids, self._version))
                for sample in group
            ]
            for group in self._engine.sample(prompts, n, params, on_progress)
        ]

    def close(self) -> None:
        self._engine.close()


class ServerSampler(GroupSampler):
    """Samples the groups of each step from a server.

    The stage's own engine only evaluates. The log-prob checker compares the server's log-probs with the
    learner's, so a server that did not load the weights stops the run.
    """

    def __init__(self, spec: RLSpec, server: ServerSpec, player: Player, learner: Learner) -> None:
        self._server, self._learner = TrainedServer(server, player.workspace), learner
        super().__init__(spec, player, replace(player.rollouts, engine=self._server), learner.memory)
        self._timings: Mapping[str, float] = {}

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Send the learner's weights, and sample the groups of a step."""
        pushed = self._server.publish(self._player.policy, self._learner.version)
        self._timings = {"publish_lag": pushed.seconds, "weights_bytes": float(pushed.bytes)}
        return super().sample(step, watch)

    def timings(self) -> Mapping[str, float]:
        return self._timings

    def close(self) -> None:
        self._server.close()
