"""Share one copy of Perilune's wheel between all frozen bundles of a home, by digest.

Attempts have copies of their own, because a task could write to a shared file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from perilune.control.record.home import Home
from perilune.files import sha256_file

WHEELS = "wheels"  # folder in the home


def share_wheel(home: Home, bundle: Path) -> None:
    """Replace the wheel of a frozen bundle with a hard link to the same wheel of an earlier bundle."""
    for wheel in (bundle / "scripts").glob("*.whl"):
        digest, mode = sha256_file(wheel), wheel.stat().st_mode
        kept, link = home.root / WHEELS / digest, wheel.with_name(f".{wheel.name}.tmp")
        kept.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # no hard links on this file system, or the other was just removed
            if kept.exists() and (kept.stat().st_mode != mode or sha256_file(kept) != digest):
                kept.unlink()
            if not kept.exists():
                os.link(wheel, kept)
            else:
                os.link(kept, link)
                link.replace(wheel)


def remove_unused_wheels(home: Home) -> None:
    """Remove wheels that no bundle uses."""
    for kept in (home.root / WHEELS).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if kept.stat().st_nlink == 1:
                kept.unlink()
