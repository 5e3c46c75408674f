"""A temporary PostgreSQL server for tests, on a Unix socket in a temporary folder."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534  # the server refuses to run as root


def binaries() -> Path | None:
    """The folder of the server's programs; None without a server."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    return programs[-1].parent if programs else Path(on_path).parent if on_path else None


@contextmanager
def server() -> Iterator[str]:
    """The URL of a running server's database."""
    programs = binaries()
    assert programs is not None, "install PostgreSQL's server: apt-get install postgresql"
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="perilune-pg-"))  # short: a socket's path has 107 bytes
    try:
        if other:
            os.chown(folder, NOBODY, NOBODY)

        def run(*command: str) -> None:
            program = [str(programs / command[0]), *command[1:]]
            subprocess.run(program, check=True, cwd=folder, stdout=subprocess.DEVNULL, **other)  # type: ignore[call-overload]

        data = str(folder / "data")
        run(
            "initdb",
            "-D",
            data,
            "-U",
            "perilune",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
        )
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://perilune@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
