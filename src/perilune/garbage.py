"""Garbage collection in processes that import much."""

import atexit
import gc


def collect_seldom() -> None:
    """Collect garbage less often, and not at the exit of the process.

    By default, collection is a tenth of the time to import torch or to load a stage. At exit, Python would
    collect garbage in all modules, which takes 0.4 s with torch.
    """
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
