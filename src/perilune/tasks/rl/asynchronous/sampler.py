"""The learner's interface to the rollout processes of asynchronous training.

Groups are numbered in the order of their tasks. A group is admitted while

    admitted < (completed steps + staleness + 1) * prompts

and a step trains on the finished groups that were admitted first. Old groups are not dropped, because that
would remove long episodes (docs/results/pacing.md).
"""

import base64
from collections import ChainMap
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from perilune.bundle.workspace import SCHEDULE
from perilune.environments.core.protocol import Task
from perilune.learn.trainer import Learner
from perilune.rollout.failures import check_failure_limit
from perilune.rollout.groups import Groups, flatten, groups_from_bytes, groups_to_bytes
from perilune.rollout.timing import Stopwatch
from perilune.tasks.process_rewards.rewards import ProcessRewards
from perilune.tasks.rl.asynchronous.fleet import Finished, Fleet, Key
from perilune.tasks.rl.asynchronous.schedule import Batch, log_batch, read_schedule
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings
from perilune.tasks.rl.sampling import GroupSource
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.task_sampler import DrawnTask, TaskSampler
from perilune.tasks.stage.player import Player
from perilune.verifiers.scorer import slot_values
from perilune.watchdog import Watchdog
from perilune.weights.delta import BoundsComparison, ChangeFinder, CopyComparison

MEMORY_KEY = "asynchronous"  # key of the learner's memory


def admission_limit(settings: AsynchronousSettings, prompts: int, completed: int, steps: int) -> int:
    """Return the number of groups that may have been admitted after `completed` of `steps` steps."""
    return prompts * min(completed + settings.staleness + 1, steps)


