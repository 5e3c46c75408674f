"""Learner checkpoints: byte-identical resume, atomic writes, detection of damaged files."""

import math
from pathlib import Path

import pytest
import torch
from learning_cases import random_groups, small_decoder

from perilune.errors import RequestError
from perilune.learn import checkpoints
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import OptimizerSettings


def train(learner: Learner, steps: range, scale: float = 1.0) -> None:
    """Train on random groups with the GRPO loss multiplied by `scale`."""
    for step in steps:
        groups = [algorithm("grpo")(group, max_tokens=8) for group in random_groups(step)]
        learner.forward_backward(pack(groups, 30))
        for parameter in learner.optimizer.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        learner.optim_step(1e-2)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_resume_is_byte_identical(tmp_path: Path) -> None:
    straight = Learner(small_decoder())
    train(straight, range(6))
    straight.save_state(tmp_path / "straight")

    first = Learner(small_decoder())
    train(first, range(3))
    first.save_state(tmp_path / "half", {"step": 3})
    second = Learner(small_decoder(seed=99))
    assert second.load_state(tmp_path / "half") == {"step": 3}
    assert second.version == 3
    train(second, range(3, 6))
    second.save_state(tmp_path / "resumed")
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    assert contents(tmp_path / "resumed") != contents(tmp_path / "half")


def test_interrupted_save_keeps_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(small_decoder())
    learner.save_state(tmp_path / "step-000001")
    before = contents(tmp_path / "step-000001")
    train(learner, range(1))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_json", killed)
    for name in ("step-000001", "step-000002"):
        with pytest.raises(KeyboardInterrupt):
            learner.save_state(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert contents(tmp_path / "step-000001") == before


def test_save_state_overwrites_existing_state(tmp_path: Path) -> None:
    learner = Learner(small_decoder())
    learner.save_state(tmp_path / "a")
    train(learner, range(1))
    learner.save_state(tmp_path / "a")
    assert Learner(small_decoder()).load_state(tmp_path / "a") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_latest_complete_skips_damaged_and_partial_checkpoints(tmp_path: Path) -> None:
    assert checkpoints.find_latest_complete(tmp_path / "nothing") is None
    learner = Learner(small_decoder())
    for step in (5, 10, 15, 20):
        learner.save_state(tmp_path / f"step-{step:06d}")
    (tmp_path / "step-000020" / "manifest.json").unlink()
    (tmp_path / "step-000015" / "weights.safetensors").write_bytes(b"flipped")
    (tmp_path / ".step-000025.tmp").mkdir()
    assert checkpoints.find_latest_complete(tmp_path) == tmp_path / "step-000010"


def test_load_state_names_damaged_file(tmp_path: Path) -> None:
    learner = Learner(small_decoder())
    learner.save_state(tmp_path / "a")
    path = tmp_path / "a" / "second_moments.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RequestError, match=r"second_moments\.safetensors is missing or differs"):
        learner.load_state(tmp_path / "a")


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_load_state_names_mismatched_tensor(tmp_path: Path, change: str) -> None:
    learner = Learner(small_decoder())
    weights = {name: p.detach().clone() for name, p in learner.optimizer.parameters.items()}
    name = "model.norm.weight"
    if change == "missing":
        del weights[name]
    elif change == "extra":
        name = "model.extra.weight"
        weights[name] = torch.zeros(1)
    elif change == "shape":
        weights[name] = torch.zeros(3)
    else:
        weights[name] = weights[name].double()
    moments = {"first_moments": learner.optimizer.first, "second_moments": learner.optimizer.second}
    checkpoints.write(tmp_path / "a", {"weights": weights, **moments}, {"version": 0})
    with pytest.raises(RequestError, match=name):
        learner.load_state(tmp_path / "a")


def test_restored_second_moments_keep_the_scale_of_their_loss(tmp_path: Path) -> None:
    """The update size of a fresh AdamW does not depend on the loss scale; that of a restored one does."""
    teacher = Learner(small_decoder())
    train(teacher, range(20))
    teacher.save_state(tmp_path / "sft")

    def movement(scale: float, *, restore: bool) -> float:
        learner = Learner(small_decoder(), OptimizerSettings(grad_clip=1e9))
        if restore:
            learner.restore_second_moments(tmp_path / "sft")
            assert not any(m.any() for m in learner.optimizer.first.values())
            assert (learner.version, learner.optimizer.step) == (0, 20)
        before = [p.detach().clone() for p in learner.decoder.parameters()]
        train(learner, range(50, 56), scale)
        after = learner.decoder.parameters()
        return math.sqrt(
            sum(float((a - b).detach().square().sum()) for a, b in zip(before, after, strict=True))
        )

    fresh, restored = movement(1, restore=False), movement(1, restore=True)
    assert movement(1 / 16, restore=False) == pytest.approx(fresh, rel=0.05)
    assert movement(1 / 16, restore=True) < 0.2 * restored < 0.2 * fresh
