"""Random numbers of a package that draws from the interpreter's, kept apart for each that uses them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.random import mtrand


class GlobalRandom:
    """Python's and NumPy's global generators as one session has them: whoever else draws is not disturbed."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Draws inside go on from where the last ones inside left off, and are not felt outside."""
        python, numpy = random.getstate(), mtrand.get_bit_generator()
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), mtrand.get_bit_generator()
            random.setstate(python)
            mtrand.set_bit_generator(numpy)
