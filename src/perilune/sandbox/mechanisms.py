"""What this machine has to build walls from, and which walls stand where some of it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

WALLS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "files": ("sees and reads Python's library and its scratch folder alone", ("namespaces", "landlock")),
    "writes": ("writes nowhere but in its scratch folder", ("namespaces", "landlock")),
    "names": ("does not learn which files, processes and users the host has", ("namespaces",)),
    "scratch": ("fills no more than the scratch folder's size", ("namespaces", "watch")),
    "network": ("reaches no machine, and no socket of this one", ("namespaces", "seccomp")),
    "sockets": ("opens no socket of other families: netlink, vsock, raw packets", ("seccomp",)),
    "signals": ("reaches no process but its own", ("namespaces", "own_user", "landlock_scopes")),
    "processes": (
        "has so many processes and threads at a time, or no process but one",
        ("counted", "seccomp"),
    ),
    "programs": ("starts no program of the host", ("seccomp", "landlock")),
    "whole tree": ("leaves no process behind", ("namespaces", "seccomp")),
    "memory": ("takes so much memory", ("limits", "watch")),
    "time": ("ends in time, on the clock and the processor", ("limits", "watch")),
    "output": ("is heard so long, and no longer", ("watch",)),
    "privileges": ("holds no capability, and gains none", ("no_new_privileges",)),
    "kernel": ("may not make the calls that lead out", ("seccomp",)),
}
"""What each wall keeps, and the mechanisms of which one suffices."""


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What a sandbox is made of here.

    Attributes:
        namespaces: mounts, processes, network, System V IPC and host name of its own, and a root of its own.
        own_users: the namespaces belong to a user namespace, made without privileges.
        own_user: it runs as a user whom nothing else belongs to; takes root.
        counted: the kernel can limit its processes apart from those of others; it does not count root's.
        landlock: version of Landlock, 0 for none.
        seccomp: calls to the kernel are filtered.
    """

    namespaces: bool
    own_users: bool
    own_user: bool
    counted: bool
    landlock: int
    seccomp: bool

    @property
    def names(self) -> frozenset[str]:
        """Those that are there, in the words of `WALLS`."""
        found = {name for name, value in asdict(self).items() if value}
        return frozenset(
            found
            | {"limits", "watch", "no_new_privileges"}
            | ({"landlock_scopes"} if self.landlock >= 6 else set())
        )

    def walls(self) -> dict[str, tuple[str, ...]]:
        """Each wall with the mechanisms that keep it; none where it is missing."""
        names = self.names
        return {wall: tuple(one for one in made_of if one in names) for wall, (_, made_of) in WALLS.items()}
