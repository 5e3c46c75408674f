"""What differs between two runs, and whether one reproduced the other.

`compare_runs` explains: recipe, code, packages, machine, inputs, results. `compare_artifacts` judges: what a
run computed must be the same byte for byte; what it took (times, hardware, logs) need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from perilune.bundle.digest import source_files
from perilune.bundle.verify import Difference
from perilune.bundle.wheel import wheel_members
from perilune.errors import RequestError
from perilune.files import read_json, read_json_lines, sha256_file

# Under artifacts/. Wall-clock figures, logs and observations of the machine are not results, nor is an audit,
# some of whose findings are deadlines that were missed.
_NOT_RESULTS = {
    "timings.jsonl", "hardware.jsonl", "precheck.json", "source.patch", "manifest.json", "reward_audit.json",
}  # fmt: skip
_MEASURED = {"seconds", "tokens_per_second", "peak_bytes"}  # keys of summary.json
_COMPARED_BY_KEY = {"summary.json", "black_box.json"}
_ABSENT = "absent"
_LONGEST_SHOWN = 100  # characters of a list or mapping that are printed


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: its name, and its value in the first and in the second run."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {_in_short(self.a)} -> {_in_short(self.b)}"


def _in_short(value: Any) -> str:
    """A value on one line, for people; the document holds all of it."""
    if isinstance(value, list | dict) and len(str(value)) > _LONGEST_SHOWN:
        return f"{len(value)} {'entries' if isinstance(value, dict) else 'values'}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What differs between two runs, by where it comes from; an empty part means "the same"."""

    recipe: tuple[Change, ...]
    code: tuple[Change, ...]
    packages: tuple[Change, ...]
    machine: tuple[Change, ...]
    inputs: tuple[Change, ...]
    results: tuple[Change, ...]
    timings: tuple[Change, ...]

    def parts(self) -> dict[str, tuple[Change, ...]]:
        """Name of each part, and its changes."""
        return {
            "recipe": self.recipe,
            "code": self.code,
            "packages": self.packages,
            "machine": self.machine,
            "inputs": self.inputs,
            "results": self.results,
            "timings": self.timings,
        }

    def document(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Compare two attempts (or frozen bundles, which have no results yet).

    Raises:
        RequestError: when one is not a bundle, or one of its documents is damaged.
    """
    one, other = _Evidence.read(a), _Evidence.read(b)

    def part(view: Callable[[_Evidence], Any]) -> tuple[Change, ...]:
        return _changes(view(one), view(other))

    summary = part(lambda run: run.summary)
    return RunDiff(
        recipe=part(lambda run: {key: run.job[key] for key in run.job if key != "inputs"}),
        code=(*part(_scripts), *part(_checkout)),
        packages=(*part(_packages), *_contents(one, other)),
        machine=part(_machine),
        inputs=part(lambda run: {given["name"]: given["digest"] for given in run.job.get("inputs", [])}),
        results=(*_first_metric(a, b), *(change for change in summary if not _measured(change))),
        timings=tuple(change for change in summary if _measured(change)),
    )


def compare_artifacts(a: Path, b: Path) -> list[Difference]:
    """What a second run of a bundle computed otherwise than the first; empty when it is reproduced.

    Compared byte for byte: metrics.jsonl, episodes, data sets, the final checkpoint. Of summary.json and
    black_box.json each key is compared, without what the run took (time, memory). Checkpoints on the way are
    not compared: which of them exist depends on interruptions, and the final one follows from them.

    Args:
        a: the attempt that is taken as given; b: the attempt that should equal it.

    Raises:
        RequestError: when one has no artifacts, or a document in it is damaged.
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
            figures = _first_metric(a, b) if relative == "metrics.jsonl" else ()
            if figures:
                differences += [Difference(name, "changed", str(c.a), str(c.b), c.key) for c in figures]
            else:
                differences.append(Difference(name, "changed", f"sha256 {was}", now))
    return differences


def _results(attempt: Path) -> dict[str, Path]:
    """Artifacts that must be the same in every run of the same bundle, by path under artifacts/."""
    artifacts = attempt / "artifacts"
    if not artifacts.is_dir():
        raise RequestError("nothing to compare: no artifacts", where=str(attempt))
    return {
        relative: path
        for relative, path in source_files(artifacts)
        if relative not in _NOT_RESULTS
        and not relative.endswith(".log")
        and not relative.startswith("checkpoints/step-")
    }


def _document_difference(name: str, a: Path, b: Path) -> Iterator[Difference]:
    for change in _changes(read_json(a), read_json(b)):
        if not _measured(change):
            yield Difference(name, "changed", str(change.a), str(change.b), change.key)


def _measured(change: Change) -> bool:
    return change.key.rpartition(".")[2] in _MEASURED


def _first_metric(a: Path, b: Path) -> tuple[Change, ...]:
    """The first step and key at which the metrics of two runs part."""
    rows = zip_longest(*(read_json_lines(path / "artifacts" / "metrics.jsonl") for path in (a, b)))
    for one, other in rows:
        if one == other:
            continue
        if one is None or other is None:
            step = (one or other).get("step")
            return (Change(f"metrics at step {step}", one or _ABSENT, other or _ABSENT),)
        key = next(key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key))
        name = f"metrics at step {one.get('step')}, {key}"
        return (Change(name, one.get(key, _ABSENT), other.get(key, _ABSENT)),)
    return ()


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What one run says of itself; precheck and summary are empty before it has run."""

    root: Path
    job: Mapping[str, Any]
    precheck: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> _Evidence:
        artifacts = root / "artifacts"
        optional = [artifacts / "precheck.json", artifacts / "summary.json"]
        found = [_document(path) if path.exists() else {} for path in optional]
        return cls(root, _document(root / "job.json"), *found)


def _scripts(run: _Evidence) -> dict[str, Any]:
    """Digest of each frozen script; each line of the lock; of our wheel, a checksum of each source file."""
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


def _checkout(run: _Evidence) -> dict[str, Any]:
    """State of the git checkout, and what ran that was not in the bundle."""
    git = run.precheck.get("git") or {}
    state = {key: git.get(key) for key in ("commit", "dirty")}
    state["patch"] = (git.get("patch") or {}).get("sha256")
    return {"git": state, **run.precheck.get("code", {})}


def _packages(run: _Evidence) -> dict[str, str]:
    """Version of each loaded distribution; the file for modules that no distribution claims."""
    found = {}
    for name, facts in run.precheck.get("packages", {}).items():
        if facts.get("distribution"):
            editable = " (editable)" if facts.get("editable") else ""
            found[facts["distribution"]] = f"{facts['version']}{editable}"
        else:
            found[name] = f"not installed, from {facts.get('file')}"
    return found


def _contents(one: _Evidence, other: _Evidence) -> Iterator[Change]:
    """Distributions of one version whose files differ, by the digests of their records."""
    a, b = (_by_distribution(run) for run in (one, other))
    for name in sorted(a.keys() & b.keys()):
        (version, was), (other_version, now) = a[name], b[name]
        if version == other_version and was and now and was != now:
            yield Change(f"{name} {version}, installed files", f"sha256 {was}", f"sha256 {now}")


def _by_distribution(run: _Evidence) -> dict[str, tuple[Any, Any]]:
    """Version and digest of each loaded distribution; runs of older versions have no digest."""
    facts = run.precheck.get("packages", {}).values()
    return {one["distribution"]: (one["version"], one.get("record")) for one in facts if one["distribution"]}


def _machine(run: _Evidence) -> dict[str, Any]:
    return {key: run.precheck[key] for key in ("machine", "python", "torch") if run.precheck.get(key)}


def _changes(a: Any, b: Any, prefix: str = "") -> tuple[Change, ...]:
    """Differences between two JSON values, leaf by leaf; keys joined by dots, lists compared whole."""
    if a == b:
        return ()
    if isinstance(a, dict) and isinstance(b, dict):
        found: list[Change] = []
        for key in sorted(a.keys() | b.keys()):
            name = f"{prefix}.{key}" if prefix else str(key)
            if key not in a or key not in b:
                found.append(Change(name, a.get(key, _ABSENT), b.get(key, _ABSENT)))
            else:
                found += _changes(a[key], b[key], name)
        return tuple(found)
    return (Change(prefix, a, b),)


def _document(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise RequestError("not a JSON object", where=str(path))
    return value
