"""Freezing: the bundle's layout, its digest, and the inputs and secrets that freeze rejects."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bundle_cases import make_inputs, make_job
from hypothesis import given
from hypothesis import strategies as st

import perilune
from perilune.bundle import storage
from perilune.bundle.digest import bundle_digest, contents_digest, recorded_digest, source_files
from perilune.bundle.freeze import copy_for_attempt, freeze
from perilune.bundle.job import InputReference, Job
from perilune.bundle.verify import verify
from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes, sha256_file


def tree_digest(source: Path) -> str:
    """The expected digest of an input. It covers the names and contents of its files, and nothing else."""
    return contents_digest((relative, sha256_file(path)) for relative, path in source_files(source))


def test_freeze_writes_documented_layout(pristine: Path) -> None:
    assert sorted(path.name for path in pristine.iterdir()) == [
        *("artifacts", "bundle.json", "inputs", "job.json", "runtime", "scripts"),
    ]
    assert sorted(path.name for path in (pristine / "inputs").iterdir()) == ["checkpoint", "data"]
    assert sorted(path.name for path in (pristine / "scripts").iterdir()) == [
        *("bootstrap.py", "entrypoint.sh", "perilune-0.1.0-py3-none-any.whl"),
        *("redaction.py", "requirements.lock", "runner.py"),
    ]
    assert not list((pristine / "runtime").iterdir()) + list((pristine / "artifacts").iterdir())


def test_frozen_files_are_read_only_and_only_entrypoint_is_executable(pristine: Path) -> None:
    for path in pristine.rglob("*"):
        if path.is_file():
            expected = 0o555 if path.name == "entrypoint.sh" else 0o444
            assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_digest_covers_listed_entries(pristine: Path) -> None:
    document = json.loads((pristine / "bundle.json").read_bytes())
    assert document["digest"] == sha256_bytes(canonical_json(document["files"]))
    assert document["digest"] == bundle_digest(pristine) == recorded_digest(pristine)
    listed = {file["path"]: file for file in document["files"]}
    data = pristine / "inputs" / "data"
    assert listed["inputs/data"] == {
        "path": "inputs/data",
        "size": data.stat().st_size,
        "sha256": sha256_bytes(data.read_bytes()),
        "mode": "0444",
    }


def test_digest_code_in_reference_page_computes_recorded_digest(pristine: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "bundle.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["bundle_digest"](pristine) == recorded_digest(pristine)


def test_workspace_finds_inputs_by_name(bundle: Path, inputs: dict[str, Path]) -> None:
    workspace = Workspace(bundle)
    for reference in workspace.job.inputs:
        assert reference.digest == tree_digest(inputs[reference.name])
        assert tree_digest(workspace.input(reference.name)) == reference.digest


def test_digest_does_not_depend_on_process_folder_or_time(tmp_path: Path) -> None:
    """Two processes differ in hash seed, umask, time zone, folder, and in modes and times of the sources."""
    source = Path(perilune.__path__[0])
    code = (
        "import os, sys\nos.umask(int(sys.argv[2]))\nsys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom bundle_cases import make_job\n"
        "from perilune.bundle.freeze import freeze\n"
        "inputs = {'checkpoint': Path('a checkpoint'), 'data': Path('rows.jsonl')}\n"
        "print(freeze(make_job(), inputs, Path('b')))"
    )
    # Both processes use copies of one snapshot of the code, because the source may change during the test.
    shutil.copytree(source, tmp_path / "code" / "perilune", ignore=shutil.ignore_patterns("__pycache__"))
    digests = []
    for name, mode, umask, zone, seed in [
        ("one", 0o644, 0o22, "UTC", 1),
        ("two", 0o700, 0o77, "Asia/Tokyo", 2),
    ]:
        folder = tmp_path / name
        package = Path(shutil.copytree(tmp_path / "code", folder / "code"))
        make_inputs(folder)
        for path in [*folder.rglob("*.*"), *(folder / "a checkpoint").iterdir()]:
            os.utime(path, (seed, seed))
            path.chmod(mode if path.is_file() else 0o755)
        other = {"PYTHONHASHSEED": str(seed), "TZ": zone, "HOME": str(folder), "PYTHONPATH": str(package)}
        done = subprocess.run(
            [sys.executable, "-B", "-c", code, str(Path(__file__).parent), str(umask)],
            cwd=folder,
            env=os.environ | other,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(done.stdout.strip())
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64


@pytest.mark.parametrize(
    "changes",
    [{"seed": 8}, {"stage": "other"}, {"spec": {"steps": 4, "lr": 0.003}}, {"secrets": ("HF_TOKEN",)}],
)
def test_digest_changes_with_job(
    changes: dict[str, object], inputs: dict[str, Path], tmp_path: Path, pristine: Path
) -> None:
    assert freeze(make_job(**changes), inputs, tmp_path / "b") != recorded_digest(pristine)


def test_digest_changes_with_input(job: Job, inputs: dict[str, Path], tmp_path: Path, pristine: Path) -> None:
    inputs["data"].write_text('{"messages": [1]}\n')
    assert freeze(job, inputs, tmp_path / "b") != recorded_digest(pristine)


def test_freeze_is_idempotent(job: Job, inputs: dict[str, Path], tmp_path: Path) -> None:
    first = freeze(job, inputs, tmp_path / "b")
    inode = (tmp_path / "b" / "job.json").stat().st_ino
    assert freeze(job, inputs, tmp_path / "b") == first
    assert (tmp_path / "b" / "job.json").stat().st_ino == inode


def test_freeze_does_not_overwrite_other_file_or_bundle(
    job: Job, inputs: dict[str, Path], tmp_path: Path
) -> None:
    freeze(job, inputs, tmp_path / "b")
    with pytest.raises(RequestError, match="another file or bundle"):
        freeze(make_job(seed=8), inputs, tmp_path / "b")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="another file or bundle"):
        freeze(job, inputs, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob(".*.tmp"))


def test_freeze_rejects_input_whose_digest_differs_from_job(
    job: Job, inputs: dict[str, Path], tmp_path: Path
) -> None:
    references = tuple(ref.model_copy(update={"digest": tree_digest(inputs[ref.name])}) for ref in job.inputs)
    promised = job.model_copy(update={"inputs": references})
    assert freeze(promised, inputs, tmp_path / "b") == freeze(job, inputs, tmp_path / "c")
    (inputs["checkpoint"] / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="not the one the job names"):
        freeze(promised, inputs, tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("restores", [False, True])
def test_freeze_copies_optimizer_only_for_stage_that_restores_optimizer(
    restores: bool, job: Job, inputs: dict[str, Path], tmp_path: Path
) -> None:
    (inputs["checkpoint"] / "optimizer").mkdir()
    (inputs["checkpoint"] / "optimizer" / "second_moments.safetensors").write_bytes(b"moments")
    spec = {**job.spec, "restore_optimizer": restores}
    freeze(job.model_copy(update={"spec": spec}), inputs, tmp_path / "b")
    staged = tmp_path / "b" / "inputs" / "checkpoint"
    assert (staged / "optimizer").exists() == restores and (staged / "config.json").exists()


def test_freeze_rejects_missing_and_unknown_inputs(job: Job, inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="differ in: data"):
        freeze(job, {"checkpoint": inputs["checkpoint"]}, tmp_path / "b")
    with pytest.raises(RequestError, match="differ in: dta"):
        freeze(job, inputs | {"dta": inputs["data"]}, tmp_path / "b")


@pytest.mark.parametrize(
    "path", ["inputs/../../x", "/etc/x", "inputs", "inputs/..", "scripts/x", "inputs/a/b"]
)
def test_input_reference_rejects_path_outside_inputs(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        InputReference(name="data", path=path, digest="", kind="dataset")


def test_freeze_rejects_missing_and_empty_inputs_on_disk(
    job: Job, inputs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for wrong, message in [(tmp_path / "absent", "no such input"), (tmp_path / "empty", "empty folder")]:
        with pytest.raises(RequestError, match=message):
            freeze(job, inputs | {"data": wrong}, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "sources"]


@pytest.mark.parametrize("large", [False, True])
def test_bundle_is_unchanged_by_later_edit_of_source(
    large: bool, job: Job, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(storage, "LINK_BYTES", 0)
    freeze(job, inputs, tmp_path / "b")
    with inputs["data"].open("a") as file:
        file.write("more\n")
    assert verify(tmp_path / "b") == []


def test_attempt_copy_hard_links_large_read_only_files(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LINK_BYTES", 1000)
    copy_for_attempt(bundle, tmp_path / "attempt")
    large, small = Path("inputs/checkpoint/model.safetensors"), Path("inputs/checkpoint/config.json")
    assert (tmp_path / "attempt" / large).samefile(bundle / large)
    assert not (tmp_path / "attempt" / small).samefile(bundle / small)


def test_copy_file_copies_writable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LINK_BYTES", 0)
    (tmp_path / "source").write_text("x")
    (tmp_path / "source").chmod(0o644)
    storage.copy_file(tmp_path / "source", tmp_path / "target", 0o644)
    assert not (tmp_path / "target").samefile(tmp_path / "source")


def test_freeze_follows_links_inside_input_and_rejects_links_outside(
    job: Job, inputs: dict[str, Path], tmp_path: Path
) -> None:
    (inputs["checkpoint"] / "link").symlink_to("config.json")
    freeze(job, inputs, tmp_path / "b")
    assert not (tmp_path / "b" / "inputs" / "checkpoint" / "link").is_symlink()
    (inputs["checkpoint"] / "out").symlink_to("/etc/passwd")
    with pytest.raises(RequestError, match="the link out points outside the input"):
        freeze(job, inputs, tmp_path / "c")


def test_source_files_follows_links_to_blobs_of_hugging_face_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "123").write_text("weights")
    revision = cache / "snapshots" / "abc"
    revision.mkdir(parents=True)
    (revision / "model.safetensors").symlink_to("../../blobs/123")
    assert source_files(revision) == [("model.safetensors", cache / "blobs" / "123")]
    (revision / "other").symlink_to("../../../../../etc/passwd")
    with pytest.raises(RequestError, match="points outside"):
        source_files(revision)


def test_freeze_rejects_special_file(job: Job, inputs: dict[str, Path], tmp_path: Path) -> None:
    os.mkfifo(inputs["checkpoint"] / "pipe")
    with pytest.raises(RequestError, match="pipe is not a plain file"):
        freeze(job, inputs, tmp_path / "b")


@pytest.mark.parametrize("value", ["canary-4711", 'qu"oted\\canary', "canarié-∂"])
def test_freeze_rejects_secret_in_job(
    value: str, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    job = make_job(secrets=("HF_TOKEN",), spec={"token": f"x{value}y"})
    with pytest.raises(RequestError, match=r"job\.json contains the value of the secret HF_TOKEN") as caught:
        freeze(job, inputs, tmp_path / "b")
    assert value not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sources"]


@pytest.mark.parametrize("offset", [0, (1 << 20) - 5, 3 << 20])
def test_freeze_rejects_secret_in_input(
    offset: int, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One offset places the secret across the boundary of two blocks that freeze reads."""
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    inputs["data"].write_bytes(b"." * offset + b"canary-4711" + b".")
    with pytest.raises(RequestError, match=r"inputs/data.* contains the value of the secret HF_TOKEN"):
        freeze(make_job(secrets=("HF_TOKEN",)), inputs, tmp_path / "b")


