"""Isolated copies of Python's and NumPy's global random state, for packages that draw from it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.random import mtrand


class GlobalRandom:
    """Python's and NumPy's global generators of one session, separate from the interpreter's own."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)

    @contextmanager
    def install(self) -> Iterator[None]:
        """Install these generators inside the context, and restore the interpreter's own on exit."""
        python, numpy = random.getstate(), mtrand.get_bit_generator()
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), mtrand.get_bit_generator()
            random.setstate(python)
            mtrand.set_bit_generator(numpy)
