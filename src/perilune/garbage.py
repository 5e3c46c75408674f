"""Settings of the garbage collector for processes that import large packages."""

import atexit
import gc
import sys


def reduce_garbage_collection() -> None:
    """Collect garbage less often, and not at exit.

    By default, collection takes a tenth of the time to import torch or to load a stage, and 0.4 s at exit.
    """
    gc.set_threshold(50_000, 20, 50)
    atexit.register(_skip_last_collection)


def _skip_last_collection() -> None:
    if "triton" not in sys.modules:  # triton would print a list of the objects that are left
        gc.freeze()
