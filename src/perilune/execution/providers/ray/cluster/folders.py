"""The folders of machines on a node's disk. The name of a folder identifies its owner.

Ray ends an actor without notice, which leaves its folder behind. The next machine that starts on the node
removes it, once the owning process and all processes it started are proven to have ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

# Ray's nodes have no Perilune, so these names of variables repeat those of `perilune.bundle`.
HOLDER = "PERILUNE_HOLDER"  # variable of everything that runs on a machine: the process that owns it
CORES = "PERILUNE_CORES"  # variable: CPU cores that Ray has reserved for the machine
NAME = re.compile(r"perilune-[0-9a-z-]+\.(\d+)\.(\d+)\.([0-9a-f]{16})\.([0-9a-f]{16})")


def create_home(key: str, workspace: str) -> str:
    """Create a folder for the machine `key`, owned by this process, and remove abandoned ones beside it."""
    base = Path(workspace).expanduser()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in base.iterdir():
        if is_abandoned(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    home = base / f"{key}.{os.getpid()}.{starttime(os.getpid())}.{boot()}.{host_id()}"
    home.mkdir(mode=0o700)
    return str(home)


def environment(home: str, cores: float = 0.0) -> dict[str, str]:
    """Return the variables for commands on a machine: the node's, without Ray's, and with the machine's home.

    The cache directory stays the node's, shared by all its machines.

    Args:
        cores: reserved CPU cores; 0 sets no limit.
    """
    rays = ("RAY_", "PYTHONBREAKPOINT")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(rays)}
    kept.setdefault("XDG_CACHE_HOME", str(Path("~/.cache").expanduser()))
    kept["HOME"] = home
    kept[HOLDER] = f"{os.getpid()} {starttime(os.getpid())}"
    if cores:
        kept[CORES] = str(cores)
    own = [path for path in kept.pop("PYTHONPATH", "").split(os.pathsep) if path and path != str(Path.cwd())]
    return {**kept, "PYTHONPATH": os.pathsep.join(own)} if own else kept


def is_abandoned(name: str) -> bool:
    """Return whether a folder's owner was a process of this node that has ended and left no child running."""
    match = NAME.fullmatch(name)
    if match is None or match[4] != host_id():
        return False
    if match[3] != boot():
        return True
    mark = f"{HOLDER}={match[1]} {match[2]}".encode()
    return starttime(int(match[1])) != int(match[2]) and not any(
        mark in environ for environ in list_environments()
    )


def list_environments() -> list[bytes]:
    """Return the environments of all processes that this user may inspect."""
    environments = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environments.append(path.read_bytes())
    return environments


def starttime(pid: int) -> int | None:
    """Return the ticks from boot to the start of a living process; None for a zombie or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot() -> str:
    """Return the identifier of this boot, as 16 hexadecimal digits."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:16]


def host_id() -> str:
    """Return 16 digits for this machine and process namespace: nodes may share home directories."""
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text()
    return hashlib.sha256(
        f"{machine} {os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}".encode()
    ).hexdigest()[:16]
