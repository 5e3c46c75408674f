"""The times of a run besides the steps of the engine, and the stored coefficients of a model on a machine."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

import perilune
from perilune.errors import RequestError
from perilune.files import read_json_or_empty, write_json
from perilune.simulate.step_cost import StepCost, StepTimes

COEFFICIENTS_FILE = "simulation.json"  # in the home
PASSES_PER_UPDATE = 3  # an update takes as long as three forward passes, of which the backward pass takes two
# Packages whose code the coefficients depend on.
MEASURED_PACKAGES = ("engine", "learn", "models", "rollout", "simulate")


class RunTimes(Protocol):
    """Predicts the parts of an RL run, in seconds."""

    @property
    def step(self) -> StepTimes:
        """The time of an engine step."""

    def learn(self, tokens: int, episodes: int, pairs: int) -> float:
        """Return the time of an update. `pairs` is as in `GroupShape.pairs`."""

    def forward(self, tokens: int, pairs: int) -> float:
        """Return the time of a pass without gradients."""

    def record(self, tokens: int, answers: int, episodes: int) -> float:
        """Return the time of the rest of a training step: publishing weights, metrics and writing files."""

    @property
    def batch(self) -> float:
        """Constant time of the rollout worker and its scorer for a batch of episodes."""

    @property
    def answer(self) -> float:
        """Time of the rollout worker for an answer, without the time of the environment."""

    @property
    def episode(self) -> float:
        """Time of the rollout worker and its scorer for an episode, without answers and the environment."""

    @property
    def publish(self) -> float:
        """Time from publishing new weights until a rollout process has them."""

    @property
    def start(self) -> float:
        """Time of the stage before its first step and after its last one, without `checks`."""

    @property
    def checks(self) -> float:
        """Time of the checks before a long run: solving a bandit, and auditing the reward."""


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Coefficients that `perilune calibrate` measured.

    Attributes:
        step: time of an engine step.
        update: seconds of an update: constant, per token, per episode, and per (query, key) pair.
        recording: seconds of the rest of a step: constant, per token of episodes with their prompts, per
            answer, and per episode.
        scoring: seconds of playing a batch without sampling: constant, per answer, and per episode.
        publish, start, checks: as in `RunTimes`.
        trial: seconds per answer and per episode in the environments of the calibration, which are part of
            `scoring`.
    """

    step: StepCost
    update: tuple[float, float, float, float]
    recording: tuple[float, float, float, float]
    scoring: tuple[float, float, float]
    publish: float
    start: float
    checks: float
    trial: tuple[float, float]

    def learn(self, tokens: int, episodes: int, pairs: int) -> float:
        constant, token, episode, pair = self.update
        return constant + token * tokens + episode * episodes + pair * pairs

    def forward(self, tokens: int, pairs: int) -> float:
        _, token, _, pair = self.update
        return (token * tokens + pair * pairs) / PASSES_PER_UPDATE

    def record(self, tokens: int, answers: int, episodes: int) -> float:
        constant, token, answer, episode = self.recording
        return constant + token * tokens + answer * answers + episode * episodes

    @property
    def batch(self) -> float:
        return self.scoring[0]

    @property
    def answer(self) -> float:
        return self.scoring[1]

    @property
    def episode(self) -> float:
        return self.scoring[2]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Measured times, with the model, machine and code for which they are valid.

    Attributes:
        model: digest of the recipe's model section.
        machine: a description of the processor and the device.
        engine: digest of the code of engine and learner, and of the version of torch.
        measured: when, in seconds since 1970.
        error: mean relative error of the step times on the steps that they were fitted to.
    """

    times: MeasuredTimes
    model: str
    machine: str
    engine: str
    measured: float
    error: float


def model_digest(section: Mapping[str, Any]) -> str:
    """Return the digest of a recipe's model section."""
    return hashlib.sha256(json.dumps(section, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def engine_digest() -> str:
    """Return the digest of the code that the coefficients measure, and of the version of torch."""
    root, digest = Path(str(perilune.__file__)).parent, hashlib.sha256(version("torch").encode())
    for package in MEASURED_PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in {".py", ".c", ".h"}:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def save_coefficients(home: Path, found: Calibrated) -> None:
    """Store coefficients in the home. They replace earlier coefficients of the same machine and model."""
    document = read_json_or_empty(home / COEFFICIENTS_FILE)
    document.setdefault(found.machine, {})[found.model] = asdict(found)
    write_json(home / COEFFICIENTS_FILE, document)


def load_coefficients(home: Path, machine: str, model: str) -> Calibrated:
    """Return the coefficients of a model on a machine.

    Raises:
        RequestError: when the home has no coefficients, or they measure another version of the engine.
    """
    try:
        document = read_json_or_empty(home / COEFFICIENTS_FILE)[machine][model]
        calibrated = TypeAdapter(Calibrated).validate_python(document)
    except (KeyError, TypeError, ValidationError):  # none, or damaged
        calibrated = None
    remedy = "run perilune calibrate RECIPE, or name other machines with --machines"
    if calibrated is None:
        raise RequestError(f"this model has not been calibrated on {machine}", remedy=remedy)
    if calibrated.engine != engine_digest():
        raise RequestError(
            f"the calibration of this model on {machine} measured another version of the engine or of torch",
            where=str(home / COEFFICIENTS_FILE),
            remedy=remedy,
        )
    return calibrated
