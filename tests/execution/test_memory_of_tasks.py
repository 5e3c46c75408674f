"""Tasks reuse freed memory, because allocating new pages takes a quarter of a training step."""

import json
import os
import subprocess
import sys

import pytest

from perilune.execution.task_environment import MALLOC_TUNABLES

PROGRAM = """
import ctypes, json, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([faults() for _ in range(4)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GLIBC_TUNABLES is of glibc")
def test_malloc_tunables_reuse_freed_pages() -> None:
    def run(tunables: str) -> list[int]:
        environment = {**os.environ, "GLIBC_TUNABLES": tunables}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
        )
        pages: list[int] = json.loads(done.stdout)
        return pages

    first, *later = run(MALLOC_TUNABLES)
    assert first >= 32  # 64 MiB in pages of 2 MiB
    assert max(later) <= 2
    assert min(run("")) >= 32  # without the tunables, every block gets new pages