def test_freeze_rejects_secret_too_short_to_search_for(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN", "12")
    with pytest.raises(RequestError, match="too short"):
        freeze(make_job(secrets=("PIN",)), inputs, tmp_path / "b")


def test_freeze_searches_only_for_secrets_named_in_job(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNRELATED", "hidden_size")
    freeze(make_job(secrets=("NOT_SET",)), inputs, tmp_path / "b")


def test_attempt_copy_is_independent_of_bundle(pristine: Path, tmp_path: Path) -> None:
    copy_for_attempt(pristine, tmp_path / "attempts" / "1")
    attempt = tmp_path / "attempts" / "1"
    assert verify(attempt, recorded_digest(pristine)) == []
    (attempt / "artifacts" / "note").write_text("mine")
    assert verify(attempt) == []
    assert not list((pristine / "artifacts").iterdir())


def test_attempt_copy_rejects_damaged_bundle(bundle: Path, tmp_path: Path) -> None:
    damaged = bundle / "inputs" / "data"
    damaged.chmod(0o644)
    damaged.write_text("other")
    damaged.chmod(0o444)
    with pytest.raises(RequestError, match="inputs/data has changed"):
        copy_for_attempt(bundle, tmp_path / "attempt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_attempt_copy_rejects_existing_destination(pristine: Path, tmp_path: Path) -> None:
    copy_for_attempt(pristine, tmp_path / "1")
    with pytest.raises(RequestError, match="it exists already"):
        copy_for_attempt(pristine, tmp_path / "1")


def test_freeze_takes_less_than_3_cpu_seconds(job: Job, inputs: dict[str, Path], tmp_path: Path) -> None:
    start = time.process_time()
    freeze(job, inputs, tmp_path / "b")
    assert time.process_time() - start < 3  # about 0.15 CPU seconds are usual


@given(
    st.dictionaries(st.text("abc/é", min_size=1, max_size=5), st.binary(max_size=20), min_size=1, max_size=5)
)
def test_tree_digest_depends_only_on_names_and_contents(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    files = {name.replace("/", "_"): data for name, data in files.items()}
    folders = [tmp_path_factory.mktemp("tree") for _ in range(2)]
    for folder, names in zip(folders, (sorted(files), sorted(files, reverse=True)), strict=True):
        for name in names:
            (folder / name).write_bytes(files[name])
    (folders[1] / "empty folder").mkdir()
    assert tree_digest(folders[0]) == tree_digest(folders[1])
    name = min(files)
    (folders[1] / name).write_bytes(files[name] + b"!")
    assert tree_digest(folders[0]) != tree_digest(folders[1])
