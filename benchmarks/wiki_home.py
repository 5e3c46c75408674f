"""Add signed runs to a home that differ from a real run in seed, settings and figures."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select

from perilune.bundle.digest import BUNDLE_FILE, Entry, bundle_document, entries_digest, make_entry
from perilune.bundle.manifest import write_manifest
from perilune.control.evidence.attestation import attest_bundle, attest_result
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Attempt, Run, Stage
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, register_experiment
from perilune.files import read_json, write_json

SUMMARY = "artifacts/summary.json"


def another_run(
    control: Control,
    base: Run,
    seed: int,
    figures: Mapping[str, Any],
    overrides: Sequence[str] = (),
    name: str = "",
    retry_of: str | None = None,
) -> str:
    """Add a succeeded run like `base` with this name, seed and overrides, and return its id."""
    home = control.home
    document = read_json(home.experiment(base.experiment_id) / "recipe.json")
    document |= {"name": name or document["name"], "seed": seed, "overrides_of_this": list(overrides)}
    stages = [(base.stage, base.task)]
    experiment = register_experiment(
        control, document["name"], document, stages, [*overrides, f"seed={seed}"]
    )
    run_id = new_ulid()
    digest = _bundle(home.bundle(base.id), home.bundle(run_id), seed)
    attempt = home.attempt(run_id, 1)
    _linked(home.attempt(base.id, base.current_epoch), attempt)
    for folder in (attempt, home.bundle(run_id)):
        (folder / "runtime").mkdir(exist_ok=True)
    for frozen in ("job.json", BUNDLE_FILE):
        _replace(attempt / frozen, (home.bundle(run_id) / frozen).read_bytes())
    (attempt / SUMMARY).unlink()
    write_json(
        attempt / SUMMARY, read_json(home.attempt(base.id, base.current_epoch) / SUMMARY) | dict(figures)
    )
    (attempt / "artifacts" / "manifest.json").unlink()
    manifest = write_manifest(attempt)
    result = read_json(attempt / "runtime" / "result.json") | {"manifest_digest": manifest}
    (attempt / "runtime" / "result.json").unlink()
    write_json(attempt / "runtime" / "result.json", result)
    with control.store.transaction() as session:
        run = Run(
            id=run_id, submit_key=run_id, experiment_id=experiment, stage=base.stage, task=base.task,
            bundle_digest=digest, current_epoch=1, created=base.created + seed, ended=base.ended,
            manifest_digest=manifest, retry_of=retry_of,
        )  # fmt: skip
        session.add(run)
        session.flush()
        run.state = RunState.ACTIVE.value
        run.state = RunState.SUCCEEDED.value
        where = {"placement": "local", "launcher": "process"}
        session.add(Attempt(run_id=run_id, number=1, created=base.created, ended=base.ended, **where))
        query = select(Stage).where(Stage.experiment_id == experiment, Stage.name == base.stage)
        session.scalars(query).one().run_id = run_id
    attest_bundle(home, home.run(run_id), run_id)
    with control.store.snapshot() as session:
        attest_result(home, session.get_one(Attempt, (run_id, 1)), attempt)
    return run_id


def figure(mean: float, spread: float = 0.05) -> dict[str, Any]:
    """The pass@1 entry of a summary."""
    return {"pass@1": {"mean": mean, "low": max(mean - spread, 0.0), "high": min(mean + spread, 1.0)}}


def tampered(control: Control, run_id: str, mean: float) -> None:
    """Change only the figure of a run."""
    path = control.home.attempt(run_id, 1) / SUMMARY
    document = read_json(path) | figure(mean)
    path.unlink()
    write_json(path, document)


def _bundle(source: Path, target: Path, seed: int) -> str:
    """Copy the frozen bundle with another seed, and return its digest."""
    _linked(source, target)
    job = read_json(target / "job.json") | {"seed": seed}
    _replace(target / "job.json", json.dumps(job, sort_keys=True, separators=(",", ":")).encode())
    recorded = json.loads((target / BUNDLE_FILE).read_bytes())["files"]
    entries = [Entry(**entry) for entry in recorded if entry["path"] != "job.json"]
    status = (target / "job.json").lstat()
    entries = sorted(
        [*entries, make_entry(target / "job.json", "job.json", status)], key=lambda entry: entry.path
    )
    _replace(target / BUNDLE_FILE, bundle_document(entries))
    return str(entries_digest(entries))


def _linked(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)


def _replace(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)
