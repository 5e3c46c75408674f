"""The audit: runs code that tries to escape from a sandbox, probe by probe, and reports what it reached."""

import inspect
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from perilune.sandbox.baits import Baits
from perilune.sandbox.confined_run import run_confined
from perilune.sandbox.limits import SandboxLimits
from perilune.sandbox.mechanisms import WALLS
from perilune.sandbox.probes import escape, exhaust, reach, read, see, signals, write
from perilune.sandbox.sandbox import Capabilities, Execution, Sandbox
from perilune.sandbox.watch import descendants

AUDIT_LIMITS = SandboxLimits(
    seconds=1.2,
    cpu_seconds=1,
    memory_bytes=64 << 20,
    processes=6,
    scratch_bytes=4 << 20,
    scratch_files=64,
    flood_bytes=4 << 20,
)
_MAX_EVIDENCE_CHARS = 120
_WALL_ENDS = ("timeout", "memory", "output", "scratch")  # causes that show that a wall holds

_HARNESS = """
import json
reached, refused, untried = {{}}, {{}}, {{}}
for name, attempt in {probe}(json.loads({facts!r})).items():
    try:
        found = attempt()
    except (NameError, AttributeError, TypeError, SyntaxError, AssertionError) as error:
        untried[name] = f"{{type(error).__name__}}: {{error}}"
    except BaseException as error:
        refused[name] = f"{{type(error).__name__}}: {{error}}"
    else:
        if found:
            reached[name] = str(found)
        else:
            refused[name] = "nothing was found"
print("\\n{mark}" + json.dumps([reached, refused, untried]))
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that untrusted code tries.

    Attributes:
        group: see, read, write, signal, reach, exhaust or escape.
        function: the attempts, from `perilune.sandbox.probes`.
    """

    group: str
    wall: str
    function: Callable[[Mapping[str, Any]], Mapping[str, Callable[[], Any]]]

    @property
    def name(self) -> str:
        """The name in lists, such as "see processes"."""
        return f"{self.group} {self.function.__name__.replace('_', ' ')}"

    def code(self, facts: Mapping[str, Any], mark: str) -> str:
        """Return the program that makes the attempts and prints their results in a line after `mark`."""
        source = "from __future__ import annotations\n" + inspect.getsource(self.function)
        probe = self.function.__name__
        return source + _HARNESS.format(probe=probe, facts=json.dumps(facts), mark=mark)


PROBES = (
    *(Probe("see", "names", fn) for fn in (see.processes, see.files, see.host)),
    Probe("see", "files", see.environment),
    *(Probe("read", "files", fn) for fn in (read.secrets, read.project, read.descriptors, read.run_before)),
    Probe("read", "signals", read.memory),
    *(Probe("write", "writes", fn) for fn in (write.folders, write.existing_files, write.devices)),
    *(Probe("signal", "signals", fn) for fn in (signals.signals, signals.priorities)),
    *(Probe("reach", "network", fn) for fn in (reach.network, reach.local_sockets)),
    Probe("reach", "sockets", reach.other_families),
    Probe("reach", "kernel", reach.other_runs),
    *(
        Probe("exhaust", "memory", fn)
        for fn in (exhaust.memory, exhaust.memory_of_many, exhaust.memory_of_threads)
    ),
    *(Probe("exhaust", "kernel", fn) for fn in (exhaust.memory_let_go, exhaust.shared_slots)),
    Probe("exhaust", "processes", exhaust.processes),
    Probe("exhaust", "files", exhaust.descriptors),
    Probe("exhaust", "scratch", exhaust.disk),
    *(Probe("exhaust", "time", fn) for fn in (exhaust.processor, exhaust.clock)),
    Probe("exhaust", "output", exhaust.output),
    Probe("escape", "privileges", escape.privileges),
    *(Probe("escape", "kernel", fn) for fn in (escape.namespaces, escape.kernel, escape.tracing)),
    Probe("escape", "programs", escape.programs),
    Probe("escape", "whole tree", escape.daemon),
)

SCORER_PROBES = (
    *(read.secrets, read.memory, write.folders, write.existing_files, write.devices),
    *(signals.signals, signals.priorities),
    *(reach.network, reach.local_sockets, reach.other_families, reach.other_runs),
    *(exhaust.memory_let_go, exhaust.shared_slots),
    *(escape.privileges, escape.namespaces, escape.kernel, escape.tracing, escape.programs, escape.daemon),
)
"""Probes that a confined process without namespaces, such as a scorer's, must also withstand."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a probe.

    Attributes:
        what: description of the attempts.
        stands: whether this machine has the wall.
        verdict: "contained" if every attempt was refused, "open" if attempts succeeded and none was refused,
            "partly" if some succeeded and some were refused, "untried" if some failed by themselves and none
            succeeded.
        reached: successful attempts, each with the evidence.
        refused: attempts that a wall refused, each with the error.
        untried: attempts that failed for another reason, which shows nothing.
    """

    probe: str
    what: str
    wall: str
    stands: bool
    verdict: str
    reached: Mapping[str, str]
    refused: Mapping[str, str]
    untried: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SandboxAudit:
    """The result of an audit: what untrusted code could do on this machine."""

    machine: Mapping[str, str]
    capabilities: Capabilities
    findings: Sequence[Finding]

    @property
    def breached(self) -> tuple[Finding, ...]:
        """Probes that succeeded or could not be tried although the wall stands."""
        return tuple(item for item in self.findings if item.stands and item.verdict != "contained")

    def document(self) -> dict[str, Any]:
        capabilities = asdict(self.capabilities)
        walls = {wall: {"keeps": WALLS[wall][0], "by": by} for wall, by in capabilities["walls"].items()}
        return {
            "machine": dict(self.machine),
            "mechanisms": capabilities["mechanisms"],
            "missing": dict(self.capabilities.reasons),
            "walls": walls,
            "findings": [asdict(finding) for finding in self.findings],
        }


