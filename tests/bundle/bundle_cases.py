"""A job and its inputs, for tests to freeze."""

from pathlib import Path
from typing import Any

from perilune.bundle.job import InputReference, Job, Resources


def make_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "task": "sft",
        "stage": "warm",
        "spec": {"steps": 3, "lr": 0.003},
        "model": {"preset": "tiny"},
        "environment": {"id": "reasoning_gym/basic_arithmetic"},
        "seed": 7,
        "resources": Resources(device="cpu", threads=1),
        "inputs": (
            InputReference(name="checkpoint", path="inputs/checkpoint", digest="", kind="checkpoint"),
            InputReference(name="data", path="inputs/data", digest="", kind="dataset"),
        ),
    }
    return Job(**(values | changes))


def make_inputs(folder: Path) -> dict[str, Path]:
    checkpoint = folder / "a checkpoint"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"hidden_size": 96}')
    (checkpoint / "model.safetensors").write_bytes(bytes(range(256)) * 16)
    (checkpoint / "nested" / "é.txt").write_text("a name outside ASCII")
    data = folder / "rows.jsonl"
    data.write_text('{"messages": []}\n')
    return {"checkpoint": checkpoint, "data": data}
