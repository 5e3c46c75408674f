"""The learner's end of the rollout processes, with processes that a test plays."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from task_cases import make_bundle, make_job

from perilune.bundle.workspace import Workspace
from perilune.errors import ProcessLostError
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.rollout.groups import groups_to_bytes
from perilune.sandbox import folders
from perilune.tasks.rl.asynchronous import fleet as fleet_module
from perilune.tasks.rl.asynchronous.channel import Channel
from perilune.tasks.rl.asynchronous.fleet import Finished, Fleet
from perilune.tasks.rl.asynchronous.sampler import MEMORY_KEY, AsynchronousSampler
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings


class PlayedChannel(Channel):
    """A channel whose process is the test: `say` is its message, None its end."""

    opened: ClassVar[list["PlayedChannel"]] = []

    def __init__(self, *arguments: Any) -> None:
        self.said: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self.sent: list[Mapping[str, Any]] = []
        self.opened.append(self)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def messages(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.said.get, None)

    def say(self, message: Mapping[str, Any] | None) -> None:
        self.said.put(message)

    def close(self) -> str:
        return "exit code -9"


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[PlayedChannel]:
    monkeypatch.setattr(fleet_module, "LocalChannel", PlayedChannel)
    PlayedChannel.opened = []
    return PlayedChannel.opened


def open_fleet(folder: Path, *, workers: int, replaces_processes: bool = True) -> Fleet:
    folder.mkdir(exist_ok=True)
    workspace = Workspace(make_bundle(folder / "bundle", make_job("rl")))
    settings = AsynchronousSettings(workers=workers)
    return Fleet(workspace, settings, 0, replaces_processes=replaces_processes)


def sampler_with(fleet: Fleet, **attributes: Any) -> AsynchronousSampler:
    """A sampler of two groups a step, without a stage around it."""
    sampler = object.__new__(AsynchronousSampler)
    vars(sampler).update(_fleet=fleet, _spec=SimpleNamespace(prompts=2), _schedule=None, **attributes)
    return sampler


def wait_for_messages(fleet: Fleet, count: int) -> None:
    while fleet._messages.qsize() < count:
        time.sleep(0.001)


def test_publish_lag_excludes_the_time_until_the_learner_reads_the_messages(
    tmp_path: Path, channels: list[PlayedChannel]
) -> None:
    decoder = Decoder(PRESETS["tiny"])
    decoder.initialize(0)
    fleet = open_fleet(tmp_path, workers=2)
    for version in (1, 2):
        fleet.publish(decoder, version, None)
        channels[0].say({"holds": version})
        wait_for_messages(fleet, 2 * version - 1)
        time.sleep(0.1 * version)
        channels[1].say({"holds": version})
        wait_for_messages(fleet, 2 * version)
    time.sleep(1)  # the learner trains
    fleet.receive(wait=False)
    assert 0.2 <= fleet.publish_lag_s < 1
    fleet.close()


def test_step_trains_on_the_first_admitted_of_all_groups_that_have_arrived(
    tmp_path: Path, channels: list[PlayedChannel]
) -> None:
    fleet = open_fleet(tmp_path, workers=1)
    sampler = sampler_with(fleet, _waiting=dict.fromkeys(range(4), ("task", 1.0)))
    for number in range(4):
        fleet.admit({"key": sampler._key(number)})
    for number in (3, 2, 1, 0):
        step, index = sampler._key(number)
        name = f"{step}-{index}.arrow"
        (fleet._folder / name).write_bytes(groups_to_bytes([]))
        channels[0].say({"group": [step, index], "file": name, "version_runs": []})
    wait_for_messages(fleet, 4)
    assert list(sampler._take(1)) == [0, 1]
    assert sampler._groups_ready == 2
    fleet.close()


def test_process_that_dies_while_a_schedule_is_followed_is_an_error(
    tmp_path: Path, channels: list[PlayedChannel]
) -> None:
    """Even if it was idle: a new process cannot load the versions that its groups need."""
    fleet = open_fleet(tmp_path, workers=2, replaces_processes=False)
    channels[0].say({"settled": 1})
    channels[0].say(None)
    wait_for_messages(fleet, 2)
    channels[1].say({"settled": 1})
    with pytest.raises(ProcessLostError, match="exit code -9 while a schedule was followed"):
        fleet.wait_until_idle(1)
    fleet.close()


def test_checkpoint_keeps_the_versions_of_the_oldest_waiting_tokens(tmp_path: Path) -> None:
    turn = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0], "versions": [0, 7], "finish_reason": None}
    fleet = SimpleNamespace(
        snapshot=lambda: {(1, 0): [[turn]]}, finished={(1, 1): Finished([], [[(40, 3)], []])}
    )
    learner = SimpleNamespace(memory={})
    sampler = sampler_with(
        fleet,  # type: ignore[arg-type]
        _learner=learner,
        _settings=AsynchronousSettings(),
        _admitted=2,
        _waiting={},
        versions={version: f"checksum {version}" for version in range(1000)},
    )
    sampler.save_progress()
    assert learner.memory[MEMORY_KEY]["versions"].keys() == {"0", "7", "40"}


@pytest.mark.usefixtures("channels")
def test_fleet_removes_folders_of_runs_that_were_killed_with_all_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(fleet_module, "SHARED_MEMORY", memory)
    alive = open_fleet(tmp_path / "alive", workers=1)
    killed = memory / f"{fleet_module.FOLDER_PREFIX}killed.owned"
    killed.mkdir()
    (killed / "weights-1.safetensors").touch()
    folders._remove_abandoned.cache_clear()
    other = open_fleet(tmp_path / "other", workers=1)
    assert sorted(memory.iterdir()) == sorted([alive._folder, other._folder])
    for fleet in (alive, other):
        fleet.close()
    assert not list(memory.iterdir())
