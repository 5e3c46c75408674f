"""System call filters for untrusted code (seccomp), enforced by the kernel.

A filter denies a list of calls, and all calls that Linux got after 6.12, and allows the rest. The list
contains calls that reach other processes, programs, the network, mounts, namespaces, keys, clocks and
modules; calls that use machine-wide resources (slots for asynchronous I/O, locks and watches on shared files,
System V objects); and parts of the kernel with a history of exploits. Sockets of all families are refused, so
the network is out of reach even without namespaces, and so is vsock, which no namespace contains. The only
exception is a connected pair of stream sockets, which asyncio needs. Unlike a datagram pair, it cannot be
redirected to another address.
https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import errno
import platform
import struct
from collections.abc import Mapping, Sequence

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_Numbers = tuple[int | None, int | None]  # of a call, on x86_64 and on aarch64
_REVIEWED_BELOW = 463  # the calls up to Linux 6.12; later ones, and those of the x32 ABI, do not exist here


def _calls(table: str) -> dict[str, _Numbers]:
    """Parse "name number number" separated by commas: numbers on x86_64 and aarch64, "-" for none."""
    calls = (call.split() for call in table.replace("\n", " ").split(","))
    return {name: (_number(first), _number(second)) for name, first, second in calls}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


_DENIED = _calls("""
accept 43 202, accept4 288 242, acct 163 89, add_key 248 217, bind 49 200, cachestat 451 451,
connect 42 203, flock 73 32, inotify_init 253 -, inotify_init1 294 26, io_setup 206 0,
io_submit 209 2, listen 50 201, listmount 458 458, migrate_pages 256 238, move_pages 279 239,
statmount 457 457, vmsplice 278 75, adjtimex 159 171, bpf 321 280, chroot 161 51,
clock_adjtime 305 266, clock_settime 227 112, delete_module 176 106, execve 59 221,
execveat 322 281, fanotify_init 300 262, finit_module 313 273, fsconfig 431 431, fsmount 432 432,
fsopen 430 430, fspick 433 433, init_module 175 105, io_uring_enter 426 426,
io_uring_register 427 427, io_uring_setup 425 425, kcmp 312 272, kexec_file_load 320 294,
kexec_load 246 104, keyctl 250 219, memfd_create 319 279, memfd_secret 447 447, mount 165 40,
mount_setattr 442 442, move_mount 429 429, mq_open 240 180, mq_unlink 241 181, msgctl 71 187,
msgget 68 186, msgrcv 70 188, msgsnd 69 189, name_to_handle_at 303 264, open_by_handle_at 304 265,
open_tree 428 428, perf_event_open 298 241, personality 135 92, pidfd_getfd 438 438,
pidfd_open 434 434, pidfd_send_signal 424 424, pivot_root 155 41, process_madvise 440 440,
process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60,
quotactl_fd 443 443, reboot 169 142, request_key 249 218, semctl 66 191, semget 64 190,
semop 65 193, semtimedop 220 192, setdomainname 171 162, sethostname 170 161, setns 308 268,
settimeofday 164 170, shmat 30 196, shmctl 31 195, shmget 29 194, socket 41 198, swapoff 168 225,
swapon 167 224, syslog 103 116, umount2 166 39, unshare 272 97, userfaultfd 323 282
""")
_NEW_GROUP: dict[str, _Numbers] = {"setpgid": (109, 154), "setsid": (112, 157)}
# Calls that change what the same user owns, if files and processes are visible.
_OF_OTHERS = _calls("""
chmod 90 -, chown 92 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54,
fremovexattr 199 16, fsetxattr 190 7, futimesat 261 -, lchown 94 -, lremovexattr 198 15, lsetxattr 189 6,
removexattr 197 14, setxattr 188 5, utime 132 -, utimensat 280 88, utimes 235 -, ioprio_set 251 30,
sched_setaffinity 203 122, sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119,
setpriority 141 140
""")
_OWN_LIMITS = (302, 261)  # prlimit64, allowed only for process 0, which is the caller
_SIGNALS: dict[str, _Numbers] = {
    "kill": (62, 129),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131),
}
_TKILL: dict[str, _Numbers] = {"tkill": (200, 130)}  # takes a thread without its process
_FCNTL, _SOCKETPAIR, _MMAP = (72, 25), (53, 199), (9, 222)
_FCNTL_DENIED = (
    *(5, 36),  # F_GETLK, F_OFD_GETLK: read a lock that another sandbox holds on a library file
    *(8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel signal another process
    *(1024, 1026),  # F_SETLEASE, F_NOTIFY: observe which files others open
    1031,  # F_SETPIPE_SZ: memory that belongs to no process
)
_STREAM_PAIR = (1, 1)  # AF_UNIX, SOCK_STREAM
_SOCKET_KIND = 0xF  # bits of the second argument; the others are flags
_SHARED, _ANONYMOUS, _HUGE = 0x01, 0x20, 0x40000
_NEW_PROCESS: dict[str, _Numbers] = {"fork": (57, None), "vfork": (58, None)}  # besides `clone`
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_NAMESPACES, _CLONE_THREAD = 0x7E020000, 0x10000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _DENY, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def call_filter(*, among_others: bool, no_processes: bool) -> bytes:
    """Return the filter as a BPF program for this machine's architecture; empty for an unknown architecture.

    Args:
        among_others: the process shares a PID namespace with others. Refuse to leave the process group, so
            that killing the group kills all, and to change other processes' priorities or the owners,
            permissions and times of files.
        no_processes: refuse new processes. Threads are allowed.
    """
    refused = _DENIED | (_NEW_GROUP | _OF_OTHERS if among_others else {})
    refused |= _NEW_PROCESS if no_processes else {}
    clone = [_argument(0), _if(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), _return(_DENY)]
    looked_into: dict[_Numbers, list[bytes]] = {
        _CLONE: clone + (_allow_only_threads() if no_processes else []),
        _OWN_LIMITS: _deny_unless(0),
        _FCNTL: [_argument(1), *(step for command in _FCNTL_DENIED for step in _deny_if(command))],
        _SOCKETPAIR: _stream_pair(),
        _MMAP: _mappings(),
    }
    return _program(refused, looked_into)


def single_process_filter(process: int) -> bytes:
    """Return a filter to add to `call_filter`: no new processes, and signals only to `process`."""
    looked_into = dict.fromkeys(_SIGNALS.values(), _deny_unless(process)) | {_CLONE: _allow_only_threads()}
    return _program(_NEW_PROCESS | _TKILL, looked_into)


def _program(refused: Mapping[str, _Numbers], looked_into: Mapping[_Numbers, Sequence[bytes]]) -> bytes:
    """Deny the calls of `refused`, and each call of `looked_into` if its steps deny the arguments."""
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        return b""
    column = list(_ARCHITECTURE).index(machine)
    numbers = [number for call in refused.values() if (number := call[column]) is not None]
    return b"".join(
        [
            *(_load(_ARCH), _if(_EQUAL, _ARCHITECTURE[machine], 1, 0), _return(_DENY)),
            *(_load(_NUMBER), _if(_AT_LEAST, _REVIEWED_BELOW, 0, 1), _return(_UNKNOWN)),
            *(step for number in numbers for step in _deny_if(number)),
            *(_if(_EQUAL, _CLONE3[column], 0, 1), _return(_UNKNOWN)),  # makes libraries use clone
            *(step for call, steps in looked_into.items() for step in _look_into(call[column] or 0, steps)),
            _return(_ALLOW),
        ]
    )


def denied_calls() -> dict[str, int]:
    """Return names and numbers of the calls that are always denied; none on an unknown architecture."""
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        return {}
    column = list(_ARCHITECTURE).index(machine)
    return {name: number for name, numbers in _DENIED.items() if (number := numbers[column]) is not None}


def _look_into(number: int, steps: Sequence[bytes]) -> list[bytes]:
    """Filter one call by its arguments: `steps` deny it, or it is allowed."""
    return [_if(_EQUAL, number, 0, len(steps) + 1), *steps, _return(_ALLOW)]


def _deny_if(value: int) -> tuple[bytes, bytes]:
    return _if(_EQUAL, value, 0, 1), _return(_DENY)


def _allow_only_threads() -> list[bytes]:
    return [_argument(0), _if(_ANY_BIT, _CLONE_THREAD, 1, 0), _return(_DENY)]


def _deny_unless(value: int) -> list[bytes]:
    return [_argument(0), _if(_EQUAL, value, 1, 0), _return(_DENY)]


def _stream_pair() -> list[bytes]:
    family, kind = _STREAM_PAIR
    return [
        *_deny_unless(family),
        *(_argument(1), struct.pack("=HBBI", _AND, 0, 0, _SOCKET_KIND)),
        *(_if(_EQUAL, kind, 1, 0), _return(_DENY)),
    ]


def _mappings() -> list[bytes]:
    """Deny huge pages, and shared anonymous pages, which no process counts after a partial unmapping."""
    steps = [_argument(3), _if(_ANY_BIT, _HUGE, 0, 1), _return(_DENY)]
    return [*steps, _if(_ANY_BIT, _ANONYMOUS, 0, 2), _if(_ANY_BIT, _SHARED, 0, 1), _return(_DENY)]


def _argument(place: int) -> bytes:
    """Load the lower half of an argument. The filtered calls use no more."""
    return _load(_ARGUMENTS + 8 * place)


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _if(test: int, value: int, then: int, otherwise: int) -> bytes:
    """Skip `then` steps where the test holds, else `otherwise`."""
    return struct.pack("=HBBI", test, then, otherwise, value)


def _return(verdict: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, verdict)
