"""A count with its noun."""


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: 1 file, 2 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
