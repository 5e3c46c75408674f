"""Secrets reach runs from external sources and appear in no file, archive, database or process list."""

import base64
import io
import json
import sqlite3
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from drill_cases import Command, begin, carry_out, drill_job, drill_plan
from sqlalchemy import select

from perilune.bundle.archive import pack
from perilune.bundle.freeze import freeze
from perilune.bundle.secret_sources import require_secret, secret_value
from perilune.control.evidence.verification import export, find_record_problem
from perilune.control.record.backup import back_up
from perilune.control.record.store import Run, record_event
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.progress import StageFailed, StageFinished
from perilune.errors import RequestError
from perilune.execution.hosts.local import LocalHost
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import RemotePlacement, Site

CANARY = "canary-7f3a91c4e5"
BACKEND = '''
import json, os
from pathlib import Path
from keyring.backend import KeyringBackend

class Keyring(KeyringBackend):
    """A keyring in a file, for tests."""
    priority = 1

    def _file(self):
        return Path(os.environ["DRILL_KEYRING"])

    def _all(self):
        return json.loads(self._file().read_text()) if self._file().exists() else {}

    def get_password(self, service, name):
        return self._all().get(f"{service}/{name}")

    def set_password(self, service, name, value):
        self._file().write_text(json.dumps(self._all() | {f"{service}/{name}": value}))
'''


