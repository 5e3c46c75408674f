"""Counter-based random numbers: equal counters give equal numbers, whatever else is sampled.

Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). The key is the 64-bit seed, the counter (position, sample, task, step). There is no state, so
batching, order and restarts do not change a draw.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run Philox4x32-10: uint64[..., 4] from uint64[..., 4] and uint64[..., 2], each below 2**32."""
    c0, c1, c2, c3 = (counter[..., lane] for lane in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for turn in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        bump0, bump1 = (np.uint64(turn * weyl & 0xFFFFFFFF) for weyl in _WEYL)
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ ((k0 + bump0) & _MASK),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ ((k1 + bump1) & _MASK),
            p0 & _MASK,
        )
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return random numbers in [0, 1), multiples of 2**-53.

    Args:
        keys: uint64[B, 4] of (seed, step, task, sample); all but the seed below 2**32.
        positions: int64[B, P] below 2**32; position 0 is the first sampled token.

    Returns:
        float64[B, P].
    """
    seed, step, task, sample = (keys[:, field, None] for field in range(4))
    words = np.broadcast_arrays(positions.astype(np.uint64), sample, task, step)
    counter = np.stack(words, axis=-1)
    key = np.stack([seed & _MASK, seed >> _SHIFT], axis=-1)
    drawn = philox4x32(counter, key)
    high, low = drawn[..., 0] >> np.uint64(5), drawn[..., 1] >> np.uint64(6)
    return (high * 2.0**26 + low) * 2.0**-53
