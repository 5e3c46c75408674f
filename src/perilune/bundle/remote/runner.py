"""The runner: manages one attempt on a machine on which Perilune is not installed.

One file, standard library only, Python 3.8 or newer, Linux. Every call sends this file over stdin, so the
machine needs no installation. Modules that only some verbs need are imported in these verbs, because `look`
runs often. A call executes one verb, ends its output with one line of JSON, and can be repeated:

    start    reject an old epoch, claim this one and start its keeper; a second call returns the same claim
    look     report the state of the attempt, then send new data since the last poll, in frames
    stop     end the attempt and verify that no process is left
    remove   delete the attempt's files

Two more verbs use the store of file contents (store.py), and are sent after this file only when they are
called: `receive` (receiver.py) takes the attempt's files, and `hold` (holder.py) keeps its checkpoints there.

The keeper lives as long as the attempt. It runs the copy of this file in the bundle. It sets the timers that
end it, writes the claim, runs the bundle's entrypoint (which makes the environment and becomes the worker),
and writes a verdict if the worker could not. The workspace has RUN/EPOCH (the files), RUN/claim.EPOCH.json
(kept forever, so that no older attempt can start) and RUN/lock.

With --container the entrypoint runs in a container: `launch` creates it and becomes the client of Docker or
Podman, and `inside` is its first process. The attempt ends with its container.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TYPE_CHECKING = False  # instead of importing typing, which takes longer than a poll
if TYPE_CHECKING:
    import subprocess
    import threading
    from typing import Any, BinaryIO

REFUSED = 3  # exit code of a rejected request
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)  # a folder cannot be created
BLOCK, PIECE, TAIL = 1 << 20, 1 << 16, 1 << 12  # bytes
POLL_INTERVAL_S = 0.1
EXIT_MARGIN_S = 15.0  # seconds after its grace period in which a stopping worker hashes its artifacts
HOLDER = "PERILUNE_HOLDER"  # variable: ID and start time of the process whose end must end the attempt
MARK, WORKER_MARK = "PERILUNE_ATTEMPT", "PERILUNE_CLAIM"  # variables: an attempt's processes inherit them
SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl(2)
GROWING = (".log", ".jsonl")  # files that are only appended to
CLIENT_TIMEOUT_S = 10.0  # seconds until Docker's or Podman's client counts as not answering
ENVIRONMENTS = ".environments"  # in the workspace: one folder of environments per container image
LAST_FILES = ("artifacts/manifest.json", "runtime/result.json")  # sent after all files that they list
CHECKPOINTS_PREFIX = "artifacts/checkpoints/"  # each folder in it is written and sent as a whole
STATE_PREFIX = f"{CHECKPOINTS_PREFIX}step-"  # checkpoints that only resuming needs
OPTIMIZER = "optimizer"  # folder in a checkpoint: the state of the optimizer


class RefusedError(Exception):
    """The request is rejected; the message says why, and `kind` classifies the reason for the sender."""

    def __init__(self, what: str, kind: str = "refused") -> None:
        super().__init__(what)
        self.kind = kind


class Attempt:
    """The paths of one attempt."""

    def __init__(self, workspace: str, run: str, epoch: int, container: dict[str, Any] | None = None) -> None:
        if not run.isalnum() or epoch < 1:
            raise RefusedError("not the name of an attempt")
        self.epoch, self.container = epoch, container
        self.workspace = Path(os.path.abspath(str(Path(workspace).expanduser())))
        self.run = self.workspace / run
        self.files = self.run / str(epoch)
        self.runtime = self.files / "runtime"
        self.runner = self.files / "scripts" / "runner.py"
        self.entrypoint = [str(self.files / "scripts" / "entrypoint.sh"), "--epoch", str(epoch)]
        self.contact = self.run / f"contact.{epoch}"
        self.held = self.run / f"held.{epoch}.json"  # see holder.py

    def other(self, epoch: int) -> Attempt:
        """Another attempt of the same run."""
        return Attempt(str(self.workspace), self.run.name, epoch, self.container)

    def claim(self) -> dict[str, Any] | None:
        """Return the claim on this epoch."""
        return read_json(self.run / f"claim.{self.epoch}.json")

    def claimed_epochs(self) -> list[int]:
        """Return all epochs of the run that were claimed on this machine."""
        names = (path.name.split(".") for path in self.run.glob("claim.*.json"))
        return sorted(int(name[1]) for name in names if len(name) == 3)

    def write_claim(self, pid: int) -> dict[str, Any]:
        """Claim the epoch for a process; raises FileExistsError if it is claimed (a link never replaces)."""
        claim = {
            "epoch": self.epoch,
            "host": host_id(),
            "boot_id": boot_id(),
            "pid": pid,
            "starttime": starttime(pid),
            "nonce": os.urandom(16).hex(),
        }
        temporary = self.run / f".claim.{claim['nonce']}"
        write_durably(temporary, json.dumps(claim).encode())
        try:
            os.link(str(temporary), str(self.run / f"claim.{self.epoch}.json"))
        finally:
            temporary.unlink()
        sync_directory(self.run)
        return claim

    def touch(self) -> None:
        """Record contact: the keeper notices the changed file, so clocks need not agree."""
        if self.files.is_dir():
            with contextlib.suppress(OSError):  # no room
                self.contact.write_text(os.urandom(4).hex())

    def result(self) -> dict[str, Any] | None:
        """Return the verdict on this epoch."""
        verdict = read_json(self.runtime / "result.json")
        return verdict if verdict and verdict.get("epoch") == self.epoch else None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the run, so that only one verb at a time changes it."""
        self.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.run / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


