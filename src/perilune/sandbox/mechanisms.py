"""The sandbox's walls and the kernel mechanisms that implement them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

WALLS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "files": ("sees only Python's library and its scratch folder", ("namespaces", "landlock")),
    "writes": ("writes only in its scratch folder", ("namespaces", "landlock")),
    "names": ("does not learn which files, processes and users the host has", ("namespaces",)),
    "scratch": ("fills at most the size of the scratch folder", ("namespaces", "watch")),
    "network": ("reaches no other machine and no socket of this one", ("namespaces", "seccomp")),
    "sockets": ("opens no socket of other families: netlink, vsock, raw packets", ("seccomp",)),
    "signals": ("reaches only its own processes", ("namespaces", "own_user", "landlock_scopes")),
    "processes": ("has a limited number of processes and threads, or one process", ("counted", "seccomp")),
    "programs": ("starts no program of the host", ("seccomp", "landlock")),
    "whole tree": ("leaves no process behind", ("namespaces", "seccomp")),
    "memory": ("uses limited memory", ("control_group", "limits", "watch")),
    "time": ("uses limited wall-clock and CPU time", ("limits", "watch")),
    "output": ("writes limited output", ("watch",)),
    "privileges": ("has no capability and gains none", ("no_new_privileges",)),
    "kernel": ("cannot make dangerous system calls", ("seccomp",)),
}
"""For each wall: what the code is limited to, and the mechanisms, each of which suffices."""


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """The mechanisms that work on this machine.

    Attributes:
        namespaces: its own mounts, processes, network, System V IPC, host name and root.
        own_users: the namespaces belong to a user namespace, created without privileges.
        own_user: the code runs as a user that owns nothing else; needs root.
        counted: the kernel limits the number of the code's processes; it cannot for processes of root.
        landlock: version of Landlock, 0 for none.
        seccomp: system calls are filtered.
        control_group: version of control groups (cgroup) that limit memory, 0 for none.
    """

    namespaces: bool
    own_users: bool
    own_user: bool
    counted: bool
    landlock: int
    seccomp: bool
    control_group: int

    @property
    def names(self) -> frozenset[str]:
        """The available mechanisms, with the names that `WALLS` uses."""
        names = {name for name, value in asdict(self).items() if value}
        return frozenset(
            names
            | {"limits", "watch", "no_new_privileges"}
            | ({"landlock_scopes"} if self.landlock >= 6 else set())
        )

    def walls(self) -> dict[str, tuple[str, ...]]:
        """Return the mechanisms that implement each wall; none if the wall is missing."""
        names = self.names
        return {wall: tuple(name for name in parts if name in names) for wall, (_, parts) in WALLS.items()}