@pytest.fixture
def keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import keyring as package

    (tmp_path / "drill_keyring.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "drill_keyring.Keyring")
    monkeypatch.setenv("DRILL_KEYRING", str(tmp_path / "keyring.json"))
    before = package.get_keyring()
    from keyring.core import load_keyring

    package.set_keyring(load_keyring("drill_keyring.Keyring"))
    yield tmp_path / "keyring.json"
    package.set_keyring(before)


def places_of(needle: str, root: Path) -> list[str]:
    """Files below `root` that contain `needle`, also inside compressed archives and database rows."""
    found = []
    for path in (path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".gz":
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                data = b"".join(tar.extractfile(member).read() for member in tar if member.isfile())  # type: ignore[union-attr]
        if path.suffix == ".db":
            with sqlite3.connect(path) as connection:
                data += "\n".join(connection.iterdump()).encode()
        if needle.encode() in data:
            found.append(str(path.relative_to(root)))
    return found


def command_lines() -> str:
    return "\n".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def test_secret_reaches_task_and_appears_in_no_file_or_process_list(
    control: Control, perilune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    kept = tmp_path / "kept"
    kept.write_text(f"{CANARY}\n")
    assert perilune("secrets", "set", "JUDGE_KEY", "--file", str(kept))[0] == 0
    plan = StagePlan("one", drill_job("one", secrets=("JUDGE_KEY",), steps=2, tell="JUDGE_KEY"))
    seen, last = "", None
    for event in advance(control, begin(control, [plan]), [plan], poll=0.02):
        seen, last = seen + command_lines(), event
    assert isinstance(last, StageFinished)
    run = control.run(last.run_id)
    log = (control.directory(run) / "artifacts" / "task.log").read_text()
    assert "the secret is [JUDGE_KEY]." in log  # the secret was printed and redacted
    pack(control.directory(run), control.home.root / "packed.tar.gz")
    export(control, run, control.home.root / "exported", crate=True)
    back_up(control.store, control.home, control.home.root / "backup", evidence=True)
    printed = "".join(
        perilune(*words)[1] for words in (("show", "one", "--json"), ("events",), ("secrets", "list"))
    )
    assert CANARY not in seen + printed
    assert places_of(CANARY, control.home.root) == []
    (control.home.root / "leak.db").unlink(missing_ok=True)
    with tarfile.open(control.home.root / "leak.tar.gz", "w:gz") as tar:
        tar.add(kept)
    assert places_of(CANARY, control.home.root) == ["leak.tar.gz"]  # places_of does find secrets


EARLY = """
import os
if key := os.environ.get("JUDGE_KEY"):
    os.write(2, f"no environment: {key}, {key.encode().hex()}".encode())
    os._exit(1)
"""
FORMS = tuple(
    form.decode() if isinstance(form, bytes) else form
    for form in (
        CANARY,
        CANARY[::-1],
        CANARY.encode().hex(),
        CANARY.encode().hex().upper(),
        *(base64.b64encode(b"x" * start + CANARY.encode())[start + 1 : -5] for start in range(3)),
    )
)


@pytest.mark.parametrize("where", ["here", "elsewhere", "elsewhere, before there is a worker"])
def test_secret_printed_and_raised_by_task_is_redacted_everywhere(
    control: Control,
    perilune: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    job = drill_job("one", secrets=("JUDGE_KEY",), tell="JUDGE_KEY", fail_at=0, how="leak")
    plan = StagePlan("one", job)
    if where != "here":
        site = Site(python=sys.executable, installed=True, workspace=str(tmp_path / "there"))
        if "before" in where:
            (tmp_path / "early").mkdir()
            (tmp_path / "early" / "sitecustomize.py").write_text(EARLY)
            site = site.with_environment({"PYTHONPATH": str(tmp_path / "early")})
        other = RemotePlacement(LocalHost(), site, AttemptLimits())
        monkeypatch.setattr(control.reconciler.placements, "local", other)
    monkeypatch.setattr(control.reconciler.placements, "policy", RetryPolicy(infrastructure=0))
    *_, last = advance(control, begin(control, [plan]), [plan], poll=0.02)
    assert isinstance(last, StageFailed) and "[JUDGE_KEY]" in last.message
    back_up(control.store, control.home, control.home.root / "backup", evidence=True)
    printed = repr(last)
    for words in (
        ("show", "one"), ("show", "one", "--json"), ("explain", "one"), ("events",), ("logs", "one"),
        ("runs",), ("report", "one", "--out", str(control.home.root / "report.html")),
    ):  # fmt: skip
        code, out, err = perilune(*words)
        printed += out + err
        assert code in {0, 1}, (words, err)
    for form in FORMS:
        assert form not in printed
        assert places_of(form, tmp_path) == []


def test_secret_printed_and_raised_by_command_is_redacted(
    control: Control, perilune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", CANARY)

    def fail(*_: object) -> None:
        require_secret("JUDGE_KEY", "")
        print(f"using {CANARY}")
        raise KeyError(f"refused: {CANARY}") from OSError(CANARY)

    monkeypatch.setattr("perilune.control.queries.lookup.find_run", fail)
    for options in ((), ("--debug",)):
        code, out, err = perilune("show", "one", *options)
        assert code == 1 and "using [JUDGE_KEY]" in out and "refused: [JUDGE_KEY]" in err
        assert CANARY not in out + err
    assert list(tmp_path.glob("perilune-*.txt")) and places_of(CANARY, tmp_path) == []


def test_secret_is_redacted_in_database(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    assert secret_value("JUDGE_KEY") == CANARY
    carry_out(control, drill_plan("one", steps=1))
    with control.store.transaction() as session:
        run = session.scalars(select(Run)).one()
        run.message = f"provider says {CANARY}"
        record_event(
            session, "machine.not_created", run_id=run.id, refused=f"bad token {CANARY.encode().hex()}"
        )
    control.store.close()
    database = control.home.database.read_bytes()
    assert b"[JUDGE_KEY]" in database and CANARY.encode() not in database
    assert CANARY.encode().hex().encode() not in database
    assert find_record_problem(control) == ""


def test_freeze_refuses_job_with_secret_value(control: Control, tmp_path: Path, perilune: Command) -> None:
    kept = tmp_path / "kept"
    kept.write_text(CANARY)
    assert perilune("secrets", "set", "JUDGE_KEY", "--file", str(kept))[0] == 0
    with pytest.raises(RequestError, match="contains the value of the secret JUDGE_KEY"):
        freeze(drill_job(secrets=("JUDGE_KEY",), say=f"key {CANARY}"), {}, tmp_path / "bundle")


def test_secrets_commands_and_sources(
    control: Control, perilune: Command, keyring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no secrets are configured" in perilune("secrets", "list")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{CANARY}\n"))
    assert perilune("secrets", "set", "JUDGE_KEY", "--keyring")[0] == 0
    assert json.loads(keyring.read_text()) == {"perilune/JUDGE_KEY": CANARY}
    assert secret_value("JUDGE_KEY") == CANARY
    monkeypatch.setenv("OTHER", "from-elsewhere")
    assert perilune("secrets", "set", "SECOND", "--environment", "OTHER")[0] == 0
    assert perilune("secrets", "set", "THIRD", "--file", str(tmp_path / "missing"))[0] == 0
    assert require_secret("SECOND", "") == "from-elsewhere"
    monkeypatch.setenv("SECOND", "for once")
    assert secret_value("SECOND") == "for once"
    code, out, _ = perilune("secrets", "list")
    assert code == 0 and CANARY not in out and "from-elsewhere" not in out
    assert "JUDGE_KEY  keyring perilune  set" in out and "THIRD" in out and "cannot be read" in out
    assert [secret["set"] for secret in json.loads(perilune("secrets", "list", "--json")[1])["secrets"]] == [
        True,
        True,
        False,
    ]
    assert perilune("secrets", "forget", "THIRD")[0] == 0
    assert perilune("secrets", "forget", "THIRD")[0] == 2
    assert perilune("secrets", "set", "X")[0] == 2
    assert perilune("secrets", "set", "X", "--keyring", "--file", "y")[0] == 2
    assert perilune("secrets", "set", "not-a-name", "--environment", "Y")[0] == 2
    with pytest.raises(RequestError, match="the secret NOWHERE, which the run needs, is not set here"):
        require_secret("NOWHERE", "stage one")


def test_error_about_invalid_source_hides_the_value(control: Control) -> None:
    (control.home.root / "secrets.yaml").write_text(f"JUDGE_KEY: {CANARY}\n")
    with pytest.raises(RequestError, match="is not a valid list of secret sources: JUDGE_KEY") as found:
        secret_value("JUDGE_KEY")
    assert CANARY not in str(found.value)
