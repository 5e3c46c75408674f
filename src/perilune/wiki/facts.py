"""Reads the facts about each run from signed results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from perilune.bundle.attested import Evidence, read_statement
from perilune.bundle.envelope import SignatureError
from perilune.bundle.statements import RESULT_PREDICATE
from perilune.control.evidence.attestation import evidence_paths
from perilune.control.queries.lookup import read_overrides
from perilune.control.record.store import Experiment, Run, Stage
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import canonical_json, read_json, sha256_bytes, sha256_file, write_atomic
from perilune.traces.causes import environment_label

SUMMARY_FILE = "artifacts/summary.json"
SKIPPED_KEYS = frozenset({"correct_per_task", "implicit_objective", "memory", "seconds", "disk_bytes"})
MISSING_SUFFIX = "is missing"  # end of the `problem` of a run with missing files
MAX_DEPTH = 3  # levels of a summary to search for figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A final figure of a run, with its 95% interval where the task wrote one."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class RunFacts:
    """One run. Text comes from recipes and programs, so pages must quote it.

    Attributes:
        setting: first characters of the digest of the recipe without its seed.
        parents: names of the stages whose output it takes.
        figures: by dotted name in summary.json. Empty unless the signature and the digest are right.
        evidence: SHA-256 of the signed statement about the result; "" without one.
        problem: reason not to trust the figures; "" without one.
        superseded: true if a retry replaced it.
    """

    id: str
    experiment: str
    recipe: str
    stage: str
    task: str
    state: str
    cause: str
    message: str
    submitted: float
    setting: str
    overrides: tuple[str, ...]
    superseded: bool
    seed: int = 0
    environment: str = ""
    algorithm: str = ""
    parents: tuple[str, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    evidence: str = ""
    problem: str = ""

    @property
    def citable(self) -> bool:
        """True if its figures may be cited."""
        return bool(self.figures) and not self.problem

    @property
    def is_missing(self) -> bool:
        """True if a file of its evidence is missing."""
        return self.problem.endswith(MISSING_SUFFIX)


def read_facts(control: Control, cache: Path | None = None) -> list[RunFacts]:
    """Return the facts of all runs of a home, in the order of their experiments and stages.

    Args:
        cache: file with the facts of earlier reads. A run is read again when its state changes, or the size
            or a time stamp of one of its files. None checks every signature and digest.
    """
    known, result, changed = _read_cache(cache), [], False
    for run, experiment, superseded in _stored_runs(control):
        evidence = evidence_paths(control.home, run.id, run.current_epoch)
        files = (evidence.result, evidence.bundle / SUMMARY_FILE, evidence.key)
        stamp = [
            [run.state, run.current_epoch, superseded, run.cause, run.message],
            *map(_file_stamp, files),
        ]
        facts = _restore_facts(known.get(run.id), stamp)
        if facts is None:
            facts = _read_run(control, run, experiment, evidence, superseded=superseded)
            known[run.id] = [stamp, asdict(facts)]
            changed = True
        result.append(facts)
    if cache is not None and (changed or len(known) > len(result)):
        kept = {run.id: known[run.id] for run in result}
        write_atomic(cache, canonical_json(kept))
    return result


def _stored_runs(control: Control) -> Iterator[tuple[Run, Experiment, bool]]:
    """Yield each run of the store with its experiment, and whether a retry replaced the run."""
    with control.store.snapshot() as session:
        query = select(Run, Experiment).join(Experiment, Experiment.id == Run.experiment_id)
        rows = session.execute(query.order_by(Experiment.created, Experiment.id, Run.created, Run.id)).all()
        current = set(session.scalars(select(Stage.run_id)))
    for run, experiment in rows:
        yield run, experiment, run.id not in current


def _read_run(
    control: Control, run: Run, experiment: Experiment, evidence: Evidence, *, superseded: bool
) -> RunFacts:
    recipe = _read_document(control.home.experiment(experiment.id) / "recipe.json")
    job = _read_document(control.home.bundle(run.id) / "job.json")
    settings, figures, problem = job, dict[str, Figure](), ""
    if run.state == RunState.SUCCEEDED:
        try:
            settings, figures = _read_signed(evidence)
        except RequestError as error:
            problem = error.what
    spec = settings.get("spec") or {}
    algorithm, environment = spec.get("algorithm"), settings.get("environment")
    parents = [value for value in (spec.get("checkpoint"), spec.get("data")) if isinstance(value, str)]
    return RunFacts(
        id=run.id,
        experiment=experiment.id,
        recipe=experiment.name,
        stage=run.stage,
        task=run.task,
        state=run.state,
        cause=run.cause,
        message=run.message,
        submitted=run.created,
        setting=sha256_bytes(canonical_json({**recipe, "seed": None}))[:8],
        overrides=tuple(arg for arg in read_overrides(control, experiment.id) if not arg.startswith("seed=")),
        superseded=superseded,
        seed=int(settings.get("seed") or 0),
        environment=environment_label(environment) if environment else "",
        algorithm=str(algorithm.get("name", "")) if isinstance(algorithm, Mapping) else str(algorithm or ""),
        parents=tuple(parents),
        figures=figures,
        evidence=sha256_file(evidence.result) if evidence.result.is_file() else "",
        problem=problem,
    )


def _read_signed(evidence: Evidence) -> tuple[Mapping[str, Any], dict[str, Figure]]:
    """Return the settings and the figures that the signature covers.

    Raises:
        RequestError: when a file is missing, the signature is wrong, or summary.json was changed.
    """
    summary = evidence.bundle / SUMMARY_FILE
    for path in (evidence.result, summary):
        if not path.exists():
            raise RequestError(f"{path.name} {MISSING_SUFFIX}")
    statement = read_statement(evidence.result, evidence.key, RESULT_PREDICATE)
    try:
        predicate = statement["predicate"]
        about = str(predicate["runDetails"]["metadata"]["invocationId"]).partition("/")[0]
        digests = {str(file["name"]): str(file["digest"]["sha256"]) for file in statement["subject"]}
        settings = dict(predicate["buildDefinition"]["externalParameters"])
    except (KeyError, TypeError, ValueError) as error:
        raise SignatureError("has another shape") from error
    if about != evidence.run:
        raise SignatureError(f"is about another run ({about})")
    if digests.get(SUMMARY_FILE) != sha256_file(summary):
        raise RequestError("summary.json is not what was signed")
    return settings, dict(_list_figures(read_json(summary)))


def _list_figures(summary: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Figure]]:
    """Yield the numbers in a summary by dotted name; a mean with its interval is one figure."""
    if not isinstance(summary, Mapping) or depth == MAX_DEPTH:
        return
    for name, value in sorted(summary.items()):
        dotted = f"{prefix}{name}"
        if name in SKIPPED_KEYS or any(sign.isspace() for sign in dotted):
            continue
        if isinstance(value, Mapping) and value.keys() >= {"mean", "low", "high"}:
            yield dotted, Figure(value["mean"], value["low"], value["high"])
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield dotted, Figure(value)
        else:
            yield from _list_figures(value, f"{dotted}.", depth + 1)


def _read_document(path: Path) -> Mapping[str, Any]:
    try:
        document = read_json(path)
    except RequestError:
        return {}
    return document if isinstance(document, dict) else {}


def _file_stamp(path: Path) -> Sequence[int]:
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_cache(cache: Path | None) -> dict[str, Any]:
    document = _read_document(cache) if cache is not None and cache.exists() else {}
    return dict(document)


def _restore_facts(kept: Any, stamp: Sequence[Any]) -> RunFacts | None:
    """Return the facts in an entry of the cache; None if the entry is missing, damaged or outdated."""
    try:
        known, fields = kept
        figures = {name: Figure(**value) for name, value in fields["figures"].items()}
        texts = {name: tuple(fields[name]) for name in ("overrides", "parents")}
        return RunFacts(**{**fields, **texts, "figures": figures}) if known == stamp else None
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
