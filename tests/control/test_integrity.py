"""Signed statements: verify names every later change, in the home and in an export."""

import base64
import json
import os
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from drill_cases import Command, carry_out, drill_plan

from perilune.bundle.attested import REMOVED, Evidence, attestation_problems
from perilune.bundle.envelope import PUBLIC, SignatureError, SigningKey, verify_statement
from perilune.bundle.statements import removal_statement
from perilune.control.evidence.verification import VERIFIED_FILE, export, find_record_problem
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import read_json


@pytest.fixture
def exported(control: Control, tmp_path: Path) -> Path:
    (event, *_) = carry_out(control, drill_plan("one", steps=1))
    export(control, control.run(event.run_id), tmp_path / "handed", crate=True)
    return tmp_path / "handed"


def problems(folder: Path, key: Path | None = None) -> list[str]:
    return list(attestation_problems(Evidence.from_export(folder, key or folder / PUBLIC)))


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def test_export_verifies_and_every_changed_file_is_named(exported: Path, tmp_path: Path) -> None:
    assert problems(exported) == []

    def changed(name: str, data: bytes) -> list[str]:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(exported, copy)
        mode = (copy / name).stat().st_mode
        rewrite(copy / name, data)
        (copy / name).chmod(mode)
        return problems(copy)

    assert any("job.json" in problem for problem in changed("bundle/job.json", b"{}"))
    total = "artifacts/data/total.json"
    assert f"{total} is not what was attested" in changed(f"bundle/{total}", b'{\n  "total": 9\n}\n')
    manifest = "bundle/artifacts/manifest.json"
    rewritten = (exported / manifest).read_bytes().replace(b'"sha256":"', b'"sha256":"0', 1)
    assert "artifacts/manifest.json is not what was attested" in changed(manifest, rewritten)
    verdict = (exported / "bundle/runtime/result.json").read_bytes().replace(b'"seconds": ', b'"seconds": 9')
    assert changed("bundle/runtime/result.json", verdict) == ["runtime/result.json is not what was attested"]
    runtime = sorted(path.name for path in (exported / "bundle" / "runtime").iterdir())
    watched = {"claim.json", "heartbeat.json", "progress.json", "run.json", "runtime.log", "result.json"}
    assert watched <= set(runtime)
    for name in watched:
        assert f"runtime/{name} is not what was attested" in changed(f"bundle/runtime/{name}", b"{}")
    for name in ("runtime/claim.json", total, "artifacts/manifest.json"):
        copy = tmp_path / "copy"
        shutil.rmtree(copy)
        shutil.copytree(exported, copy)
        (copy / "bundle" / name).chmod(0o755)
        assert problems(copy) == [f"{name} has another mode: 0755"]
        (copy / "bundle" / name).unlink()
        (copy / "bundle" / name).symlink_to(exported / "bundle" / name)
        assert any(name in problem for problem in problems(copy))
    (tmp_path / "copy" / "bundle" / "runtime" / "claim.json").unlink()
    (tmp_path / "copy" / "bundle" / "runtime" / "extra").touch()
    found = problems(tmp_path / "copy")
    assert "runtime/extra was not there when the result was attested" in found
    assert "runtime/claim.json is not what was attested" in found
    for name in ("bundle.json", "result.json"):
        envelope = json.loads((exported / "attestations" / name).read_bytes())
        payload = base64.b64decode(envelope["payload"])
        envelope["payload"] = base64.b64encode(payload.replace(b'"run":"0', b'"run":"1')).decode()
        envelope["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
        (found,) = changed(f"attestations/{name}", json.dumps(envelope).encode())
        assert found == f"{name} is not signed with this key, or was changed"
        for damage in (b"", b"[]", b"{}", b'{"payload": 1}', b"[" * 100_000):
            assert f"{name} is not an envelope" in changed(f"attestations/{name}", damage)
    swapped = (exported / "attestations" / "bundle.json").read_bytes()
    assert any("attests something else" in line for line in changed("attestations/result.json", swapped))


def test_statements_of_another_run_or_attempt_are_rejected(
    control: Control, exported: Path, tmp_path: Path
) -> None:
    (event, *_) = carry_out(control, drill_plan("two", steps=2))
    other = tmp_path / "other"
    export(control, control.run(event.run_id), other)
    shutil.copytree(exported, mixed := tmp_path / "mixed")  # one run's bundle, another run's results
    for part in ("artifacts", "runtime"):
        shutil.rmtree(mixed / "bundle" / part)
        shutil.copytree(other / "bundle" / part, mixed / "bundle" / part)
    shutil.copy(other / "attestations" / "result.json", mixed / "attestations")
    assert problems(mixed) == [f"result.json is about another run ({event.run_id})"]

    total = "artifacts/data/total.json"
    for run, number in ((event.run_id, 1), (read_json(exported / "bundle/runtime/run.json")["run"], 2)):
        signed = SigningKey(control.home.keys).sign(removal_statement({total: "0" * 64}, run, number, 0.0))
        (exported / "bundle" / REMOVED).write_bytes(signed)
        (exported / "bundle" / total).unlink(missing_ok=True)
        about = f"{REMOVED} is about another attempt ({run}/{number})"
        assert problems(exported) == [about, f"{total} is missing", f"{total} is not what was attested"]


@pytest.mark.parametrize("name", ["bundle.json", "result.json"])
def test_signed_statement_without_required_fields_is_named(
    control: Control, exported: Path, name: str
) -> None:
    path = exported / "attestations" / name
    whole = verify_statement(path, exported / PUBLIC)
    for statement in (
        whole | {"predicate": {}},
        whole | {"predicate": 1},
        whole | {"subject": [{}], "predicate": {}},
    ):
        path.write_bytes(SigningKey(control.home.keys).sign(statement))
        assert problems(exported) == [f"{name} lacks fields of such a statement"]


def test_export_signed_again_with_another_key_is_rejected(exported: Path, tmp_path: Path) -> None:
    stranger = SigningKey(tmp_path / "stranger")
    for path in (exported / "attestations").iterdir():
        path.write_bytes(stranger.sign(verify_statement(path, exported / PUBLIC)))
    trusted = tmp_path / "trusted.pub"
    shutil.copy(exported / PUBLIC, trusted)
    shutil.copy(stranger.public, exported / PUBLIC)
    assert problems(exported) == []  # consistent in itself
    assert problems(exported, trusted) == [
        f"{name} is not signed with this key, or was changed" for name in ("bundle.json", "result.json")
    ]


def test_openssl_verifies_the_signature(exported: Path, tmp_path: Path) -> None:
    envelope = json.loads((exported / "attestations" / "result.json").read_bytes())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    (tmp_path / "signed").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(exported / PUBLIC), "-rawin"]
    command += ["-in", str(tmp_path / "signed"), "-sigfile", str(tmp_path / "signature")]
    assert b"Verified Successfully" in subprocess.run(command, capture_output=True, check=True).stdout


