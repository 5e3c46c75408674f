"""Compile C code for this processor once, and load it.

The library is cached in the user's cache folder under a digest of sources, compiler, flags and processor, so
other versions and machines never load it. Without a C compiler, torch computes everything.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_KERNELS = Path(__file__).parent / "kernels.c"
# No flag may let the compiler reorder sums: the bits of an element must not depend on its position.
# `avoid-fma-max-bits=0`: for some processors, GCC otherwise leaves the last products of short chains unfused,
# so that bits depend on the length of a loop.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
_THIS_PROCESSOR = (
    ("-march=native", "-mprefer-vector-width=512", "--param=avoid-fma-max-bits=0")
    if platform.machine() == "x86_64"
    else ("-mcpu=native",)
)
_COMPILE_TIMEOUT_S = 300  # compilation takes 20 s on an idle machine


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library, or the reason why there is none.

    Attributes:
        library: the shared library, or None.
        reason: why the library is missing, or its path.
    """

    library: ctypes.CDLL | None
    reason: str


def native() -> Native:
    """Return the kernels, which are compiled on the first call. `PERILUNE_NATIVE=0` disables them."""
    return load_library(_KERNELS)


def missing_kernels_message(reason: str) -> str:
    """Return the message for users whose machine has no kernels."""
    return f"the C kernels are missing, so torch computes everything, about 3x slower: {reason}"


@functools.cache
def load_library(unit: Path) -> Native:
    """Compile the C file `unit` if the cache has no library of it, and load the library."""
    if os.environ.get("PERILUNE_NATIVE") == "0":
        return Native(None, "switched off by PERILUNE_NATIVE=0")
    compiler = _compiler()
    if compiler is None:
        return Native(None, "no C compiler found (install gcc or clang, or set CC)")
    try:
        path = _cached(compiler, unit)
        try:
            return Native(ctypes.CDLL(str(path)), str(path))
        except OSError:  # incomplete, for example because the disk was full
            path.unlink()
            path = _cached(compiler, unit)
            return Native(ctypes.CDLL(str(path)), str(path))
    except (OSError, subprocess.SubprocessError, _CompilerError) as error:
        return Native(None, f"{' '.join(compiler)} could not build {unit.name}: {error}")


class _CompilerError(Exception):
    pass


def _compiler() -> list[str] | None:
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    path = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return None if path is None else [path]


def _cached(compiler: list[str], unit: Path) -> Path:
    folder = _cache_folder()
    path = folder / f"{_digest(compiler, unit)}.so"
    if path.exists() and path.stat().st_uid == os.getuid():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch) / "library.so"
        _compile(compiler, unit, library)
        library.replace(path)
    return path


def _compile(compiler: list[str], unit: Path, target: Path) -> None:
    errors = ""
    for processor in (_THIS_PROCESSOR, _THIS_PROCESSOR[:1], ()):
        command = [*compiler, *_FLAGS, *processor, str(unit), "-o", str(target), "-lm", "-lpthread"]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
        if result.returncode == 0:
            return
        errors = result.stderr.strip()[-2000:]
    raise _CompilerError(errors)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "perilune" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"perilune-kernels-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise _CompilerError(f"{folder} belongs to another user")
    return folder


def _digest(compiler: list[str], unit: Path) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
    ).stdout
    facts = [*compiler, version, *_FLAGS, *_THIS_PROCESSOR, _processor(), sys.platform]
    digest = hashlib.sha256("\0".join([*facts, unit.name]).encode())
    for source in sorted(unit.parent.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Return the model and instruction sets of the processor, on which compiled code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))
