"""Jobs that take about a second, and their bundles."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from perilune.bundle.freeze import job_document
from perilune.bundle.job import InputReference, Job, Resources
from perilune.bundle.plugin import consumed_fields, load_plugin
from perilune.bundle.workspace import Workspace
from perilune.execution.task_process import was_finished
from perilune.files import read_json, read_json_lines

DIGITS: Mapping[str, Any] = {"id": "factory", "factory": "task_environments:Digits"}
SUMS: Mapping[str, Any] = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "config": {
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"],
        "allow_parentheses": False, "allow_negation": False,
    },
    "prompt": "compact",
}  # fmt: skip
DUEL: Mapping[str, Any] = {"id": "factory", "factory": "duel_environment:Duel"}
TINY: Mapping[str, Any] = {"preset": "tiny"}

COLLECT: Mapping[str, Any] = {"teacher": "gold", "traces": 40}
SFT: Mapping[str, Any] = {"data": "traces", "steps": 6, "batch_size": 8, "warmup": 2, "save_every": 2}
RL: Mapping[str, Any] = {
    "checkpoint": "model", "steps": 4, "prompts": 4, "samples": 4, "max_tokens": 6, "temperature": 0.8,
    "lr": 1e-3, "warmup": 2, "save_every": 1,
}  # fmt: skip
EVALUATE: Mapping[str, Any] = {"checkpoint": "model", "tasks": 6, "samples": 4, "max_tokens": 6}
CALIBRATE: Mapping[str, Any] = {
    "checkpoint": "model", "tasks": 3, "samples": 2, "continuations": 4, "max_tokens": 8,
    "process_rewards": {"name": "answer", "guessable": 1.0, "segments": {"cut": "length", "least": 2}},
}  # fmt: skip

PAIRS: Mapping[str, Any] = {
    "checkpoint": "model",
    "tasks": 24,
    "samples": 4,
    "max_tokens": 400,
    "gap": 0.1,
}
PREFERENCE: Mapping[str, Any] = {
    "checkpoint": "model",
    "data": "pairs",
    "steps": 4,
    "batch_size": 6,
    "warmup": 1,
    "save_every": 2,
    "validate_every": 2,
    "validation": 0.3,
    "lr": 1e-3,
}
REWARD_MODEL: Mapping[str, Any] = {
    "checkpoint": "model",
    "data": "pairs",
    "steps": 6,
    "batch_size": 6,
    "warmup": 1,
    "save_every": 3,
    "validation": 0.3,
    "lr": 1e-3,
}
DISTILL: Mapping[str, Any] = {
    "checkpoint": "model",
    "teacher": "model",
    "steps": 4,
    "prompts": 3,
    "samples": 2,
    "max_tokens": 6,
    "warmup": 1,
    "save_every": 2,
}
REJECTION_SAMPLING: Mapping[str, Any] = {"checkpoint": "model", "tasks": 12, "samples": 4, "max_tokens": 150}
FLYWHEEL: Mapping[str, Any] = {
    "checkpoint": "model", "steps": 2, "tasks": 24, "samples": 4, "updates": 16, "batch_size": 8,
    "heldout": 48, "max_tokens": 60, "warmup": 2, "lr": 3e-3,
}  # fmt: skip
CONNECT_FOUR: Mapping[str, Any] = {
    "steps": 4,
    "save_every": 2,
    "learning": {"channels": 8, "hidden": 16, "games": 16, "moves": 8, "minibatch": 64},
}
CONNECT_FOUR_JUDGE: Mapping[str, Any] = {
    "player": "connect_four", "positions": 2, "first_ply": 26, "games": 4, "simulations": [0, 8],
    "opponents": ["random", "one_ply", "perfect", "mcts_100"],
}  # fmt: skip
NEW_MODEL: Mapping[str, Any] = {"preset": "small"}

SPEECH_CODEC = {
    "data": "utterances",
    "steps": 4,
    "save_every": 2,
    "width": 16,
    "codebook_size": 8,
    "components": 8,
    "frames": 4,
}
SPEECH_VOICE = {
    "data": "utterances",
    "codec": "speech_codec",
    "steps": 4,
    "save_every": 2,
    "width": 32,
    "layers": 1,
    "predictor_width": 32,
    "predictor_layers": 1,
    "learning": {"batch": 4},
}

OPTIONS = {
    "pairs": PAIRS,
    "preference": PREFERENCE,
    "reward_model": REWARD_MODEL,
    "distill": DISTILL,
    "rejection_sampling": REJECTION_SAMPLING,
    "flywheel": FLYWHEEL,
    "new_model": NEW_MODEL,
    "collect": COLLECT,
    "sft": SFT,
    "rl": RL,
    "evaluate": EVALUATE,
    "calibrate": CALIBRATE,
    "selfplay": {"checkpoint": "model"},
    "connect_four": CONNECT_FOUR,
    "connect_four_judge": CONNECT_FOUR_JUDGE,
    "utterances": {"train": 6, "held_out": 3},
    "speech_codec": SPEECH_CODEC,
    "speech_voice": SPEECH_VOICE,
    "speech_evaluation": {"voice": "speech_voice", "data": "utterances"},
}


def make_job(
    task: str,
    *,
    environment: Mapping[str, Any] = DIGITS,
    model: Mapping[str, Any] = TINY,
    seed: int = 1,
    inputs: Mapping[str, Path] | None = None,
    **options: Any,
) -> Job:
    """A job of the plugin `task`: the tiny options above, changed by `options`."""
    plugin = load_plugin(task)
    kinds = {"model": "checkpoint"} | consumed_fields(plugin.spec)
    return Job(
        task=task,
        stage=task,
        spec=plugin.spec.model_validate({**OPTIONS[task], **options}).model_dump(mode="json"),
        model=dict(model),
        environment=dict(environment),
        seed=seed,
        resources=Resources(device="cpu", threads=1),
        inputs=tuple(
            InputReference(name=name, path=f"inputs/{name}", digest="", kind=kinds[name])  # type: ignore[arg-type]
            for name in inputs or {}
        ),
    )


def make_bundle(root: Path, job: Job, inputs: Mapping[str, Path] | None = None) -> Path:
    """Write the parts of a bundle that a task reads: the job and the inputs."""
    for directory in ("inputs", "artifacts"):
        (root / directory).mkdir(parents=True)
    (root / "job.json").write_bytes(job_document(job))
    for name, source in (inputs or {}).items():
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, root / "inputs" / name)
    return root


def run_in(bundle: Path) -> Path:
    """Run a bundle's task in this process and write its summary. Returns the bundle."""
    workspace = Workspace(bundle)
    plugin = load_plugin(workspace.job.task)
    if not was_finished(workspace, plugin):
        workspace.finish(plugin.run(workspace))
    assert (bundle / plugin.output).exists()
    return bundle