def test_ro_crate_lists_every_file_with_inputs_and_outputs(exported: Path) -> None:
    from rocrate.rocrate import ROCrate

    crate = ROCrate(exported)
    files = {entity.id for entity in crate.get_entities() if entity.type == "File"}
    there = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert files == there - {"ro-crate-metadata.json"}
    (action,) = (entity for entity in crate.get_entities() if entity.type == "CreateAction")
    assert {file.id for file in action["object"]} >= {"bundle/job.json"}
    assert {file.id for file in action["result"]} >= {"bundle/artifacts/data/total.json"}
    assert crate.root_dataset["mentions"].id == action.id


def test_verify_and_export_commands(perilune: Command, control: Control, tmp_path: Path) -> None:
    carry_out(control, drill_plan("one", steps=1), drill_plan("two", steps=2))
    code, out, _ = perilune("verify")
    assert code == 0 and out == "verified: the recorded events and 2 ended runs\n"
    code, out, _ = perilune("export", "two", "--out", str(tmp_path / "its out"), "--ro-crate")
    assert code == 0
    printed = shlex.split(out.partition("next: ")[2])
    assert printed == ["perilune", "verify", str(tmp_path / "its out")]
    assert perilune(*printed[1:])[0] == 0
    assert perilune("verify", str(tmp_path / "its out"), "--key", str(control.home.keys / PUBLIC))[0] == 0
    assert perilune("export", "two", "--out", str(tmp_path / "its out"))[0] == 2
    run = json.loads(perilune("show", "two", "--json")[1])["run"]
    rewrite(control.home.attempt(run, 1) / "artifacts" / "data" / "total.json", b"{}")
    code, out, _ = perilune("verify", "--json")
    report = json.loads(out)
    assert code == 1 and not report["whole"] and list(report["problems"]) == [f"two ({run})"]
    assert perilune("verify", "one")[0] == 0
    code, out, _ = perilune("verify", "two")
    assert code == 1 and "artifacts/data/total.json is not what was attested" in out
    assert perilune("export", "two", "--out", str(tmp_path / "more"))[0] == 2
    assert perilune("verify", "one", "--key", str(control.home.keys / PUBLIC))[0] == 2
    assert (control.home.keys / "controller.key").stat().st_mode & 0o777 == 0o600


