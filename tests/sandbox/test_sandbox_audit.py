"""The sandbox audit: it finds no breach on this machine, and every probe detects a missing wall."""

import ctypes
import importlib
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bare_run import bare_run

import perilune
from perilune.sandbox import SandboxLimits
from perilune.sandbox.audit import (
    AUDIT_LIMITS,
    PROBES,
    SCORER_PROBES,
    Probe,
    SandboxAudit,
    audit_sandbox,
    run_probe,
)
from perilune.sandbox.baits import Baits
from perilune.sandbox.confined_run import run_confined
from perilune.sandbox.mechanisms import WALLS, Mechanisms
from perilune.sandbox.probes import read
from perilune.sandbox.sandbox import Capabilities

pytestmark = pytest.mark.usefixtures("walls")
NOBODY = 1 << 22  # a process without descendants: there can be none of that number
ALL = Mechanisms(True, True, True, True, landlock=7, seccomp=True, control_group=2)
QUICK = [item for item in PROBES if item.wall not in ("time", "output")]  # no mechanism enforces these walls
NOTHING = Capabilities(ALL, dict.fromkeys(WALLS, ("pretended",)), {})
TESTED_SEPARATELY = {
    "read run before",
    "escape privileges",
    "escape kernel",
    "escape daemon",
    "exhaust output",
}  # other tests cover these
if os.geteuid():
    TESTED_SEPARATELY.add("write devices")  # needs root even without a sandbox


def describe_findings(audit):
    return [f"{finding.probe}: {finding.verdict}: {dict(finding.reached)}" for finding in audit.findings]


def test_audit_finds_no_breach_on_this_machine():
    audit = audit_sandbox()
    assert not audit.breached, describe_findings(audit)
    in_a_scorer = [f"scorer: {probe.name}" for probe in PROBES if probe.function in SCORER_PROBES]
    assert [finding.probe for finding in audit.findings] == [probe.name for probe in PROBES] + in_a_scorer
    if os.environ.get("CI"):
        assert not audit.capabilities.missing, audit.capabilities.reasons
    assert json.loads(json.dumps(audit.document()))["walls"].keys() == WALLS.keys()


@pytest.mark.parametrize("without", [["namespaces"], ["own_user"], ["landlock"]])
def test_audit_finds_no_breach_without_one_mechanism(without):
    audit = audit_sandbox(without=without, probes=QUICK)
    assert not audit.breached, describe_findings(audit)
    missing = {"names"} if "namespaces" in without else set()
    assert set(audit.capabilities.missing) == missing
    assert {row.wall for row in audit.findings if row.verdict != "contained"} == missing


def test_audit_without_seccomp_finds_open_kernel_and_sockets():
    audit = audit_sandbox(without=["seccomp"], probes=QUICK)
    assert {row.wall for row in audit.findings if row.verdict != "contained"} == {"kernel", "sockets"}
    assert not audit.breached


@pytest.fixture(scope="module")
def baits():
    with Baits() as laid_out:
        yield laid_out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "probe", [probe for probe in PROBES if probe.name not in TESTED_SEPARATELY], ids=lambda probe: probe.name
)
def test_probe_succeeds_without_sandbox(probe, baits):
    finding = run_probe(probe, bare_run, baits, NOBODY, NOTHING)
    assert finding.verdict in ("open", "partly"), finding.refused
    assert not finding.untried


def test_daemon_probe_finds_surviving_daemon(baits):
    (probe,) = (probe for probe in PROBES if probe.name == "escape daemon")
    adopt = ctypes.CDLL(None).prctl
    adopt(36, 1, 0, 0, 0)  # become the parent of orphans, as the supervisor does
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # started by earlier tests
    try:
        finding = run_probe(probe, bare_run, baits, os.getpid(), NOTHING)
    finally:
        adopt(36, 0, 0, 0, 0)
    orphans = set(map(int, re.findall("[0-9]+", " ".join(finding.reached.values())))) - others
    orphans -= {baits.facts["victim"]}
    assert orphans
    for pid in orphans:
        os.waitpid(pid, 0)


def test_kernel_probe_reaches_system_calls_without_filter(baits):
    (probe,) = (probe for probe in PROBES if probe.name == "escape kernel")
    finding = run_probe(probe, bare_run, baits, NOBODY, NOTHING)
    assert {"memfd_create", "keyctl", "kcmp"} & set(finding.reached)


