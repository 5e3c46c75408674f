"""The artifact store: push sends each file once, pull checks every file and works without the home."""

import json
import os
import shlex
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from drill_cases import Command, carry_out, drill_plan

from perilune.bundle.attested import Evidence, attestation_problems
from perilune.bundle.envelope import PUBLIC
from perilune.control.evidence.artifact_store import BLOCK_BYTES, URL_VARIABLE, ArtifactStore
from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError, WorkFailedError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setenv(URL_VARIABLE, str(tmp_path / "share"))
    return ArtifactStore(str(tmp_path / "share"))


def test_push_sends_each_file_once_and_pull_restores_run(
    control: Control, perilune: Command, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(control, drill_plan("one", steps=1), drill_plan("two", steps=2))
    assert perilune("artifacts", "list")[1] == "no runs yet\n"
    sent = json.loads(perilune("artifacts", "push", "--json")[1])["sent"]
    assert len(sent) == 2 and all(sent.values())
    first, second = sent.values()
    assert second < first  # they share the wheel and more
    assert perilune("artifacts", "push")[1] == "the store has every succeeded run\n"
    again = json.loads(perilune("artifacts", "push", "one", "--json")[1])["sent"]
    assert list(again.values()) == [0]
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "elsewhere"))  # a home without these runs
    run = min(sent)
    code, out, _ = perilune("artifacts", "pull", run[:20].lower(), "--out", str(tmp_path / "it's back"))
    printed = shlex.split(out.partition("next: ")[2])
    assert (code, printed) == (0, ["perilune", "verify", str(tmp_path / "it's back")])
    assert perilune(*printed[1:], "--key", str(control.home.keys / PUBLIC))[0] == 0
    assert perilune("artifacts", "pull", run, "--out", str(tmp_path / "it's back"))[0] == 2
    assert perilune("artifacts", "pull", "0", "--out", str(tmp_path / "more"))[0] == 2
    monkeypatch.delenv(URL_VARIABLE)
    assert perilune("artifacts", "list")[0] == 2


def test_ctrl_c_stops_transfers_in_progress(store: ArtifactStore, tmp_path: Path) -> None:
    fifo, began = tmp_path / "slow", Event()
    os.mkfifo(fifo)

    def feed() -> None:
        with suppress(BrokenPipeError), fifo.open("wb") as out:
            for _ in range(200):
                out.write(bytes(BLOCK_BYTES))
                began.set()
                time.sleep(0.02)

    def work(name: str) -> int:
        if name == "slow":
            return store._upload(fifo, {"sha256": "0" * 64, "size": 200 * BLOCK_BYTES})
        assert began.wait(60)
        raise KeyboardInterrupt

    feeder = Thread(target=feed)
    feeder.start()
    with pytest.raises(KeyboardInterrupt):
        list(store._transfer_each(work, ["now", "slow"]))
    assert not [path for path in (tmp_path / "share").rglob("*") if path.is_file()]
    feeder.join()


def test_interrupted_push_resumes_and_pull_names_damaged_file(
    control: Control, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = carry_out(control, drill_plan("one", steps=1))[-1]
    run = control.run(last.run_id)
    put, calls = store._upload, []

    def cut(source: Path, file: dict[str, object]) -> int:
        calls.append(source)
        if len(calls) == 5:
            raise OSError("the line is cut")
        return put(source, file)

    monkeypatch.setattr(store, "_upload", cut)
    with pytest.raises(WorkFailedError, match="the line is cut"):
        store.push(control, run)
    assert store.runs() == []  # listed only when complete
    assert not list((tmp_path / "share").rglob("*.tmp"))
    monkeypatch.setattr(store, "_upload", put)
    total = sum(path.stat().st_size for path in control.directory(run).rglob("*") if path.is_file())
    assert 0 < store.push(control, run) < total
    store.pull(control.home, run.id, tmp_path / "back")
    assert (
        list(attestation_problems(Evidence.from_export(tmp_path / "back", control.home.keys / PUBLIC))) == []
    )
    index = json.loads((tmp_path / "share" / "runs" / f"{run.id}.json").read_bytes())
    digest = index["files"]["bundle/artifacts/data/total.json"]["sha256"]
    damaged = tmp_path / "share" / "sha256" / digest[:2] / digest
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    with pytest.raises(WorkFailedError, match=r"content of total\.json is damaged"):
        store.pull(control.home, run.id, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a//b", "a/./b", "a\\b"])
def test_pull_refuses_unsafe_paths(store: ArtifactStore, tmp_path: Path, path: str) -> None:
    (tmp_path / "share" / "runs").mkdir(parents=True)
    entry = {"sha256": "0" * 64, "size": 0, "mode": "0644"}
    (tmp_path / "share" / "runs" / "RUN.json").write_text(json.dumps({"files": {path: entry}}))
    with pytest.raises(WorkFailedError, match="is damaged"):
        store.pull(Home.open(tmp_path), "RUN", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"size": "5"}, {"size": 5.0}, {"size": True}, {"sha256": 5}, {"sha256": "A" * 64}, {"mode": 420}, [], 5],
)
def test_pull_refuses_malformed_file_list(store: ArtifactStore, tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "share" / "runs").mkdir(parents=True)
    entry = {"sha256": "0" * 64, "size": 0, "mode": "0644"}
    files = {"job.json": entry | wrong if isinstance(wrong, dict) else wrong}
    for document in ({"files": files}, {"files": [files]}, [files], "files"):
        (tmp_path / "share" / "runs" / "RUN.json").write_text(json.dumps(document))
        with pytest.raises(WorkFailedError, match=r"(?s)RUN.json.*is damaged.*artifacts push RUN"):
            store.pull(Home.open(tmp_path), "RUN", tmp_path / "back")


def test_unknown_store_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened"):
        ArtifactStore("nosuch://bucket")