def test_changed_event_is_named(control: Control) -> None:
    carry_out(control, drill_plan("one", steps=1))
    assert find_record_problem(control) == ""
    with control.store.engine.connect() as connection:
        connection.exec_driver_sql("DROP TRIGGER events_no_update")
        connection.exec_driver_sql("UPDATE events SET detail = '{}' WHERE seq = 3")
        connection.commit()
    assert find_record_problem(control) == "the hash of event 3 does not match the event before it"


def test_incremental_check_starts_at_last_verified_event(control: Control, perilune: Command) -> None:
    carry_out(control, drill_plan("one", steps=1))
    assert perilune("reconcile")[0] == 0
    last = read_json(control.home.root / VERIFIED_FILE)["seq"]

    def change(seq: int) -> None:
        with control.store.engine.connect() as connection:
            connection.exec_driver_sql("DROP TRIGGER IF EXISTS events_no_update")
            connection.exec_driver_sql(f"UPDATE events SET hash = 'x' || hash WHERE seq = {seq}")
            connection.commit()

    change(3)  # before the last check: only a full check finds it
    assert find_record_problem(control, since_last=True) == ""
    assert perilune("verify")[0] == 1 and find_record_problem(control, since_last=True).startswith(
        "the hash of event 3 "
    )
    with control.store.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE events SET hash = substr(hash, 2) WHERE seq = 3")
        connection.commit()
    assert perilune("reconcile")[0] == 0
    change(last)  # where the last check ended
    assert find_record_problem(control, since_last=True).startswith(f"the hash of event {last} ")
    code, _, err = perilune("reconcile")
    assert code == 2 and f"event {last} " in err


def test_concurrent_key_creation_keeps_one_key(tmp_path: Path) -> None:
    made: list[SigningKey] = []
    threads = [threading.Thread(target=lambda: made.append(SigningKey(tmp_path / "keys"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, key in enumerate(made):
        path = tmp_path / f"{number}.json"
        path.write_bytes(key.sign({"_type": "https://in-toto.io/Statement/v1"}))
        assert verify_statement(path, made[0].public)
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["controller.key", "controller.pub"]


def test_invalid_keys_and_statements_are_refused(tmp_path: Path) -> None:
    (tmp_path / "controller.key").write_text("no key")
    with pytest.raises(RequestError, match="holds no Ed25519 key"):
        SigningKey(tmp_path)
    key = SigningKey(tmp_path / "good")
    (tmp_path / "signed").write_bytes(key.sign({"_type": "something else"}))
    with pytest.raises(SignatureError, match="holds no in-toto statement"):
        verify_statement(tmp_path / "signed", key.public)
    with pytest.raises(RequestError, match="not an Ed25519 public key"):
        verify_statement(tmp_path / "signed", tmp_path / "controller.key")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SignatureError, match="not a regular file"):
        verify_statement(tmp_path / "pipe", key.public)
