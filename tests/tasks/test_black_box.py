"""External programs as stages: fixed commit, separate environment, and unmodified sources."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_cases import make_bundle

from perilune.bundle.job import InputReference, Job, Resources
from perilune.bundle.workspace import Workspace
from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control, advance, open_experiment, plan_stages
from perilune.control.runs.progress import StageFailed, StageFinished
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json
from perilune.recipe.load import load_recipe
from perilune.tasks.black_box.environment import check_pinned, lock_lines
from perilune.tasks.black_box.source import fetch_source
from perilune.tasks.black_box.stage import BlackBox, BlackBoxSpec, _copy_metrics, _read_figure

PROGRAM = """
import json, os, sys, pathlib
seed, outputs = int(sys.argv[1]), pathlib.Path(sys.argv[2])
try:
    import perilune
    raise SystemExit("it sees perilune")
except ImportError:
    pass
print("hello from elsewhere", os.environ.get("PYTHONPATH"))
pathlib.Path("made/deep").mkdir(parents=True)
pathlib.Path("made/deep/a.txt").write_text("a\\n")
pathlib.Path("program.py").write_text("changed")
(outputs / "result.json").write_text(json.dumps({"final": {"scores": [0.5, seed]}}))
(outputs / "log.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\\n" for s in (1, 2)))
"""
RECIPE = """
name: elsewhere
seed: 7
model: {{preset: tiny}}
environment: {{id: reasoning_gym, task: basic_arithmetic, prompt: compact}}
stages:
  - name: theirs
    task: black_box
    source: {source}
    {commit}
    command: [python, program.py, "{{seed}}", "{{outputs}}"]
    outputs: ["made/**/*.txt"]
    figures: {{score: "result.json#final.scores.1"}}
    metrics: log.jsonl