def run_on_a_slow_disk(bundle: Path) -> None:
    """Like `run_in`, with a few milliseconds more per fsync, so that kills hit during writes."""
    durable = os.fsync

    def slowly(descriptor: int) -> None:
        time.sleep(0.005)
        durable(descriptor)

    os.fsync = slowly
    run_in(bundle)


def run_task(root: Path, task: str, *, inputs: Mapping[str, Path] | None = None, **options: Any) -> Path:
    """Run a tiny task in a new bundle at `root`."""
    return run_in(make_bundle(root, make_job(task, inputs=inputs, **options), inputs))


def metrics(bundle: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(bundle / "artifacts" / "metrics.jsonl"))


def summary(bundle: Path) -> dict[str, Any]:
    return dict(read_json(bundle / "artifacts" / "summary.json"))


def episodes(bundle: Path, pattern: str = "step-*.parquet") -> pd.DataFrame:
    """All episodes of a bundle as pandas reads them, with the step of their file."""
    files = sorted((bundle / "artifacts" / "episodes").glob(pattern))
    return pd.concat([pd.read_parquet(file).assign(step=file.stem) for file in files], ignore_index=True)


def figures_of(pairs: Any) -> dict[str, float]:
    """A Parquet map as a dictionary."""
    return dict(pairs)
