"""The provenance of results: model, machine, software, and commands to check and reproduce each run."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from perilune.bundle.attested import Evidence, read_result_statement
from perilune.bundle.envelope import PUBLIC, read_public_key
from perilune.errors import RequestError
from perilune.ui.attempt import Attempt
from perilune.ui.view import ExperimentView, StageView

Pairs = list[tuple[str, str]]

MAX_LIST_ITEMS = 20  # items to show of a list in a summary


@dataclass(frozen=True, slots=True)
class Provenance:
    """Facts that the runs recorded; pairs are (name, value)."""

    recipe: str
    commands: str
    machine_name: str
    machine: Pairs
    software_name: str
    software: Pairs
    packages: Pairs


def collect_provenance(view: ExperimentView, attempts: Sequence[Attempt]) -> Provenance:
    """Return the provenance of an experiment, with the machine and the software of its last recorded run."""
    precheck = next((attempt.precheck for attempt in reversed(attempts) if attempt.precheck), {})
    machine = precheck.get("machine") or {}
    return Provenance(
        recipe=view.recipe,
        commands=_commands(view.stages),
        machine_name=name_machine(machine),
        machine=_machine_facts(machine),
        software_name=_software_name(precheck),
        software=_software_facts(precheck),
        packages=_packages(precheck.get("packages") or {}),
    )


def name_machine(machine: Mapping[str, Any]) -> str:
    """Return the name of the GPUs, or else of the processor."""
    gpus = [str(gpu.get("name")) for gpu in machine.get("gpus") or ()]
    if gpus:
        names = dict.fromkeys(gpus)
        return ", ".join(f"{gpus.count(name)} × {name}" if gpus.count(name) > 1 else name for name in names)
    return str((machine.get("processor") or {}).get("model") or "")


def _machine_facts(machine: Mapping[str, Any]) -> Pairs:
    processor = machine.get("processor") or {}
    memory = machine.get("memory") or {}
    facts: Pairs = []
    if processor:
        usable, logical, physical = (
            processor.get(f"{kind}_cores") for kind in ("usable", "logical", "physical")
        )
        facts.append(("Processor", f"{processor.get('model', '')} ({processor.get('architecture', '')})"))
        facts.append(("Cores", f"{usable:g} usable of {logical} logical, {physical} physical"))
        facts.append(("Instructions", " ".join(processor.get("simd") or ())))
    if memory:
        usable, total = (memory.get(key, 0) / 1e9 for key in ("usable", "total"))
        facts.append(("Memory", f"{usable:.1f} GB usable of {total:.1f} GB"))
    for gpu in machine.get("gpus") or ():
        facts.append(
            ("GPU", f"{gpu.get('name')}, {gpu.get('memory', 0) / 1e9:.0f} GB, driver {gpu.get('driver')}")
        )
    system = " ".join(str(machine[key]) for key in ("system", "kernel", "libc") if machine.get(key))
    return [*facts, ("System", system)] if system else facts


def _software_name(precheck: Mapping[str, Any]) -> str:
    python, torch = precheck.get("python") or {}, precheck.get("torch") or {}
    names = [f"Python {python['version']}" if python else "", f"torch {torch['version']}" if torch else ""]
    return ", ".join(name for name in names if name)


def _software_facts(precheck: Mapping[str, Any]) -> Pairs:
    facts: Pairs = []
    python, torch, git = (precheck.get(name) or {} for name in ("python", "torch", "git"))
    if python:
        build = f"{python.get('implementation', '')}, {python.get('compiler', '')}"
        facts.append(("Python", f"{python['version']} ({build})"))
    if torch:
        cuda = f"CUDA {torch['cuda']}" if torch.get("cuda") else "CPU build"
        build = f"{cuda}, {torch.get('threads')} threads, {torch.get('cpu_capability', '')}"
        facts.append(("torch", f"{torch['version']}, {build}"))
    if git:
        untracked = len(git.get("untracked") or ())
        changes = f"{git.get('changed', 0)} tracked files changed, {untracked} untracked"
        facts.append(("Commit", str(git.get("commit") or "none yet")))
        facts.append(("Checkout", f"with uncommitted changes ({changes})" if git.get("dirty") else "clean"))
    elif precheck:
        facts.append(("Commit", "installed package, no checkout"))
    return facts


def _packages(packages: Mapping[str, Any]) -> Pairs:
    versions = {
        str(entry.get("distribution") or name): str(entry.get("version") or "no version")
        for name, entry in packages.items()
    }
    return sorted(versions.items(), key=lambda pair: pair[0].lower())


def _commands(stages: Sequence[StageView]) -> str:
    lines = []
    for stage in stages:
        if stage.attempt_dir is None:
            continue
        lines += [
            f"# {stage.name}",
            f"perilune bundle verify {stage.run_id}",
            f"perilune reproduce {stage.run_id}",
            "",
        ]
    return "\n".join(lines).rstrip()


def find_model(attempts: Sequence[Attempt]) -> tuple[int | None, str] | None:
    """Return the number of parameters and the shape of the last checkpoint of any attempt, or None."""
    for attempt in reversed(attempts):
        for folder in attempt.model_folders:
            if config := attempt.document(folder / "config.json"):
                return count_parameters(folder), _shape(config)
    return None


def _shape(config: Mapping[str, Any]) -> str:
    kind, layers, width = (config.get(key) for key in ("model_type", "num_hidden_layers", "hidden_size"))
    return ", ".join(
        text for text in (str(kind or ""), f"{layers} layers of width {width}" if layers else "") if text
    )


def count_parameters(folder: Path) -> int | None:
    """Return the number of parameters in the headers of safetensors files; None if one cannot be read."""
    total = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as tensors:
                shapes = (tensors.get_slice(name).get_shape() for name in tensors.keys())  # noqa: SIM118 - no mapping
                total += sum(map(math.prod, shapes))
    except (OSError, SafetensorError):
        return None
    return total or None


def stage_facts(stage: StageView, attempt: Attempt) -> Pairs:
    facts: Pairs = [("Run", stage.run_id), ("Bundle digest", attempt.digest)]
    facts += [
        (f"Input: {item['name']}", f"{item['kind']} {item['digest']}")
        for item in attempt.job.get("inputs") or ()
    ]
    manifest = attempt.verdict.get("manifest_digest")
    facts.append(("Manifest digest", str(manifest) if manifest else ""))
    if manifest and attempt.root is not None:
        facts.append(("Signed result", _describe_signature(attempt.root.resolve())))
    if attempt.verdict.get("message"):
        facts.append(("Verdict", str(attempt.verdict["message"])))
    return [(name, value) for name, value in facts if value]


def _describe_signature(root: Path) -> str:
    """Return which key signed the result of an attempt, in a home or in a folder of `perilune export`.

    Checks the signature and which attempt it is about, not the files.
    """
    evidence, attempt = Evidence.from_export(root.parent, root.parent / PUBLIC), None
    if root.parent.name == "attempts" and root.name.isdigit() and len(root.parents) > 3:
        from perilune.control.evidence.attestation import evidence_paths
        from perilune.control.record.home import Home

        run = root.parents[1].name
        evidence, attempt = evidence_paths(Home(root.parents[3]), run, int(root.name)), f"{run}/{root.name}"
    if not evidence.result.exists():
        return "not signed"
    try:
        about, _ = read_result_statement(evidence)
        key = read_public_key(evidence.key).keyid
    except RequestError as error:
        return f"not valid: {error.what}"
    return f"key {key}" if attempt in (None, about) else f"not valid: it is about another attempt ({about})"


def format_document(document: Mapping[str, Any]) -> str:
    """Return a JSON document as text, with long lists shortened."""
    return json.dumps(_shorten_lists(document), indent=2, ensure_ascii=False) if document else ""


def _shorten_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shorten_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        kept = [_shorten_lists(item) for item in value[:MAX_LIST_ITEMS]]
        return [*kept, f"... {len(value) - MAX_LIST_ITEMS} more"] if len(value) > MAX_LIST_ITEMS else kept
    return value