def test_confined_run_blocks_shared_memory_and_unknown_system_calls():
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o1600)
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.shmat.restype = ctypes.c_long\n"
        f"for call in (lambda: libc.shmat({segment}, None, 0), lambda: libc.shmctl({segment}, 0, None),\n"
        "    lambda: libc.syscall(463, -100, b'.', 0, b'user.x', None, 0)):\n"
        "    ctypes.set_errno(0)\n    print(call(), ctypes.get_errno())\n"
    )
    try:
        assert run_confined(code, SandboxLimits()).output == "-1 1\n-1 1\n-1 38\n"
        assert libc.shmctl(segment, 2, ctypes.create_string_buffer(256)) == 0  # the segment still exists
    finally:
        libc.shmctl(segment, 0, None)


def test_output_probe_succeeds_without_sandbox(baits):
    (probe,) = (probe for probe in PROBES if probe.name == "exhaust output")
    assert run_probe(probe, bare_run, baits, os.getpid(), NOTHING).verdict == "open"


def test_run_before_probe_finds_leftover_file_and_memory(baits, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = {"text": baits.left_behind, "more": []}
    Path("left_behind").write_text(kept["text"])
    attempts = read.run_before(baits.facts)
    assert attempts["files"]() == ["left_behind"] and attempts["memory"]() > 0


def test_privileges_probe_finds_privileges_without_sandbox(baits):
    (probe,) = (probe for probe in PROBES if probe.name == "escape privileges")
    finding = run_probe(probe, bare_run, baits, NOBODY, NOTHING)
    assert "setuid programs" in finding.reached
    assert ("capabilities" in finding.reached) == (os.geteuid() == 0)


def test_probe_code_contains_source_of_function(baits):
    def arithmetic(facts):
        return {"two": lambda: 1 + 1, "nothing": lambda: 0, "error": lambda: 1 / 0}

    arithmetic.__doc__ = "Adds."
    source = Probe("see", "names", read.descriptors).code({}, "a mark")
    assert "def descriptors" in source and "a mark" in source


FAKES = {
    "by a report of its own": 'print(\'perilune-audit:[{}, {"all": "refused"}]\')\nraise SystemExit',
    "by leaving": "import os\nos._exit(0)",
    "by an error": "raise ValueError('no attempts')",
    "by an attempt with a mistake": "return {'one': lambda: nowhere}",
}


@pytest.mark.parametrize("how", FAKES)
def test_probe_without_attempts_is_untried_and_breaches_audit(baits, how, tmp_path, monkeypatch):
    body = FAKES[how].replace("\n", "\n    ")
    (tmp_path / "faked.py").write_text(f"def attempts(facts):\n    'Fakes.'\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faked", raising=False)
    linecache.clearcache()
    probe = Probe("see", "names", importlib.import_module("faked").attempts)
    finding = run_probe(probe, bare_run, baits, NOBODY, NOTHING)
    assert (finding.verdict, dict(finding.refused)) == ("untried", {})
    assert SandboxAudit({}, NOTHING, [finding]).breached


def python_for_other_user() -> tuple[str, dict]:
    """An interpreter outside any home, and the arguments that start it as a user without privileges."""
    other = {} if os.geteuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""):
        command = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if candidate and not subprocess.run(command, **other, check=False).returncode:
                return candidate, other
        except OSError:
            continue
    pytest.xfail("no Python that another user can start: apt install python3")


@pytest.mark.parametrize("without", ["[]", "['namespaces']"])
def test_audit_finds_no_breach_for_ordinary_user(without):
    python, other = python_for_other_user()
    package = Path("/tmp") / f"perilune-for-others-{os.getpid()}"  # readable by another user
    ours = Path(perilune.__file__).parent
    shutil.copytree(ours / "sandbox", package / "perilune" / "sandbox")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ours / name, package / "perilune" / name)
    script = (
        "import json\nfrom perilune.sandbox.audit import PROBES, audit_sandbox\n"
        "quick = [one for one in PROBES if one.wall not in ('time', 'output')]\n"
        f"found = audit_sandbox(without={without}, probes=quick)\n"
        "print(json.dumps([found.machine['user'], found.capabilities.missing,"
        " [[one.probe, one.reached] for one in found.breached]]))"
    )
    environment = {"PYTHONPATH": str(package), "HOME": "/nonexistent"}
    command = [python, "-B", "-c", script]
    try:
        ended = subprocess.run(
            command, env=environment, cwd="/", **other, capture_output=True, text=True, check=True
        )
    finally:
        shutil.rmtree(package)
    user, missing, breached = json.loads(ended.stdout)
    assert (user, breached) == ("an ordinary user", [])
    assert missing == (["names"] if without != "[]" else [])


def test_audit_limits_are_small():
    assert AUDIT_LIMITS.processes <= 8 and AUDIT_LIMITS.memory_bytes <= 1 << 27 and AUDIT_LIMITS.seconds <= 2
    assert isinstance(AUDIT_LIMITS, SandboxLimits)
