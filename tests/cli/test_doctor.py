"""`perilune doctor`: findings about the machine, install commands, and measured rollout speed."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from perilune.bundle.machine import Gpu, Machine, observe_machine
from perilune.cli.start.doctor import Diagnosis, SamplingSpeed, _threads, diagnose, show
from perilune.errors import WorkFailedError
from perilune.execution import readiness
from perilune.execution.readiness import Finding, check_home, check_machine

GIB = 2**30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return observe_machine()


def doctor(*options: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perilune.cli.main", "doctor", *options]
    environment = {**os.environ, "PERILUNE_HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def finding(findings, name: str) -> Finding:
    return next(entry for entry in findings if entry.name == name)


def test_doctor_json_is_one_document_about_this_machine(home):
    done = doctor("--quick", "--json", home=home)
    document = json.loads(done.stdout)
    assert (done.returncode, document["usable"], document["rollouts"]) == (0, True, [])
    assert document["machine"]["memory"]["total"] == psutil.virtual_memory().total
    assert document["packages"]["torch"] == metadata.version("torch")
    assert {"packages", "memory", "disk", "GPU", "Chromium", "sshd"} <= {
        f["name"] for f in document["findings"]
    }


def test_doctor_exits_with_1_for_unusable_home(tmp_path):
    (tmp_path / "file").touch()
    done = doctor("--quick", home=tmp_path / "file" / "home")
    assert done.returncode == 1
    assert "missing" in done.stdout
    assert "set PERILUNE_HOME to a writable directory; to see these runs, to a copy" in done.stdout
    assert "not ready" in done.stdout


def test_diagnose_measures_rollouts_within_the_time_limit(home):
    start = time.monotonic()
    diagnosis = diagnose(0.6)
    assert diagnosis.usable
    assert {speed.threads for speed in diagnosis.rollouts if speed.device == "cpu"} >= {1}
    for speed in diagnosis.rollouts:
        assert speed.tokens_per_second == pytest.approx(speed.tokens / speed.seconds)
        assert speed.tokens % 256 == 0
        assert speed.tokens > 0
    speeds = [speed.tokens_per_second for speed in diagnosis.rollouts]
    assert speeds == sorted(speeds, reverse=True)
    assert time.monotonic() - start < 60  # without the limit a round takes minutes on busy cores


def test_examine_reports_absent_and_outdated_packages(machine, monkeypatch):
    wants = ["numpy<1", "no-such-package>=2", "psutil", 'other; extra == "dev"', 'old; python_version < "3"']
    monkeypatch.setattr(metadata, "requires", lambda name: wants)
    findings = list(check_machine(machine))
    assert finding(findings, "numpy").status == "missing"
    assert "needs <1" in finding(findings, "numpy").found
    assert finding(findings, "numpy").remedy.endswith("-m pip install 'numpy<1'")
    assert finding(findings, "no-such-package").found == "absent"
    assert finding(findings, "extra dev").found.startswith("absent: other; needed only to")
    assert finding(findings, "extra dev").status == "advice"
    assert not [entry for entry in findings if entry.name in ("psutil", "packages", "old", "other")]


def test_diagnose_names_missing_psutil(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(WorkFailedError, match="psutil is not installed"):
        diagnose(0)


def test_diagnose_reports_unimportable_torch_as_missing(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    diagnosis = diagnose(0.1)
    assert not diagnosis.usable
    assert finding(diagnosis.findings, "torch").status == "missing"
    assert diagnosis.rollouts == ()


def test_examine_suggests_install_commands_for_absent_programs(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    findings = list(check_machine(machine))
    assert finding(findings, "git").remedy == "sudo apt-get install git"
    assert finding(findings, "sshd").remedy == "sudo apt-get install openssh-server"
    assert finding(findings, "Chromium").remedy.endswith("-m playwright install --with-deps chromium")
    assert all(entry.status != "missing" for entry in findings)

    (tmp_path / "chromium-1200").mkdir()
    assert finding(check_machine(machine), "Chromium").found == str(tmp_path / "chromium-1200")


def test_examine_checks_torch_build_and_triton_for_gpu(machine, monkeypatch):
    gpus = (Gpu("NVIDIA H200", 141 * GIB, "570.1", "9.0"),)
    monkeypatch.setattr(readiness, "_torch_build", lambda: {"cuda": None})
    gpu = finding(check_machine(replace(machine, gpus=gpus)), "GPU")
    assert gpu.status == "advice"
    assert "torch<2.14,>=2.6" in gpu.remedy
    monkeypatch.setattr(readiness, "_torch_build", lambda: {"cuda": "12.8"})
    monkeypatch.setattr(readiness, "_version", lambda name: "3.7.1")
    assert finding(check_machine(replace(machine, gpus=gpus)), "GPU").status == "ok"
    monkeypatch.setattr(readiness, "_version", lambda name: None if name == "triton" else "1")
    gpu = finding(check_machine(replace(machine, gpus=gpus)), "GPU")
    assert gpu.status == "missing" and "Triton" in gpu.found and "perilune[gpu]" in gpu.remedy


def test_torch_build_matches_torch_version():
    torch = pytest.importorskip("torch")
    assert readiness._torch_build()["cuda"] == torch.version.cuda
    assert readiness._torch_build()["__version__"] == torch.__version__


def test_examine_reports_too_little_memory_and_processor(machine):
    small = replace(
        machine,
        memory=replace(machine.memory, usable=GIB // 2, total=GIB),
        processor=replace(machine.processor, usable_cores=0.5, simd=("sse4_2",), architecture="x86_64"),
    )
    findings = list(check_machine(small))
    assert finding(findings, "memory").status == "missing"
    assert "allowed by the control group" in finding(findings, "memory").found
    assert finding(findings, "SIMD").status == "advice"
    assert finding(findings, "processor").status == "advice"


@pytest.mark.parametrize(("free", "status"), [(GIB // 10, "missing"), (GIB, "advice"), (9 * GIB, "ok")])
def test_examine_home_grades_free_disk_space(tmp_path, monkeypatch, free, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert finding(check_home(tmp_path), "disk").status == status


def test_examine_home_reports_network_file_system(tmp_path, monkeypatch):
    root = SimpleNamespace(mountpoint="/", fstype="ext4")
    nfs = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    inside = tmp_path / "home"
    inside.mkdir()
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [root, nfs])
    assert "(nfs4)" in finding(check_home(inside), "file system").found
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [root])
    assert [entry.name for entry in check_home(inside)] == ["disk"]


def test_threads_finding_reports_slowdown_on_more_threads():
    one, two = SamplingSpeed("cpu", 1, 40000.0, 1, 1.0), SamplingSpeed("cpu", 2, 10000.0, 1, 1.0)
    assert "4.0 times slower on 2 threads" in next(_threads([one, two])).found
    assert not list(_threads([one, replace(two, tokens_per_second=60000.0)]))
    assert not list(_threads([one]))


def test_show_keeps_commands_on_one_line_and_escapes_markup():
    command = "python -m pip install --isolated --force-reinstall 'torch<2.14,>=2.6'"
    findings = (Finding("GPU", "advice", "a [bold]device[/bold]", command),)
    output = io.StringIO()
    show(Diagnosis(True, {}, {}, findings, ()), Console(file=output, width=40))
    assert command in output.getvalue()
    assert "[bold]" in output.getvalue()
