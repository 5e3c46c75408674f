"""Reads the pieces of an answer and joins its parts."""

from collections.abc import Sequence

from perilune.serve.parts import Parts, Reader


def read_pieces(reader: Reader, pieces: Sequence[str]) -> Parts:
    """All parts of the pieces; consecutive texts of one kind are joined."""
    whole = Parts()
    for place, piece in enumerate(pieces):
        for kind, one in reader.feed(piece, last=place == len(pieces) - 1).items:
            if isinstance(one, str) and whole.items and whole.items[-1][0] == kind:
                whole.items[-1] = (kind, whole.items[-1][1] + one)  # type: ignore[operator, assignment]
            else:
                whole.items.append((kind, one))  # type: ignore[arg-type]
    return whole
