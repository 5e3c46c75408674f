"""Compares two runs.

`compare_runs` lists the differences in recipe, code, packages, machine, inputs and results.
`compare_artifacts` decides whether a run was reproduced: computed files must be identical byte for byte.
Times, hardware measurements and logs may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from perilune.bundle.digest import source_files
from perilune.bundle.inspection import read_object
from perilune.bundle.verify import Difference
from perilune.bundle.wheel import wheel_members
from perilune.errors import RequestError
from perilune.files import read_json, read_json_lines, sha256_file

# Files under artifacts/ with timings or facts about the machine. A reward audit contains missed deadlines.
_EXCLUDED = {
    *("timings.jsonl", "hardware.jsonl", "precheck.json"),
    *("source.patch", "manifest.json", "reward_audit.json"),
}
_MEASURED_KEYS = {"seconds", "tokens_per_second", "peak_bytes"}  # keys of summary.json
_COMPARED_BY_KEY = {"summary.json", "black_box.json"}
_ABSENT = "absent"
_MAX_CHARS = 100  # characters of a list or mapping that are printed


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: its name, and its values in the first and in the second run."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        a, b = self.a, self.b
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and len(str(a)) > _MAX_CHARS:
            return f"{self.key}: {sum(x != y for x, y in zip(a, b, strict=True))} of {len(a)} values differ"
        return f"{self.key}: {_abbreviate(a)} -> {_abbreviate(b)}"


def _abbreviate(value: Any) -> str:
    """Return a value on one line; long values as their size."""
    if isinstance(value, list | dict) and len(str(value)) > _MAX_CHARS:
        return f"{len(value)} {'entries' if isinstance(value, dict) else 'values'}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The differences between two runs, by origin."""

    recipe: tuple[Change, ...]
    code: tuple[Change, ...]
    packages: tuple[Change, ...]
    machine: tuple[Change, ...]
    inputs: tuple[Change, ...]
    results: tuple[Change, ...]
    timings: tuple[Change, ...]

    def parts(self) -> dict[str, tuple[Change, ...]]:
        """Return the changes by the name of their part."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Compare two attempts, or frozen bundles, which have no results.

    Raises:
        RequestError: when a folder is not a bundle, or one of its documents is damaged.
    """
    first, second = _RunFiles.read(a), _RunFiles.read(b)

    def part(view: Callable[[_RunFiles], Any]) -> tuple[Change, ...]:
        return _changes(view(first), view(second))

    summary = part(lambda run: run.summary)
    return RunDiff(
        recipe=part(lambda run: {key: run.job[key] for key in run.job if key != "inputs"}),
        code=(*part(_scripts), *part(_checkout)),
        packages=(*part(_packages), *_package_contents(first, second)),
        machine=part(_machine),
        inputs=part(lambda run: {entry["name"]: entry["digest"] for entry in run.job.get("inputs", [])}),
        results=(*_metric_difference(a, b), *(change for change in summary if not _is_measured(change))),
        timings=tuple(change for change in summary if _is_measured(change)),
    )


def compare_artifacts(a: Path, b: Path) -> list[Difference]:
    """Return the differences between the computed files of two attempts; empty if they are equal.

    Compares metrics.jsonl, episodes, data sets and the final checkpoint byte for byte, and summary.json and
    black_box.json key by key, without times and memory. Does not compare intermediate checkpoints: which of
    them exist depends on interruptions, and the final checkpoint follows from them.

    Args:
        a: the reference attempt.
        b: the attempt that should equal it.

    Raises:
        RequestError: when an attempt has no artifacts, or a document in it is damaged.
    """
    first, second = (_results(path) for path in (a, b))
    differences = []
    for relative in sorted(first.keys() | second.keys()):
        name = f"artifacts/{relative}"
        if relative not in second:
            differences.append(Difference(name, "missing"))
        elif relative not in first:
            differences.append(Difference(name, "extra"))
        elif relative in _COMPARED_BY_KEY:
            differences += _document_difference(name, first[relative], second[relative])
        elif (was := sha256_file(first[relative])) != (now := sha256_file(second[relative])):
            figures = _metric_difference(a, b) if relative == "metrics.jsonl" else ()
            if figures:
                differences += [Difference(name, "changed", str(c.a), str(c.b), c.key) for c in figures]
            else:
                differences.append(Difference(name, "changed", f"sha256 {was}", now))
    return differences


def _results(attempt: Path) -> dict[str, Path]:
    """Return the artifacts that every run of the same bundle reproduces, by path under artifacts/."""
    artifacts = attempt / "artifacts"
    if not artifacts.is_dir():
        raise RequestError("nothing to compare: no artifacts", where=str(attempt))
    return {
        relative: path
        for relative, path in source_files(artifacts)
        if relative not in _EXCLUDED
        and not relative.endswith(".log")
        and not relative.startswith("checkpoints/step-")
    }