def audit_sandbox(
    *,
    without: Sequence[str] = (),
    probes: Sequence[Probe] = PROBES,
    on_finding: Callable[[Finding], None] | None = None,
) -> SandboxAudit:
    """Run probes in a sandbox on this machine, and those of `SCORER_PROBES` also in a confined process.

    Args:
        without: mechanisms to switch off, as for `Sandbox`. Then only the sandbox is audited.
        probes: all by default.
        on_finding: called with each finding.

    Raises:
        SandboxFailedError: if nothing can be run on this machine.
    """
    findings = []
    with Baits() as baits, Sandbox(AUDIT_LIMITS, without=without, allow_missing=tuple(WALLS)) as sandbox:
        capabilities = sandbox.capabilities()
        for probe in probes:
            findings.append(run_probe(probe, sandbox.run, baits, sandbox.process_id, capabilities))
            if on_finding:
                on_finding(findings[-1])
        for probe in [] if without else [probe for probe in probes if probe.function in SCORER_PROBES]:
            run = partial(run_confined, limits=AUDIT_LIMITS)
            finding = run_probe(probe, run, baits, sandbox.process_id, _without_namespaces(capabilities))
            findings.append(replace(finding, probe=f"scorer: {finding.probe}"))
            if on_finding:
                on_finding(findings[-1])
    return SandboxAudit(_describe_machine(), capabilities, findings)


def _without_namespaces(capabilities: Capabilities) -> Capabilities:
    """Return the walls of a process without namespaces and without its own user."""
    walls = {
        wall: tuple(mechanism for mechanism in made_of if mechanism not in ("namespaces", "own_user"))
        for wall, made_of in capabilities.walls.items()
    }
    return replace(capabilities, walls=walls)


def run_probe(
    probe: Probe,
    run: Callable[[str], Execution],
    baits: Baits,
    supervisor: int,
    capabilities: Capabilities,
) -> Finding:
    """Run one probe with `run`, and inspect its effects from outside.

    Args:
        supervisor: id of the process whose descendants include everything that the code leaves behind.
    """
    facts = baits.facts | asdict(AUDIT_LIMITS) | {"supervisor": supervisor}
    if probe.function is read.run_before:
        text = f"keep = {{'text': {baits.left_behind!r}, 'more': []}}"
        run(f"{text}\nopen('left_behind', 'w').write(keep['text'])")
    mark = secrets.token_hex(16)  # tells the report from other output
    execution = run(probe.code(facts, mark))
    reached, refused, untried = _read_report(execution, mark)
    signs = baits.list_taken() + [f"process {process} lives on" for process in descendants(supervisor)]
    if any(baits.secret.encode() in content for content in execution.files.values()):
        signs.append("a secret was carried out in a file")
    if len(execution.output) > 2 * AUDIT_LIMITS.output_bytes:
        signs.append(f"{len(execution.output)} characters were kept")
    reached |= {f"from outside {number}": text for number, text in enumerate(signs, 1)}
    verdict = (
        "partly" if reached and refused else "open" if reached else "untried" if untried else "contained"
    )
    what = inspect.getdoc(probe.function) or ""
    stands = bool(capabilities.walls[probe.wall])
    return Finding(probe.name, what, probe.wall, stands, verdict, *map(_shorten, (reached, refused, untried)))


def _read_report(execution: Execution, mark: str) -> list[dict[str, str]]:
    """Return the attempts that were successful, refused and untried.

    Without a report, a run that a wall ended counts as refused, and any other run as untried.
    """
    for line in reversed(execution.output.splitlines()):
        if line.startswith(mark):
            report: list[dict[str, str]] = json.loads(line.removeprefix(mark))
            return report
    how = f"signal {execution.signal}" if execution.signal else f"exit code {execution.exit_code}"
    ended = {"the run": f"was ended: {execution.cause}, {how} after {execution.seconds:.1f} s"}
    return [{}, ended, {}] if execution.cause in _WALL_ENDS else [{}, {}, ended]


def _shorten(attempts: Mapping[str, str]) -> dict[str, str]:
    return {name: " ".join(text.split())[:_MAX_EVIDENCE_CHARS] for name, text in attempts.items()}


def _describe_machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
    }
