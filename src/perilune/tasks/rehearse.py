"""rehearse: counts and writes checkpoints, to try out machines without training.

It resumes from its last complete checkpoint and writes metrics and an output, as every stage does, in
milliseconds and without torch. This makes it cheap to try placements, clouds and their failures.
"""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.workspace import Workspace
from perilune.files import canonical_json, read_json, write_json
from perilune.frozen import Frozen


class RehearseSpec(Frozen):
    """Fields of a rehearse stage."""

    steps: int = Field(
        10, ge=1, description="number of steps, each of which adds one number and writes a checkpoint"
    )
    step_seconds: float = Field(0.1, ge=0, description="duration of a step in seconds")


class Rehearse:
    """Adds up seed times 1, 2, ...: the total is seed * steps * (steps + 1) / 2, also after interruptions."""

    name = "rehearse"
    spec = RehearseSpec
    produces = "dataset"
    output = "artifacts/data"
    standalone = True

    def plan(self, job: Job) -> Mapping[str, object]:
        spec = RehearseSpec.model_validate(job.spec)
        return {"seconds": f"{spec.steps * spec.step_seconds:g}"}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        spec = RehearseSpec.model_validate(workspace.job.spec)
        completed, total = _resumed(workspace)
        workspace.log(f"starts after step {completed}")
        workspace.rewind(completed)
        for name in workspace.job.secrets:
            workspace.log(f"{name} is {workspace.secret(name)}")  # tests that logs hide secrets
        for step in range(completed + 1, spec.steps + 1):
            time.sleep(spec.step_seconds)
            total += step * workspace.job.seed
            workspace.metric(step, total=total)
            _checkpoint(workspace, step, total)
            workspace.log(f"step {step}")
            workspace.progress(step, spec.steps, sum=total)
        write_json(workspace.root / self.output / "total.json", {"total": total})
        return {"kind": "dataset", "total": total, "began_at": completed}


def _resumed(workspace: Workspace) -> tuple[int, int]:
    checkpoints = sorted(workspace.checkpoints.glob("step-*"))
    if not checkpoints:
        return 0, 0
    state = read_json(checkpoints[-1] / "state.json")
    return int(state["step"]), int(state["total"])


def _checkpoint(workspace: Workspace, step: int, total: int) -> None:
    target = workspace.checkpoints / f"step-{step:06d}"
    partial = target.with_name(f".{target.name}.tmp")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "state.json").write_bytes(canonical_json({"step": step, "total": total}))
    partial.rename(target)


plugin = Rehearse()