# The verbs.


def start(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Start a keeper unless there is one, and return its claim. Older attempts are ended first."""
    import subprocess

    values = json.loads(sys.stdin.buffer.read() or b"{}")
    with attempt.lock():
        newest = (attempt.claimed_epochs() or [0])[-1]
        if newest > attempt.epoch:
            raise RefusedError(f"attempt {newest}, a newer one, has started on this machine", "superseded")
        if newest == attempt.epoch:
            return {"claim": attempt.claim()}
        if not (attempt.files / "job.json").exists():
            raise RefusedError("the files of the attempt are missing", "unstaged")
        for epoch in attempt.claimed_epochs():
            if not end(attempt.other(epoch), 0.0):
                raise RefusedError(f"processes of attempt {epoch} cannot be ended")
        if not end_containers(attempt, every=True):
            raise RefusedError("containers of older attempts cannot be ended")
        command = [sys.executable, "-IS", str(attempt.runner), "keep", *sys.argv[2:]]
        with (attempt.runtime / "worker.log").open("ab") as log:
            keeper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=str(attempt.files),
                start_new_session=True,
            )
        with keeper.stdin as stdin, keeper.stdout as stdout:  # type: ignore[union-attr]
            with contextlib.suppress(BrokenPipeError):
                stdin.write(json.dumps(values).encode())
                stdin.close()
            claim = stdout.read()  # ends when the keeper has written its claim or died
        if not claim:
            raise RefusedError("the keeper did not start, see runtime/worker.log")
        return {"claim": json.loads(claim)}


def look(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Print the state of the attempt as one line; then, if it was claimed, frames with new data.

    A verdict counts only after the keeper has exited: until then it may still kill processes or write files.
    Stdin lists the data that the control plane has (see `send_changes`). Its "last" says whether to send
    manifest and result once there is a verdict.
    """
    attempt.touch()
    request = json.loads(sys.stdin.buffer.read())
    claim = attempt.claim()
    alive = False if claim is None else is_running(attempt, claim)
    result = attempt.result() if alive is False else None
    heartbeat = read_json(attempt.runtime / "heartbeat.json") or {}
    state = {
        "claim": claim,
        "alive": alive,
        "result": result,
        "superseded": attempt.claimed_epochs()[-1:] > [attempt.epoch],
        "heartbeat": heartbeat.get("count", 0) if heartbeat.get("epoch") == attempt.epoch else 0,
        "staged": attempt.files.is_dir(),
    }
    print(json.dumps({"seen": state}), flush=True)
    if claim is None or not state["staged"]:
        return {"end": True, "more": False, "units": {}}
    unfinished = result is None or bool(result.get("cause"))
    if request["last"] and request.get("rescue") and unfinished and request["bring"] == "final":
        request["bring"] = "all"  # the machine goes away, and nothing else has what resuming needs
    last = bool(request["last"]) and result is not None
    return send_changes(attempt.files, request, sys.stdout.buffer, last)


def stop(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """End the attempt. An unclaimed attempt is claimed, so that no worker can start it later."""
    try:
        with attempt.lock():
            if attempt.claim() is None:
                attempt.write_claim(os.getpid())
                return {"stopped": has_no_container(attempt)}
    except OSError as error:
        if error.errno in UNWRITABLE and not attempt.run.exists():  # it never had files that could start
            return {"stopped": has_no_container(attempt)}
        raise
    return {"stopped": end(attempt, options.grace)}


def remove(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Delete the attempt's files. Its claim stays, so that no older attempt can start."""
    import shutil

    if not attempt.run.exists():
        return {"removed": True}
    with attempt.lock():
        claim = attempt.claim()
        if claim is not None and is_running(attempt, claim) is not False:
            raise RefusedError("the attempt still runs")
        for path in [attempt.files, *attempt.run.glob("tmp.*")]:
            if path.exists():
                shutil.rmtree(str(path))
        for file in (attempt.contact, attempt.held):
            with contextlib.suppress(OSError):
                file.unlink()
    return {"removed": True}


# Data sent to the control plane.


def send_changes(root: Path, have: dict[str, Any], out: BinaryIO, last: bool) -> dict[str, Any]:
    """Write frames (a line of JSON, then the bytes that it announces) up to a limit, in order of urgency.

    `have` describes the data that the control plane has: {"files": {path: [inode, mtime, bytes, tail]},
    "units": [names], "limit": n, "folders": [requested folders], "bring": see `stays_on_machine`}. With
    `last`, all artifacts are sent, and manifest and result at the end.
    """
    room, more = int(have["limit"]), False
    units: dict[str, dict[str, int]] = {}
    bring = have.get("bring", "all")
    for path, status in list_files(root, have["folders"], last):
        if stays_on_machine(path, bring) or (bring != "all" and not last and is_unfinished(root, path)):
            continue
        if is_in_unit(path):
            name, _, inside = path[len(CHECKPOINTS_PREFIX) :].partition("/")
            units.setdefault(name, {})[inside] = status.st_size
            if name in have["units"]:
                continue
        begin = first_new_byte(root / path, status, have["files"].get(path))
        if begin is not None:
            more = more or room <= 0
            if room > 0:
                room -= send(out, root / path, path, begin, room)
                more = more or room <= 0
    return {"end": True, "more": more, "units": units}


def list_files(root: Path, wanted: list[str], last: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield regular files in order of urgency, without temporary ones; with `last`, all artifacts."""
    files = []
    for top in (name for name in ("runtime", "artifacts") if name in wanted):
        complete = last and top == "artifacts"
        for folder, folders, names in os.walk(str(root / top)):
            folders[:] = [name for name in folders if complete or is_finished(name)]
            for name in (name for name in names if complete or is_finished(name)):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path)
                    relative = os.path.relpath(path, str(root))
                    if stat.S_ISREG(status.st_mode) and (last or relative not in LAST_FILES):
                        files.append((transfer_order(root, relative, status), relative, status))
    return ((relative, status) for _, relative, status in sorted(files, key=lambda entry: entry[:2]))


def stays_on_machine(path: str, bring: str) -> bool:
    """Return whether a file stays on its machine.

    `bring`: "all" transfers everything, "final" no checkpoints for resuming, "metrics" no checkpoints.
    """
    if bring == "all" or not is_in_unit(path):
        return False
    return bring == "metrics" or path.startswith(STATE_PREFIX)


def is_in_unit(path: str) -> bool:
    return path.startswith(CHECKPOINTS_PREFIX) and path.count("/") > 2


def is_unfinished(root: Path, path: str) -> bool:
    """Return whether a file is in a checkpoint whose optimizer state the task may still delete at its end."""
    return is_in_unit(path) and (root.joinpath(*path.split("/")[:3]) / OPTIMIZER).is_dir()


def is_finished(name: str) -> bool:
    return not name.startswith(".") and not name.endswith((".tmp", ".lock"))


def transfer_order(root: Path, path: str, status: os.stat_result) -> tuple[int, float]:
    """Return the sort key: logs, verdicts, small artifacts, newest checkpoints, large files, `LAST_FILES`."""
    if path in LAST_FILES:
        return 4 + LAST_FILES.index(path), 0.0
    if path.startswith("runtime/"):
        return 0, 0.0
    if is_in_unit(path):
        unit = Path(str(root), *path.split("/")[:3])
        return 2, -unit.stat().st_mtime
    return (1, 0.0) if status.st_size < BLOCK else (3, 0.0)


def grows_only(path: str) -> bool:
    """Return whether a file is only appended to, by its name."""
    name = path.rpartition("/")[2]
    return name.endswith(GROWING) or name.startswith("runtime.log")


def first_new_byte(source: Path, status: os.stat_result, have: list[Any] | None) -> int | None:
    """Return the first byte to send; None if the control plane has the whole file."""
    if have is None or have[0] != status.st_ino or have[2] > status.st_size:
        return 0
    changed = have[1] != status.st_mtime_ns
    if changed and not (grows_only(source.name) and have[3] == tail_digest(source, have[2])):
        return 0
    return None if have[2] == status.st_size else int(have[2])


def tail_digest(source: Path, end: int) -> str:
    """Return the SHA-256 of the bytes before `end`; an inode number may be reused for other contents."""
    with contextlib.suppress(OSError), source.open("rb") as file:
        file.seek(max(0, end - TAIL))
        return hashlib.sha256(file.read(min(end, TAIL))).hexdigest()
    return ""


def send(out: BinaryIO, source: Path, path: str, begin: int, room: int) -> int:
    """Send the file from byte `begin` in frames and return the number of bytes; stop if the file changes."""
    sent = 0
    with contextlib.suppress(FileNotFoundError), source.open("rb") as file:
        status = os.fstat(file.fileno())
        file.seek(begin)
        while sent < room:
            data = file.read(max(0, min(BLOCK, max(room - sent, PIECE), status.st_size - begin - sent)))
            now = os.fstat(file.fileno())
            changed = (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns)
            if changed and not grows_only(path):
                break
            header = {
                "path": path,
                "offset": begin + sent,
                "length": len(data),
                "ino": status.st_ino,
                "mtime": status.st_mtime_ns,
                "size": status.st_size,
                "sha256": hashlib.sha256(data).hexdigest(),
                "tail": tail_digest(source, begin + sent + len(data)),
            }
            out.write(json.dumps(header).encode() + b"\n" + data)
            out.flush()
            sent += len(data)
            if begin + sent >= status.st_size:
                break
    return max(sent, 1)


# The keeper.


def keep(attempt: Attempt, options: argparse.Namespace) -> None:
    """Run the attempt; end it at its time limit, after too long without contact, or on request."""
    import subprocess

    # The timer ends this process even if it hangs.
    signal.setitimer(signal.ITIMER_REAL, options.lifetime + options.grace + 2 * EXIT_MARGIN_S)
    began = time.monotonic()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    prctl(SUBREAPER, 1)
    values = json.loads(sys.stdin.buffer.read())
    claim = attempt.write_claim(os.getpid())
    with contextlib.suppress(BrokenPipeError):  # the caller's connection may be broken
        print(json.dumps(claim), flush=True)
    os.dup2(2, 1)  # close stdout, because `start` reads the claim to its end

    environment = {**values["environment"], **values["secrets"], MARK: claim["nonce"]}
    entrypoint, printed = start_entrypoint(attempt, environment, values["secrets"])
    contact, contact_at, cause, why = modification_time(attempt.contact), began, "", ""
    while entrypoint.poll() is None and not cause:
        time.sleep(POLL_INTERVAL_S)
        now = time.monotonic()
        if (latest := modification_time(attempt.contact)) != contact:
            contact, contact_at = latest, now
        if signals:
            cause, why = "stopped", "stopped on request"
        elif now - began > options.lifetime:
            cause, why = "timeout", f"it took longer than max_lifetime, {options.lifetime:.0f} s"
        elif options.unseen and now - contact_at > options.unseen:
            cause, why = "stopped", f"no contact for {options.unseen:.0f} s"
        elif not holder_is_alive():
            cause, why = "stopped", "the machine was taken away"
    if cause:
        with contextlib.suppress(ProcessLookupError):
            entrypoint.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            entrypoint.wait(options.grace + EXIT_MARGIN_S if holder_is_alive() else 0.0)
    status = entrypoint.poll()
    if attempt.container:
        entrypoint.kill()
        status = 128 - status if status is not None and status > 128 else status
        if not cause and attempt.result() is None and ran_out_of_memory(attempt):
            cause, why = "out_of_memory", "the kernel killed its container because it ran out of memory"
        end_and_confirm(attempt)
    end_marked(attempt, claim)
    status = entrypoint.wait() if status is None else status
    printed.join(EXIT_MARGIN_S)
    write_verdict(attempt, status, cause, why, time.monotonic() - began)


def start_entrypoint(
    attempt: Attempt, environment: dict[str, str], secrets: dict[str, str]
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start the entrypoint, or the client of its container, and return it with the thread that copies output.

    The thread copies to our own log, without the values of `secrets`. A container's client gets the
    environment, secrets included, over its stdin, which stays open as long as this process lives. The client
    does not have the attempt's mark, because Podman's container monitor descends from it.
    """
    import subprocess
    import threading

    launcher = [sys.executable, "-IS", str(attempt.runner), "launch", *sys.argv[2:]]
    entrypoint = subprocess.Popen(
        launcher if attempt.container else attempt.entrypoint,
        stdin=subprocess.PIPE if attempt.container else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=str(attempt.files),
        env=dict(os.environ) if attempt.container else {**os.environ, **environment},
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - we have one thread
    )
    if entrypoint.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            entrypoint.stdin.write(json.dumps(environment).encode() + b"\n")
            entrypoint.stdin.flush()
    printed = threading.Thread(
        target=copy, args=(entrypoint.stdout, make_redactor(attempt, secrets)), daemon=True
    )
    printed.start()
    return entrypoint, printed


def make_redactor(attempt: Attempt, secrets: dict[str, str]) -> Any:
    """Return a filter from the bundle's redaction.py that replaces the values of `secrets` in text."""
    import runpy

    redaction = runpy.run_path(str(attempt.runner.with_name("redaction.py")))
    redactor = redaction["Redactor"]()
    for name, value in secrets.items():
        redactor.register_secret(name, value)
    return redaction["RedactedStream"](redactor)


def copy(pipe: Any, redacted: Any) -> None:
    """Copy everything from `pipe` to our log. If the disk is full, the rest is lost."""
    while True:
        data = os.read(pipe.fileno(), PIECE)
        text = redacted.feed(data) if data else redacted.close()
        while text:
            try:
                text = text[os.write(2, text) :]
            except OSError:
                break
        if not data:
            return


def write_verdict(attempt: Attempt, status: int, cause: str, why: str, seconds: float) -> None:
    """Write a verdict if the worker wrote none, or add the reason for stopping it."""
    verdict = attempt.result()
    if verdict is None:
        worker = read_json(attempt.runtime / "claim.json") or {}
        if not cause and worker.get("epoch") == attempt.epoch:
            cause, why = "runner_died", "the worker died without a result"
        elif not cause:
            cause = "request_error" if status in (2, 126, 127) else "start_failed"
            why = f"the worker did not start: {read_log_end(attempt.runtime / 'worker.log')}"
            if status in (126, 127):  # exit codes of a shell for a missing program
                why += "\n  try: install that program on the machine, or name another Python in the template"
        verdict = {
            "epoch": attempt.epoch,
            "exit_code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "manifest_digest": None,
            "seconds": round(seconds, 3),
        }
    elif verdict["cause"] != "stopped" or not cause:
        return
    verdict.update(cause=cause, message=why)
    temporary = attempt.runtime / ".result.tmp"
    write_durably(temporary, json.dumps(verdict, indent=2, sort_keys=True).encode() + b"\n")
    temporary.rename(attempt.runtime / "result.json")
    sync_directory(attempt.runtime)


def read_log_end(log: Path) -> str:
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        return "\n".join(text.splitlines()[-3:])
    return "it printed nothing"


# Containers.


def launch(attempt: Attempt, options: argparse.Namespace) -> None:
    """Create the attempt's container, record its image, and become the client that runs it.

    This is a separate process, so that the keeper can enforce limits while the image is pulled.
    """
    import subprocess

    settings = attempt.container or {}
    program, image = settings["program"], settings["image"]
    environments = attempt.workspace / ENVIRONMENTS / image.rpartition(":")[2][:16]
    environments.mkdir(mode=0o700, parents=True, exist_ok=True)
    if set(str(attempt.workspace)) & set(',"'):
        sys.exit("the workspace's path has a comma or a quote, so it cannot be mounted into a container")
    suffix = hashlib.sha256(str(attempt.workspace).encode()).hexdigest()[:8]
    labels = {**labels_of(attempt), "perilune.claim": (attempt.claim() or {})["nonce"]}
    command = [program, "create", "--interactive", *settings["options"]]
    command += ["--name", f"perilune-{attempt.run.name}-{attempt.epoch}-{suffix}"]
    for name, value in labels.items():
        command += ["--label", f"{name}={value}"]
    command += ["--user", settings["user"] or f"{os.getuid()}:{os.getgid()}"]
    if os.path.basename(program).startswith("podman") and os.getuid() != 0:
        command += ["--userns", "keep-id"]
    command += ["--env", f"HOME={environments}", "--env", f"PERILUNE_HOME={environments}"]
    for path in (attempt.files, environments):
        command += ["--mount", f"type=bind,source={path},target={path}"]
    command += ["--workdir", str(attempt.files), "--entrypoint", settings["python"], image]
    command += ["-IS", str(attempt.runner), "inside", "--workspace", str(attempt.workspace)]
    command += ["--run", attempt.run.name, "--epoch", str(attempt.epoch)]
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, preexec_fn=die_with_parent
    )
    if process.returncode != 0:
        sys.exit(process.returncode)
    container = process.stdout.decode().split()[-1]
    try:
        answer = run_docker(attempt, "inspect", "--format", "{{.Image}}", container)
        image_id = answer.strip().rpartition(":")[2]
    except RefusedError as error:
        sys.exit(str(error))
    facts = {"program": program, "image": image, "image_id": f"sha256:{image_id}", "container": container}
    write_durably(attempt.runtime / "container.json", json.dumps(facts, indent=2).encode() + b"\n")
    os.execvp(program, [program, "start", "--attach", "--interactive", container])  # noqa: S606


def inside(attempt: Attempt, options: argparse.Namespace) -> None:
    """The first process of a container: run the entrypoint with the environment from stdin and reap orphans.

    It exits with the entrypoint, or when stdin closes, because the keeper has died. The kernel then kills all
    processes of the container.
    """
    import select
    import subprocess

    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(128 + signal.SIGKILL)
    environment = {**os.environ, **json.loads(line)}
    entrypoint = subprocess.Popen(
        attempt.entrypoint, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(entrypoint.pid, number))
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == entrypoint.pid:
            sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
        if not pid and select.select([0], [], [], POLL_INTERVAL_S)[0] and not os.read(0, 1):
            sys.exit(128 + signal.SIGKILL)


def labels_of(attempt: Attempt) -> dict[str, str]:
    """Return the labels by which the attempt's containers are found, even without other records."""
    return {"perilune.run": str(attempt.run), "perilune.epoch": str(attempt.epoch)}


def containers(attempt: Attempt, *, every: bool = False) -> list[str]:
    """Return the attempt's containers, running or not; with `every`, those of all attempts of its run.

    Raises:
        RefusedError: if Docker or Podman does not answer.
    """
    if attempt.container is None:
        return []
    command = ["ps", "--all", "--quiet", "--no-trunc"]
    for name, value in labels_of(attempt).items():
        if not every or name == "perilune.run":
            command += ["--filter", f"label={name}={value}"]
    return run_docker(attempt, *command).split()


def end_containers(attempt: Attempt, *, every: bool = False) -> bool:
    """Kill and remove the attempt's containers; return whether none is left.

    Raises:
        RefusedError: if Docker or Podman does not answer.
    """
    until = time.monotonic() + EXIT_MARGIN_S
    while True:
        remaining = containers(attempt, every=every)
        if not remaining or time.monotonic() > until:
            return not remaining
        for container in remaining:
            # With `rm` alone Podman waits for the stop.
            for command in (["kill", container], ["rm", "--force", container]):
                with contextlib.suppress(RefusedError):
                    run_docker(attempt, *command)
        time.sleep(POLL_INTERVAL_S)


def has_no_container(attempt: Attempt) -> bool:
    """Return whether an attempt that was never claimed, or whose claim was lost, has no container."""
    try:
        remaining = containers(attempt)
    except RefusedError:
        return True  # without an answer, only a record could show that there was a container
    return not remaining or end_and_confirm(attempt)


def end_and_confirm(attempt: Attempt) -> bool:
    """End the attempt's containers; return whether Docker or Podman confirms that none is left."""
    try:
        return end_containers(attempt)
    except RefusedError:
        return False


def ran_out_of_memory(attempt: Attempt) -> bool:
    """Return whether the attempt's container ran out of memory, as far as Docker or Podman reports it."""
    try:
        return any(
            run_docker(attempt, "inspect", "--format", "{{.State.OOMKilled}}", container).strip() == "true"
            for container in containers(attempt)
        )
    except RefusedError:
        return False


def run_docker(attempt: Attempt, *command: str) -> str:
    """Run a command of Docker or Podman and return its output.

    Raises:
        RefusedError: if the command fails or does not answer.
    """
    import subprocess

    program = (attempt.container or {})["program"]
    try:
        process = subprocess.run(
            [program, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{program} does not answer: {error}") from None
    if process.returncode != 0:
        message = process.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise RefusedError(f"{program} {command[0]}: {message or f'exit code {process.returncode}'}")
    return process.stdout.decode("utf-8", "replace")


# Processes.


def is_running(attempt: Attempt, claim: dict[str, Any]) -> bool | None:
    """Return whether the attempt's keeper or its container lives; None if unknown.

    If the keeper has died, its container is ended, because no other process enforces its limits.
    """
    alive = is_alive(claim)
    return None if alive is False and not end_and_confirm(attempt) else alive


def end(attempt: Attempt, grace: float) -> bool:
    """End an attempt's keeper and then all processes that it started; return whether none is left."""
    claim = attempt.claim()
    if claim is None:
        return True
    if is_alive(claim):
        for number, patience in ((signal.SIGTERM, grace + EXIT_MARGIN_S), (signal.SIGKILL, EXIT_MARGIN_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(claim["pid"], number)
            until = time.monotonic() + patience
            while is_alive(claim) and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
    return is_running(attempt, claim) is False and end_marked(attempt, claim)


def end_marked(attempt: Attempt, claim: dict[str, Any]) -> bool:
    """Kill every process of the attempt, in any session; return whether none is left."""
    marks = {f"{MARK}={claim['nonce']}".encode()}
    worker = read_json(attempt.runtime / "claim.json")
    if worker is not None:
        marks.add(f"{WORKER_MARK}={worker.get('nonce')}".encode())
    until = time.monotonic() + EXIT_MARGIN_S
    while True:
        remaining = [pid for pid in processes() if marks & environment_of(pid) and starttime(pid)]
        if not remaining or time.monotonic() > until:
            return not remaining
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # reap orphans, because this process is their subreaper
                pass
        time.sleep(POLL_INTERVAL_S)


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def is_alive(claim: dict[str, Any]) -> bool | None:
    """Return whether the process of the claim lives, not another one with its ID.

    Returns None for a process in another PID namespace, which is invisible.
    """
    if claim["boot_id"] != boot_id():
        return False
    if claim["host"] != host_id():
        return None
    return bool(starttime(claim["pid"]) == claim["starttime"])


def starttime(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a live process; None for a zombie or a missing one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def holder_is_alive() -> bool:
    """Return whether the process that holds the machine still lives; True if there is no such process."""
    pid, _, began = os.environ.get(HOLDER, "").partition(" ")
    return not pid or str(starttime(int(pid))) == began


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_id() -> str:
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}"


def die_with_parent() -> None:
    prctl(DEATH_SIGNAL, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# Files.


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def modification_time(path: Path) -> int:
    """Return the time in nanoseconds; 0 if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def main(*others: Callable[[Attempt, argparse.Namespace], dict[str, Any]]) -> int:
    """Execute the verb on the command line, one of this file or of `others`, and return the exit code."""
    verbs: dict[str, Callable[[Attempt, argparse.Namespace], dict[str, Any] | None]] = {
        verb.__name__: verb for verb in (start, keep, launch, inside, look, stop, remove, *others)
    }
    parser = argparse.ArgumentParser(prog="runner")
    parser.add_argument("verb", choices=sorted(verbs))
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--tree", default="")
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--lost", action="store_true")
    parser.add_argument("--lifetime", type=float, default=0.0)
    parser.add_argument("--unseen", type=float, default=0.0)
    parser.add_argument("--grace", type=float, default=0.0)
    parser.add_argument("--container", type=json.loads, default=None)
    options = parser.parse_args()
    os.umask(0o077)
    try:
        attempt = Attempt(options.workspace, options.run, options.epoch, options.container)
        answer = verbs[options.verb](attempt, options)
        code = 0
    except RefusedError as error:
        answer, code = {"refused": str(error), "kind": error.kind}, REFUSED
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            answer, code = {"refused": f"its disk is full ({error})", "kind": "disk_full"}, REFUSED
        elif options.verb == "receive" and error.errno in UNWRITABLE:
            answer, code = (
                {"refused": f"the workspace cannot be written ({error})", "kind": "workspace"},
                REFUSED,
            )
        else:
            raise
    if answer is not None:
        print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
