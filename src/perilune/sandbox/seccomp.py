"""Which calls to the kernel untrusted code may not make: a seccomp filter, kept by the kernel.

It denies a list and allows the rest: what would reach other processes, programs, the network, mounts,
namespaces, keys, clocks and modules, and parts of the kernel with a history of ways out. Every socket is
refused, of whatever family, so that the network is out of reach also where no namespace can be had (and so is
vsock, which no namespace contains).
https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ONLY_X86_64_BELOW = 0x40000000  # numbers from here on are of its 32-bit variant

# fmt: off
_NEVER = {  # name: number on x86_64, on aarch64
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "delete_module": (176, 106),
    "execve": (59, 221), "execveat": (322, 281),
    "fanotify_init": (300, 262), "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "shmget": (29, 194), "socket": (41, 198), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}
# fmt: on
_NEW_GROUP = {"setpgid": (109, 154), "setsid": (112, 157)}
_OF_OTHERS = {  # what its user may change, where the host's files and processes are in sight
    "chmod": (90, None), "chown": (92, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "futimesat": (261, None), "lchown": (94, None), "lremovexattr": (198, 15), "lsetxattr": (189, 6),
    "removexattr": (197, 14), "setxattr": (188, 5), "utime": (132, None), "utimensat": (280, 88),
    "utimes": (235, None),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "setpriority": (141, 140),
}  # fmt: skip
_OWN_LIMITS = (302, 261)  # prlimit64: of itself, which is process 0, alone
_NEW_PROCESS = {"fork": (57, None), "vfork": (58, None)}  # what is not in `clone`
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_NAMESPACES, _CLONE_THREAD = 0x7E020000, 0x10000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # where they stand in struct seccomp_data


def call_filter(*, among_others: bool, no_processes: bool) -> bytes:
    """The filter as a BPF program of this machine's architecture; empty where that is not known.

    Args:
        among_others: it shares a process namespace: refuse to leave the process group, so that killing the
            group kills all, and to change the priority of others, or owners, permissions and times of files.
        no_processes: refuse new processes; threads are allowed.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        return b""
    column = list(_ARCHITECTURE).index(machine)
    refused = _NEVER | (_NEW_GROUP | _OF_OTHERS if among_others else {})
    refused |= _NEW_PROCESS if no_processes else {}
    numbers = [number for call in refused.values() if (number := call[column]) is not None]
    clone = [_if(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), _return(_DENY)]
    if no_processes:
        clone += [_if(_ANY_BIT, _CLONE_THREAD, 1, 0), _return(_DENY)]
    return b"".join(
        [
            *(_load(_ARCH), _if(_EQUAL, _ARCHITECTURE[machine], 1, 0), _return(_DENY)),
            *(_load(_NUMBER), _if(_AT_LEAST, _ONLY_X86_64_BELOW, 0, 1), _return(_DENY)),
            *(step for number in numbers for step in (_if(_EQUAL, number, 0, 1), _return(_DENY))),
            *(_if(_EQUAL, _CLONE3[column], 0, 1), _return(_UNKNOWN)),  # libraries then use clone
            *(_if(_EQUAL, _OWN_LIMITS[column], 0, 4), _load(_FIRST_ARGUMENT), _if(_EQUAL, 0, 1, 0)),
            *(_return(_DENY), _return(_ALLOW)),
            _if(_EQUAL, _CLONE[column], 0, len(clone) + 1),
            *(_load(_FIRST_ARGUMENT), *clone),
            _return(_ALLOW),
        ]
    )


def denied_calls() -> dict[str, int]:
    """Names and numbers here of the calls that are always denied; none where the machine is not known."""
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        return {}
    column = list(_ARCHITECTURE).index(machine)
    return {name: numbers[column] for name, numbers in _NEVER.items()}


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _if(test: int, value: int, then: int, otherwise: int) -> bytes:
    """Skip `then` steps where the test holds, else `otherwise`."""
    return struct.pack("=HBBI", test, then, otherwise, value)


def _return(verdict: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, verdict)
