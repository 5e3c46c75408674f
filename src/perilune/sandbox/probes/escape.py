"""Probes that try to escape, or to gain privileges."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def privileges(facts: Mapping[str, Any]) -> Attempts:
    """Become another user, gain capabilities or raise limits."""
    import ctypes
    import os
    import resource

    libc = ctypes.CDLL(None, use_errno=True)

    def capabilities() -> str:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capget(header, data)
        return "".join(f"{word:08x}" for word in data).strip("0")

    def done(call: Callable[..., object], *arguments: Any) -> str:
        call(*arguments)
        return f"{call.__name__} was allowed"

    def raised() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 1 << 19))
        return "more descriptors"

    return {
        "become root": lambda: os.getuid() and done(os.setuid, 0),
        "other groups": lambda: done(os.setgroups, [0]),
        "capabilities": capabilities,
        "setuid programs": lambda: libc.prctl(39, 0, 0, 0, 0) == 0 and "nothing keeps it from them",
        "higher limits": raised,
        "higher priority": lambda: done(os.setpriority, os.PRIO_PROCESS, 0, max(-20, os.nice(0) - 5)),
    }


def namespaces(facts: Mapping[str, Any]) -> Attempts:
    """Mount file systems and create namespaces."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)

    def called(result: int) -> str:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "allowed"

    def mounted() -> str:
        os.makedirs("mounted", exist_ok=True)  # noqa: PTH103
        called(libc.mount(b"tmpfs", b"mounted", b"tmpfs", 0, None))
        return called(libc.umount2(b"mounted", 2))

    def cloned() -> str:
        child = libc.syscall(facts["clone"], 0x10000000 | 17, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        called(child)
        os.waitpid(child, 0)
        return "a child in a user namespace"

    def shared() -> str:
        child = os.fork()
        if child == 0:
            os._exit(0 if libc.unshare(0x10000000) == 0 else 1)
        if os.waitpid(child, 0)[1]:
            raise OSError("refused")
        return "a user namespace"

    return {
        "mount": mounted,
        "a user namespace": shared,
        "a user namespace by clone": cloned,
        "another root": lambda: called(libc.chroot(b"/")),
        "the owner's namespaces": lambda: os.open(f"/proc/{facts['owner']}/ns/mnt", os.O_RDONLY),
    }


def tracing(facts: Mapping[str, Any]) -> Attempts:
    """Trace another process as a debugger."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)

    def traced(request: int, process: int) -> str:
        libc.ptrace.restype = ctypes.c_long
        if libc.ptrace(request, process, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        libc.ptrace(17, process, 0, 0)  # let go
        return f"process {process}"

    return {
        "another process": lambda: traced(0x4206, facts["victim"]),
        "the parent": lambda: traced(0x4206, os.getppid()),
    }


def kernel(facts: Mapping[str, Any]) -> Attempts:
    """Make system calls with a history of exploits, or that reach machine-wide resources."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    wanted = {
        "bpf": (0, 0, 0),
        "perf_event_open": (0, 0, -1, -1, 0),
        "userfaultfd": (1,),
        "io_uring_setup": (1, 0),
        "keyctl": (0, -3, 1),
        "add_key": (0, 0, 0, 0, -3),
        "kcmp": (0, 0, 0, 0, 0),
        "open_by_handle_at": (-1, 0, 0),
        "memfd_create": (0, 0),
        "shmget": (0x50524F42, 4096, 0),
        "shmat": (-1, 0, 0),
        "semctl": (-1, 0, 0, 0),
        "msgctl": (-1, 0, 0),
        "pidfd_open": (facts["victim"], 0),
        "name_to_handle_at": (-100, 0, 0, 0, 0),
        "personality": (0xFFFFFFFF,),
        "syslog": (10, 0, 0),
        "process_vm_writev": (facts["victim"], 0, 0, 0, 0, 0),
        "kexec_load": (0, 0, 0, 0xFFFF0000),
    }

    def called(name: str) -> str:
        ctypes.set_errno(0)
        result = libc.syscall(facts["calls"][name], *map(ctypes.c_long, wanted[name]))
        if ctypes.get_errno() in (1, 38):  # EPERM, ENOSYS
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return f"answered {result}, {os.strerror(ctypes.get_errno())}"

    return {name: lambda name=name: called(name) for name in wanted if name in facts["calls"]}  # type: ignore[misc]


def programs(facts: Mapping[str, Any]) -> Attempts:
    """Start programs of the host."""
    import subprocess
    import sys

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, check=True, timeout=5).stdout.decode()

    return {
        "a shell": lambda: run("/bin/sh", "-c", "echo a shell"),
        "Python": lambda: run(sys.executable, "-c", "print('Python')"),
        "the loader": lambda: run("/lib64/ld-linux-x86-64.so.2", "--version"),
    }


def daemon(facts: Mapping[str, Any]) -> Attempts:
    """Outlive the run: fork twice, start a new session and ignore all signals."""
    import os
    import signal
    import time

    def begun() -> str:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                    signal.signal(number, signal.SIG_IGN)
                os.closerange(0, 3)
                os.write(writing, b"x")
                time.sleep(3)
            os._exit(0)
        os.read(reading, 1)
        return ""  # the audit checks from outside whether it survives

    return {"double fork": begun}
