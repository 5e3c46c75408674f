"""ULIDs: identifiers that sort by their creation time."""

import secrets
import time

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32


def ulid_seconds(ulid: str) -> float:
    """Return the creation time of a ULID in Unix seconds; 0 if `ulid` is not a ULID."""
    try:
        milliseconds = 0
        for letter in ulid[:10]:
            milliseconds = milliseconds << 5 | ALPHABET.index(letter)
    except ValueError:
        return 0.0
    return milliseconds / 1000


def new_ulid() -> str:
    """Return a 26-character ULID: 48 bits of milliseconds since 1970, then 80 random bits.

    Source: https://github.com/ulid/spec
    """
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))