def _document_difference(name: str, a: Path, b: Path) -> Iterator[Difference]:
    for change in _changes(read_json(a), read_json(b)):
        if not _is_measured(change):
            yield Difference(name, "changed", str(change.a), str(change.b), change.key)


def _is_measured(change: Change) -> bool:
    return change.key.rpartition(".")[2] in _MEASURED_KEYS


def _metric_difference(a: Path, b: Path) -> tuple[Change, ...]:
    """Return the first step and key at which the metrics of two runs differ."""
    rows = zip_longest(*(read_json_lines(path / "artifacts" / "metrics.jsonl") for path in (a, b)))
    for first, other in rows:
        if first == other:
            continue
        if first is None or other is None:
            step = (first or other).get("step")
            return (Change(f"metrics at step {step}", first or _ABSENT, other or _ABSENT),)
        key = next(key for key in sorted(first.keys() | other.keys()) if first.get(key) != other.get(key))
        name = f"metrics at step {first.get('step')}, {key}"
        return (Change(name, first.get(key, _ABSENT), other.get(key, _ABSENT)),)
    return ()


@dataclass(frozen=True, slots=True)
class _RunFiles:
    """The documents of one run; precheck and summary are empty before it has run."""

    root: Path
    job: Mapping[str, Any]
    precheck: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> _RunFiles:
        artifacts = root / "artifacts"
        optional = [artifacts / "precheck.json", artifacts / "summary.json"]
        documents = [read_object(path) if path.exists() else {} for path in optional]
        return cls(root, read_object(root / "job.json"), *documents)


def _scripts(run: _RunFiles) -> dict[str, Any]:
    """Return the digests of the frozen scripts, the lines of the lock, and checksums of the wheel's files."""
    scripts: dict[str, Any] = {}
    for name, path in source_files(run.root / "scripts"):
        wheel = name.endswith(".whl")
        if name == "requirements.lock":
            lines = path.read_text(encoding="utf-8").splitlines()
            scripts[name] = {
                package: locked for package, _, locked in (line.partition("==") for line in lines)
            }
        else:
            scripts["source" if wheel else name] = wheel_members(path) if wheel else sha256_file(path)
    return scripts


def _checkout(run: _RunFiles) -> dict[str, Any]:
    """Return the state of the git checkout, and code that ran but was not in the bundle."""
    git = run.precheck.get("git") or {}
    state = {key: git.get(key) for key in ("commit", "dirty")}
    state["patch"] = (git.get("patch") or {}).get("sha256")
    return {"git": state, **run.precheck.get("code", {})}


def _packages(run: _RunFiles) -> dict[str, str]:
    """Return the version of each loaded distribution, and the file of each other module."""
    versions = {}
    for name, facts in run.precheck.get("packages", {}).items():
        if facts.get("distribution"):
            editable = " (editable)" if facts.get("editable") else ""
            versions[facts["distribution"]] = f"{facts['version']}{editable}"
        else:
            versions[name] = f"not installed, from {facts.get('file')}"
    return versions


def _package_contents(first: _RunFiles, second: _RunFiles) -> Iterator[Change]:
    """Yield distributions with the same version but different files, by the digests of their records."""
    a, b = (_distribution_digests(run) for run in (first, second))
    for name in sorted(a.keys() & b.keys()):
        (version, was), (other_version, now) = a[name], b[name]
        if version == other_version and was and now and was != now:
            yield Change(f"{name} {version}, installed files", f"sha256 {was}", f"sha256 {now}")


def _distribution_digests(run: _RunFiles) -> dict[str, tuple[Any, Any]]:
    """Return the version and digest of each loaded distribution; runs of older versions have no digest."""
    facts = run.precheck.get("packages", {}).values()
    return {row["distribution"]: (row["version"], row.get("record")) for row in facts if row["distribution"]}


def _machine(run: _RunFiles) -> dict[str, Any]:
    return {key: run.precheck[key] for key in ("machine", "python", "torch") if run.precheck.get(key)}


def _changes(a: Any, b: Any, prefix: str = "") -> tuple[Change, ...]:
    """Return the differences between the leaves of two JSON values, with dotted keys. Lists are leaves."""
    if a == b:
        return ()
    if isinstance(a, dict) and isinstance(b, dict):
        changes: list[Change] = []
        for key in sorted(a.keys() | b.keys()):
            name = f"{prefix}.{key}" if prefix else str(key)
            if key not in a or key not in b:
                changes.append(Change(name, a.get(key, _ABSENT), b.get(key, _ABSENT)))
            else:
                changes += _changes(a[key], b[key], name)
        return tuple(changes)
    return (Change(prefix, a, b),)
