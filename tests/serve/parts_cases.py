"""Reads the pieces of an answer and joins its parts."""

from collections.abc import Sequence

from perilune.serve.parts import Parts, Reader


def read_pieces(reader: Reader, pieces: Sequence[str]) -> Parts:
    """All parts of the pieces; consecutive texts of one kind are joined."""
    whole = Parts()
    for index, piece in enumerate(pieces):
        for kind, item in reader.feed(piece, last=index == len(pieces) - 1).items:
            if isinstance(item, str) and whole.items and whole.items[-1][0] == kind:
                whole.items[-1] = (kind, whole.items[-1][1] + item)  # type: ignore[operator, assignment]
            else:
                whole.items.append((kind, item))  # type: ignore[arg-type]
    return whole