class AsynchronousSampler(GroupSource):
    """A group source whose groups are sampled by rollout processes.

    Args:
        learner: its weights are published; its memory keeps the state for a resumed run.
    """

    def __init__(self, spec: RLSpec, player: Player, learner: Learner) -> None:
        assert spec.asynchronous is not None
        self._spec, self._settings, self._player, self._learner = spec, spec.asynchronous, player, learner
        self._workspace = player.workspace
        saved: dict[str, Any] = learner.memory.get(MEMORY_KEY, {})
        self.versions: dict[int, str] = {
            int(version): checksum for version, checksum in saved.get("versions", {}).items()
        }
        self._published: int | None = None
        self._sent = CopyComparison()
        self._admitted: int = saved.get("admitted", 0)
        self._waiting: dict[int, DrawnTask] = {  # tasks of admitted groups, by number
            int(number): (Task(**task), probability)
            for number, (task, probability) in saved.get("waiting", {}).items()
        }
        self._tasks = TaskSampler(spec.curriculum, player, learner.memory)
        self._recorded: Mapping[str, Any] = saved.get("recorded", {})
        schedule = self._workspace.runtime / SCHEDULE
        self._schedule: dict[int, Batch] | None = read_schedule(schedule) if schedule.exists() else None
        self._version_runs = {} if self._schedule is None else dict(ChainMap(*self._schedule.values()))
        weights = sum(tensor.nbytes for tensor in player.policy.decoder.state_dict().values())
        self._groups_ready = 0
        self._fleet = Fleet(
            self._workspace, self._settings, weights, replaces_processes=self._schedule is None
        )
        for number, (stream, version_runs) in saved.get("finished", {}).items():
            groups = groups_from_bytes(base64.b64decode(stream))
            self._fleet.finished[self._key(int(number))] = Finished(groups, version_runs)
        self._process_rewards = ProcessRewards(
            spec.process_rewards, player.policy.decoder, player.rollouts, spec, spec.token_budget
        )
        for number in self._waiting:  # groups of an earlier attempt
            if self._key(number) not in self._fleet.finished:
                self._send(number)

    @property
    def epoch(self) -> int:
        return self._tasks.epoch

    def close(self) -> None:
        self._fleet.close()

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Publish the learner's weights, admit groups, and wait for those of a step."""
        self._publish()
        self._admit(admission_limit(self._settings, self._spec.prompts, step - 1, self._spec.steps))
        watch.overlapped = True
        with watch.measure("sampling"):
            batch = self._take(step)
        groups = [group for _, finished in batch.values() for group in finished.groups]
        episodes = flatten(groups)
        watch.tokens += sum(int(episode.loss_mask.sum()) for episode in episodes)
        check_failure_limit(episodes, self._player.rollouts.scorer.settings, f"step {step}")
        version_runs = {number: finished.version_runs for number, (_, finished) in batch.items()}
        log_batch(self._workspace.artifacts / SCHEDULE, step, version_runs)
        if (learned_reward := self._player.rollouts.learned_reward) is not None:
            groups = learned_reward.rescore(groups)
        if self._process_rewards.settings is not None:
            tasks = [task for (task, _), _ in batch.values()]
            groups = self._process_rewards.reward(tasks, groups, step, watch)
        if (auxiliary := self._spec.auxiliary_rewards) is not None:
            groups = auxiliary.add(groups, step, self._spec.steps)
        return self._tasks.observe([drawn for drawn, _ in batch.values()], groups)

    def metrics(self, groups: Groups) -> dict[str, float]:
        """Return the share of episodes that several versions sampled."""
        versions = [np.unique(episode.policy_version[episode.loss_mask]) for episode in flatten(groups)]
        return {"mixed_versions": sum(len(values) > 1 for values in versions) / max(len(versions), 1)}

    def timings(self) -> dict[str, float]:
        """Return size and times of the last update, and the numbers of ready groups and lost processes."""
        self._fleet.receive(wait=False)
        return {
            "publish_lag": self._fleet.publish_lag_s,
            "weights_bytes": float(self._fleet.last_update.bytes),
            "weights_changed": self._fleet.last_update.changed,
            "weights_seconds": self._fleet.write_s,
            "groups_ready": float(self._groups_ready),
            "rollout_processes_lost": float(self._fleet.lost_processes),
        }

    def save_progress(self) -> None:
        """Store the groups that no step has trained on in the learner's memory, for a resumed run."""
        recorded = self._fleet.snapshot()
        finished = {
            str(self._number(key)): (base64.b64encode(groups_to_bytes(groups)).decode(), version_runs)
            for key, (groups, version_runs) in self._fleet.finished.items()
        }
        self._learner.memory[MEMORY_KEY] = {
            "admitted": self._admitted,
            "waiting": {
                str(number): (slot_values(task), probability)
                for number, (task, probability) in self._waiting.items()
            },
            "recorded": {str(self._number(key)): samples for key, samples in recorded.items()},
            "finished": finished,
            "versions": {
                str(version): self.versions[version] for version in self._waiting_versions(recorded)
            },
        }

    def _waiting_versions(self, recorded: Mapping[Key, Any]) -> list[int]:
        """Return the versions that sampled a token of a group that no step has trained on.

        Args:
            recorded: the turns of each sample of the unfinished groups.
        """
        turns = chain.from_iterable(chain.from_iterable(recorded.values()))
        runs = chain.from_iterable(
            chain.from_iterable(finished.version_runs) for finished in self._fleet.finished.values()
        )
        return sorted({*chain.from_iterable(turn["versions"] for turn in turns), *(run[0] for run in runs)})

    def _publish(self) -> None:
        """Send the learner's weights if they are new."""
        version, decoder = self._learner.version, self._player.policy.decoder
        if self._published == version:
            return
        assert self._player.engine.version == version  # `Publisher` comes first
        self.versions[version] = self._player.engine.checksum
        self._fleet.publish(decoder, version, self._changed(version))
        self._published = version

    def _changed(self, version: int) -> ChangeFinder | None:
        """Return the method to find the values that changed since the last publication; None to send all."""
        if self._settings.keep_sent:
            return self._sent
        one_update = self._published is not None and version == self._published + 1
        return BoundsComparison(self._learner.optimizer.bounds_before_update) if one_update else None

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, limit: int) -> None:
        """Admit groups until `limit` groups have been admitted in the whole run."""
        while self._admitted < limit:
            step, _ = self._key(self._admitted)
            for drawn in self._tasks.take(self._spec.prompts, step):
                self._waiting[self._admitted] = drawn
                self._send(self._admitted)
                self._admitted += 1

    def _send(self, number: int) -> None:
        version_runs = None
        if self._schedule is not None:
            version_runs = self._version_runs.get(number)
            if version_runs is None:
                return  # no step of the recorded run trained on this group
        self._fleet.admit(
            {
                "key": self._key(number),
                "task": slot_values(self._waiting[number][0]),
                "recorded": self._recorded.get(str(number)),
                "version_runs": version_runs,
            }
        )

    # -- batches ---------------------------------------------------------------------------------------------

    def _take(self, step: int) -> dict[int, tuple[DrawnTask, Finished]]:
        """Wait for the step's groups; return the task and the finished group by group number."""
        with Watchdog("rollouts") as wait:
            if self._schedule is not None:
                self._fleet.wait_until_idle(step)
                numbers = list(self._schedule[step])
            else:
                self._fleet.receive(wait=False)
                while len(self._fleet.finished) < self._spec.prompts:
                    self._fleet.receive()
                    wait.progress()
                numbers = sorted(map(self._number, self._fleet.finished))[: self._spec.prompts]
        self._groups_ready = len(self._fleet.finished) - len(numbers)
        return {
            number: (self._waiting.pop(number), self._fleet.finished.pop(self._key(number)))
            for number in numbers
        }

    def _key(self, number: int) -> Key:
        """Return the key of a group's random numbers, (step, index), which does not depend on staleness."""
        return number // self._spec.prompts + 1, number % self._spec.prompts

    def _number(self, key: Key) -> int:
        return (key[0] - 1) * self._spec.prompts + key[1]