"""


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", "-C", str(folder), *named, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "program.py").write_text(PROGRAM)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened = Control(Home.open(tmp_path / "home"))
    yield opened
    opened.store.close()


def run_recipe(control: Control, folder: Path, text: str) -> StageFinished | StageFailed:
    (folder / "recipe.yaml").write_text(text)
    recipe = load_recipe(folder / "recipe.yaml")
    *_, last = advance(control, open_experiment(control, recipe), plan_stages(recipe))
    assert isinstance(last, StageFinished | StageFailed)
    return last


def test_black_box_runs_the_given_commit_and_keeps_its_outputs(
    control: Control, repository: Path, tmp_path: Path
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "program.py").write_text("raise SystemExit(1)")
    git(repository, "commit", "--quiet", "-am", "a later one")
    last = run_recipe(control, tmp_path, RECIPE.format(source="theirs", commit=f"commit: {commit}"))
    assert isinstance(last, StageFinished)
    assert last.summary["score"] == 7 and last.summary["commit"] == commit
    run = control.run(last.run_id)
    bundle = control.directory(run)
    outputs = bundle / "artifacts" / "outputs"
    assert (outputs / "made/deep/a.txt").read_text() == "a\n"
    assert read_json(outputs / "result.json") == {"final": {"scores": [0.5, 7]}}
    report = read_json(bundle / "artifacts" / "black_box.json")
    assert set(report["files"]) == {"made/deep/a.txt", "result.json", "log.jsonl"}
    assert report["commit"] == commit and report["packages"] == []
    assert "hello from elsewhere None" in (bundle / "artifacts" / "task.log").read_text()
    rows = [json.loads(line) for line in (bundle / "artifacts" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    job = (bundle / "job.json").read_text()
    assert str(tmp_path) not in job and (bundle / "inputs" / "source" / "program.py").read_text() == PROGRAM
    assert not (bundle / "inputs" / "source" / ".git").exists()


def test_failing_program_fails_its_stage(control: Control, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "program.py").write_text("import sys; print('no luck'); sys.exit(3)")
    last = run_recipe(control, tmp_path, RECIPE.format(source="plain", commit=""))
    assert isinstance(last, StageFailed)
    assert "the program exited with 3" in last.message
    (tmp_path / "plain" / "program.py").write_text("print('nothing is made')")
    last = run_recipe(control, tmp_path, RECIPE.format(source="plain", commit=""))
    assert isinstance(last, StageFailed) and "no file of the program matches 'made/**/*.txt'" in last.message


def own_bundle(folder: Path, program: str, **options: Any) -> Workspace:
    """A bundle of a program without packages."""
    own = folder.with_name("source")
    own.mkdir()
    (own / "program.py").write_text(program)
    spec = BlackBoxSpec(source="inputs/source", command=("python", "program.py", "{outputs}"), **options)
    source = InputReference(name="source", path="inputs/source", digest="", kind="dataset")
    resources = Resources(device="cpu", threads=1)
    job = Job(
        task="black_box",
        stage="theirs",
        spec=spec.model_dump(mode="json"),
        model={"preset": "tiny"},
        environment={},
        seed=7,
        resources=resources,
        inputs=(source,),
    )
    return Workspace(make_bundle(folder, job, {"source": own}))


def test_metrics_of_a_failed_attempt_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 0.5}]  # JSON cannot represent NaN
    text = "".join(json.dumps(line) + "\n" for line in lines)
    program = f"import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'log.jsonl').write_text({text!r})"
    workspace = own_bundle(tmp_path / "b", program, metrics="log.jsonl", figures={"score": "missing.json"})
    for _ in range(2):
        with pytest.raises(WorkFailedError, match=r"the program wrote no missing\.json"):
            BlackBox().run(workspace)
        assert workspace.metrics() == [{"step": 1}, {"step": 2, "loss": 0.5}]


@pytest.mark.parametrize("line", ["3", '{"loss": 1}', '{"step": "1"}', '{"step": true}', '{"step": null}'])
def test_metrics_without_a_step_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    workspace = own_bundle(tmp_path / "b", "")
    with pytest.raises(WorkFailedError, match="whole number `step`") as refused:
        _copy_metrics(tmp_path / "log.jsonl", workspace)
    assert refused.value.where.endswith("log.jsonl, line 2")


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1" + 400 * "0", '"inf"', "[]", "null"])
def test_figures_are_finite_numbers(value: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(f'{{"a": {value}, "b": 2}}')
    assert _read_figure(tmp_path, "result.json#b") == 2.0
    for source in ("result.json#a", "."):
        with pytest.raises(WorkFailedError, match="there is no number at"):
            _read_figure(tmp_path, source)


def test_all_files_of_a_commit_are_unchanged(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attributes of a repository may leave files out of an archive, or replace text in them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (repository / ".gitattributes").write_text("data export-ignore\nversion.py export-subst\n")
    (repository / "data").mkdir()
    (repository / "data/words.txt").write_text("one")
    (repository / "version.py").write_text("$Format:%H$")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "two")
    source = fetch_source(str(repository), git(repository, "rev-parse", "HEAD"))
    assert (source / "data/words.txt").read_text() == "one"
    assert (source / "version.py").read_text() == "$Format:%H$"


def test_fetch_source_requires_a_clean_repository_and_full_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commit = git(repository, "rev-parse", "HEAD")
    for wrong in (None, commit[:12], "main", "0" * 40):
        with pytest.raises(RequestError, match=r"40 digits|git:"):
            fetch_source(str(repository), wrong)
    assert (fetch_source(str(repository), commit) / "program.py").read_text() == PROGRAM
    assert (fetch_source(f"file://{repository}", commit) / "program.py").read_text() == PROGRAM
    (repository / "new.py").write_text("")
    with pytest.raises(RequestError, match=r"has uncommitted changes: new\.py"):
        fetch_source(str(repository), commit)
    with pytest.raises(RequestError, match="no git repository"):
        fetch_source(str(tmp_path), commit)
    with pytest.raises(RequestError, match="no folder here"):
        fetch_source("ext::sh -c id", commit)
    with pytest.raises(RequestError, match="no folder here"):
        fetch_source("--upload-pack=id", commit)


def test_repository_with_submodules_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (repository / ".gitmodules").write_text('[submodule "x"]\n  path = x\n  url = ../x\n')
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "two")
    with pytest.raises(RequestError, match="submodules"):
        fetch_source(str(repository), git(repository, "rev-parse", "HEAD"))


def test_requirements_must_be_pinned(tmp_path: Path) -> None:
    check_pinned(["six==1.17.0", "torch==2.13.0 ; sys_platform == 'linux'"])
    for loose in ("six", "six>=1", "six==1.*", "six @ https://example.org/six.whl", "not a requirement"):
        with pytest.raises(RequestError):
            check_pinned([loose])
    lock = tmp_path / "lock"
    lock.write_text("# made by hand\nsix==1.17.0 \\\n    --hash=sha256:00 # why\n\nidna==3.10\n")
    assert lock_lines(lock) == ["six==1.17.0      --hash=sha256:00", "idna==3.10"]
    lock.write_text("six>=1\n")
    with pytest.raises(RequestError, match="not an exact version"):
        lock_lines(lock)


@pytest.mark.thorough
def test_requirements_are_installed_in_a_separate_environment(control: Control, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "lock.txt").write_text("six==1.17.0\n")
    (tmp_path / "plain" / "program.py").write_text("import six, sys; print(six.__version__, sys.prefix)")
    text = RECIPE.format(source="plain", commit="requirements: lock.txt").replace(
        'outputs: ["made/**/*.txt"]', ""
    )
    text = text[: text.index("    figures")]
    last = run_recipe(control, tmp_path, text)
    assert isinstance(last, StageFinished), last
    bundle = control.directory(control.run(last.run_id))
    assert (
        "1.17.0 " + str(tmp_path / "cache" / "perilune" / "environments")
        in (bundle / "artifacts" / "task.log").read_text()
    )
    report = read_json(bundle / "artifacts" / "black_box.json")
    assert "six==1.17.0" in report["packages"] and len(report["record_digests"]["six"]) == 64


def test_outputs_outside_the_folder_of_the_program_are_refused() -> None:
    for pattern in ("/etc/*", "../*", "made/../../*", ""):
        with pytest.raises(ValueError, match="is not below the program's folder"):
            BlackBoxSpec(source=".", command=("python",), outputs=(pattern,))
    BlackBoxSpec(source=".", command=("python",), outputs=("made/**/*.txt",))


def test_unknown_command_placeholder_is_refused() -> None:
    with pytest.raises(ValueError, match="is none of"):
        BlackBoxSpec(source=".", command=("python", "{sed}"))
    BlackBoxSpec(source=".", command=("python", "{seed}", "{{literal}}"))
