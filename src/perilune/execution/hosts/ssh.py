"""A machine reached with OpenSSH: the system's `ssh`, with the user's configuration.

The user's ssh config (address, ProxyJump, keys) applies. The options added here are strict: no prompts, no
unknown or changed host keys, no forwarding, one shared connection per machine.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from perilune.errors import RequestError
from perilune.execution.hosts.local import NOT_FOUND_EXIT_CODE, LocalHost
from perilune.execution.hosts.protocol import Answer, HostRefusedError, HostUnreachableError
from perilune.files import write_atomic
from perilune.frozen import Frozen

SSH_OPTIONS = {
    "BatchMode": "yes",
    "CheckHostIP": "no",
    "ClearAllForwardings": "yes",
    "ConnectTimeout": "10",
    "ControlMaster": "auto",
    "ControlPersist": "60",
    "EscapeChar": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "5",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
}
ASK_SECONDS = 20.0  # timeout for asking a jump host
SSH_FAILED_EXIT_CODE = 255  # ssh's own exit code: the fate of the command is unknown
# ssh's messages when the connection ended before an sshd answered.
CLOSED_MESSAGES = ("kex_exchange_identification", "Connection closed by UNKNOWN")
# ssh's messages when the machine is the wrong one or refuses access.
REFUSAL_MESSAGES = {
    "IDENTIFICATION HAS CHANGED": "its host key has changed",
    "Host key verification failed": "its host key is unknown or not the pinned one",
    "Permission denied": "SSH authentication was refused",
    "Too many authentication failures": "SSH authentication was refused",
    "no matching host key type": "it has no host key of the pinned type",
    "Bad configuration option": "the ssh configuration is wrong",
}


class SshSettings(Frozen):
    """Settings for reaching a machine. The user's ssh config supplies everything not set here."""

    host: str = Field(
        pattern=r"^[A-Za-z0-9_:][A-Za-z0-9._:%-]*$", description="address, or name in the ssh config"
    )
    port: int | None = Field(None, ge=1, le=65535, description="port of the ssh server on the machine")
    user: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="login name on the machine"
    )
    identity: str | None = Field(None, description="file of the private key")
    host_key: str | None = Field(
        None,
        pattern=r"^(ssh|ecdsa|sk)-[A-Za-z0-9@.-]+ [A-Za-z0-9+/=]+$",
        description='public key of the machine, "ssh-ed25519 AAAA..."; by default the key must be in'
        " known_hosts",
    )
    config: str | None = Field(None, description="ssh config file to use instead of the user's")


class SshHost:
    """The machine described by `settings`.

    Args:
        folder: for files with pinned keys.
        learn: trust on first use: pin the key that a previously unknown machine shows at first contact.

    Raises:
        RequestError: there is no private folder for connections.
    """

    def __init__(self, settings: SshSettings, folder: Path, *, learn: bool = False) -> None:
        self.settings = settings
        self.name = f"ssh:{settings.host}"
        self._here = LocalHost(self.name)
        identity = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]
        options = {**SSH_OPTIONS, "ControlPath": _quote(private_folder() / identity)}
        if settings.host_key is not None or learn:
            pinned = folder / f"{identity}.known_hosts"
            options |= {"HostKeyAlias": identity, "UserKnownHostsFile": _quote(pinned)}
            options |= {"GlobalKnownHostsFile": os.devnull}
            if settings.host_key is not None:
                write_atomic(pinned, f"{identity} {settings.host_key}\n")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                options["StrictHostKeyChecking"] = "accept-new"
        self._command = ["ssh", "-T"]
        if settings.config is not None:
            self._command += ["-F", str(Path(settings.config).expanduser())]
        for name, value in options.items():
            self._command += ["-o", f"{name}={value}"]
        if settings.identity is not None:
            identity_file = str(Path(settings.identity).expanduser())
            self._command += ["-i", identity_file, "-o", "IdentitiesOnly=yes"]
        self._command += ["-p", str(settings.port)] if settings.port is not None else []
        self._command += ["-l", settings.user] if settings.user is not None else []

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        """Implement `Host.run`. The machine's login shell gets one line with every argument quoted."""
        line = [*self._command, "--", self.settings.host, shlex.join(command)]
        try:
            answer = self._here.run(line, source=source, sink=sink, timeout=timeout)
        except HostUnreachableError:
            self.disconnect()
            raise
        if answer.exit_code == NOT_FOUND_EXIT_CODE and shutil.which("ssh") is None:
            raise RequestError("ssh is not installed on this machine", remedy="install OpenSSH's client")
        if answer.exit_code == SSH_FAILED_EXIT_CODE:
            raise self._failure(answer.errors)
        return answer

    def disconnect(self) -> None:
        """Close the shared connection; the next command opens a new one."""
        command = [*self._command, "-O", "exit", "--", self.settings.host]
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)

    def _failure(self, errors: str) -> HostRefusedError | HostUnreachableError:
        errors += self._jump_host_errors(errors)
        meaning = next((meaning for words, meaning in REFUSAL_MESSAGES.items() if words in errors), "")
        relevant = [line for line in errors.strip().splitlines() if not line.startswith(CLOSED_MESSAGES)]
        lines = relevant or ["the connection was lost"]
        if not meaning:
            return HostUnreachableError(lines[-1], where=self.name)
        line = [line for line in lines if any(words in line for words in REFUSAL_MESSAGES)][-1]
        return HostRefusedError(f"{meaning} ({line})", where=self.name, remedy=self._remedy(meaning))

    def _jump_host_errors(self, errors: str) -> str:
        """Return the errors of a jump host, which ssh hides if the connection through it is shared."""
        if CLOSED_MESSAGES[0] not in errors:
            return ""
        program, *options = self._command
        command = [program, "-o", "ControlPath=none", *options, "--", self.settings.host, "true"]
        try:
            asked = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS, check=False
            )
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return ""
        return asked.stderr.decode("utf-8", "replace")

    def _remedy(self, meaning: str) -> str:
        if "host key" not in meaning:
            return f"make `ssh {self.settings.host}` work without prompts"
        return (
            "if the machine was reinstalled, compare its key there (ssh-keygen -lf"
            " /etc/ssh/ssh_host_ed25519_key.pub) and write it into the template's host_key or into"
            " known_hosts; otherwise do not connect"
        )


def _quote(path: Path) -> str:
    """Return a path as the value of an option, in which spaces separate files and % begins a token."""
    return '"{}"'.format(str(path).replace("%", "%%"))


def private_folder() -> Path:
    """Return a folder for sockets with a short path, which only this user can enter.

    Raises:
        RequestError: the folder belongs to another user, or others can access it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = os.access(runtime, os.W_OK)  # not after `su`, or in a job of cron
    temporary = Path(tempfile.gettempdir(), f"perilune-{os.getuid()}")
    folder = Path(runtime, "perilune") if is_usable else temporary
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RequestError(
            "the folder for ssh connections belongs to another user, or others can access it",
            where=str(folder),
            remedy="remove it; Perilune then creates a private one",
        )
    return folder
