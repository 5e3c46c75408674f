"""Probes that try to exceed limits. Every attempt goes a little beyond its limit and stops by itself."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def memory(facts: Mapping[str, Any]) -> Attempts:
    """Allocate twice the memory limit."""

    def taken(pieces: int) -> str:
        kept = [bytearray(b"x") * (2 * facts["memory_bytes"] // pieces) for _ in range(pieces)]
        return f"{sum(map(len, kept)) >> 20} MiB"

    return {"at once": lambda: taken(1), "in pieces": lambda: taken(16)}


def memory_of_many(facts: Mapping[str, Any]) -> Attempts:
    """Allocate twice the memory limit in several processes, each below the limit."""
    import os
    import time

    def together() -> str:
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                kept = bytearray(b"x") * (facts["memory_bytes"] // 2)
                time.sleep(0.5)
                os._exit(not kept)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        if any(ended):
            raise MemoryError(f"ended with {ended}")
        return f"4 processes of {facts['memory_bytes'] >> 21} MiB"

    return {"together": together}


def memory_of_threads(facts: Mapping[str, Any]) -> Attempts:
    """Allocate twice the memory limit in processes that were started by threads."""
    import os
    import threading
    import time

    ended: list[int] = []

    def one() -> None:
        child = os.fork()
        if child == 0:
            kept = bytearray(b"x") * (facts["memory_bytes"] // 2)
            time.sleep(0.5)
            os._exit(not kept)
        ended.append(os.waitpid(child, 0)[1])

    def together() -> str:
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        one()
        for thread in threads:
            thread.join()
        if len(ended) < 3 or any(ended):
            raise MemoryError(f"ended with {ended}")
        return f"3 processes of {facts['memory_bytes'] >> 21} MiB"

    return {"together": together}


def memory_let_go(facts: Mapping[str, Any]) -> Attempts:
    """Allocate memory that belongs to no process: shared mappings, pages in pipes, huge pages."""
    import ctypes
    import mmap
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    piece = 1 << 21

    def mapped(flags: int, file: int = -1) -> int:
        start = libc.mmap(None, piece, 1 if file >= 0 else 3, flags, file, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(start)

    def shared(file: int = -1) -> str:
        for _ in range(2 * facts["memory_bytes"] // piece):
            start = mapped(mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if file < 0 else 0), file)
            sum(ctypes.string_at(start + offset, 1)[0] for offset in range(0, piece, 4096))
            libc.munmap(start + 4096, piece - 4096)
        return f"{2 * facts['memory_bytes'] >> 20} MiB"

    def in_pipes() -> str:
        class Piece(ctypes.Structure):
            _fields_ = (("place", ctypes.c_void_p), ("length", ctypes.c_size_t))

        reading, writing = os.pipe()
        start = mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        vector = Piece(start, 4096)
        if libc.vmsplice(writing, ctypes.byref(vector), 1, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        libc.munmap(start, piece)
        return f"{len(os.read(reading, 4096))} bytes of a page that was unmapped"

    def huge() -> str:
        mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
        return "huge pages"

    return {
        "shared mappings": shared,
        "the zero device": lambda: shared(os.open("/dev/zero", os.O_RDONLY)),
        "in pipes": in_pipes,
        "huge pages": huge,
    }


def shared_slots(facts: Mapping[str, Any]) -> Attempts:
    """Use machine-wide resources of the kernel."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)

    def asynchronous() -> str:
        context = ctypes.c_ulong(0)
        if libc.syscall(facts["calls"]["io_setup"], 1, ctypes.byref(context)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "a slot for asynchronous I/O"

    return {"asynchronous I/O": asynchronous}


def processes(facts: Mapping[str, Any]) -> Attempts:
    """Start more processes and threads than allowed."""
    import os
    import signal
    import threading

    most = facts["processes"] + 4

    def forked() -> str:
        children: list[int] = []
        try:
            while len(children) < most:
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return f"{len(children)} processes"

    def threaded() -> str:
        done = threading.Event()
        begun = []
        try:
            for _ in range(4 * most):
                thread = threading.Thread(target=done.wait)
                thread.start()
                begun.append(thread)
        finally:
            done.set()
        return f"{len(begun)} threads"

    return {"processes": forked, "threads": threaded}


def descriptors(facts: Mapping[str, Any]) -> Attempts:
    """Open more files than allowed."""
    import os

    def opened() -> str:
        kept: list[int] = []
        try:
            while len(kept) < facts["open_files"]:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        finally:
            for descriptor in kept:
                os.close(descriptor)
        return f"{len(kept)} descriptors"

    return {"open files": opened}


def disk(facts: Mapping[str, Any]) -> Attempts:
    """Write twice the size of the scratch folder for a moment: one file, many files, and empty folders."""
    import os
    import time
    from pathlib import Path

    def filled(count: int) -> str:
        folder = Path(f"full{count}")
        folder.mkdir()
        try:
            for number in range(count):
                (folder / str(number)).write_bytes(bytes(2 * facts["scratch_bytes"] // count))
            time.sleep(0.2)
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        return f"{2 * facts['scratch_bytes'] >> 20} MiB in {count} files"

    def named() -> str:
        made = []
        try:
            for number in range(2 * facts["scratch_files"]):
                os.mkdir(f"empty{number}")  # noqa: PTH102
                made.append(number)
            time.sleep(0.2)
        finally:
            for number in made:
                os.rmdir(f"empty{number}")  # noqa: PTH106
        return f"{len(made)} folders"

    return {"one file": lambda: filled(1), "many files": lambda: filled(8), "names": named}


def processor(facts: Mapping[str, Any]) -> Attempts:
    """Use more CPU time than allowed."""
    import time

    def burnt() -> str:
        until = time.process_time() + facts["cpu_seconds"] + 0.5
        while time.process_time() < until:
            pass
        return f"{time.process_time():.1f} s"

    return {"a loop": burnt}


def clock(facts: Mapping[str, Any]) -> Attempts:
    """Run longer than allowed, ignoring every signal that can be ignored."""
    import signal
    import time

    def slept() -> str:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(facts["seconds"] + 0.5)
        return "slept"

    return {"sleep through": slept}


def output(facts: Mapping[str, Any]) -> Attempts:
    """Write ten million lines."""
    import os

    def flooded() -> str:
        lines = b"line\n" * 10_000
        for _ in range(1_000):
            os.write(1, lines)
        return "10,000,000 lines"

    return {"lines": flooded}
