"""Routes of a sequence as an array: the experts of each token in each layer of a mixture of experts.

The array is uint8 (up to 255 experts) or uint16 [rows, layers with experts, experts per token]. Row i has the
experts that computed token i to predict token i + 1, so the last token has no row. In a missing row, whose
experts are not known, each value is the maximum of the dtype, which is no expert's number.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[Any]


def route_dtype(experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest dtype that holds the experts 0 .. `experts` - 1 and the mark of a missing row."""
    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16


def missing_mark(dtype: np.dtype[Any] | type[np.unsignedinteger[Any]]) -> int:
    """Return the value of a missing row."""
    return int(np.iinfo(dtype).max)


def missing_rows(routes: Routes) -> NDArray[np.bool_]:
    """Return bool[rows], True where the experts of a row are not known."""
    missing: NDArray[np.bool_] = routes[:, 0, 0] == missing_mark(routes.dtype)
    return missing


def no_routes(rows: int, like: Routes) -> Routes:
    """Return `rows` missing rows, with the layers and the dtype of `like`."""
    return np.full((rows, *like.shape[1:]), missing_mark(like.dtype), like.dtype)


def with_missing_row(routes: Routes) -> Routes:
    return np.concatenate([routes, no_routes(1, routes)])


def routes_to_json(routes: Routes) -> dict[str, Any]:
    data = base64.b64encode(routes.tobytes()).decode()
    return {"dtype": routes.dtype.name, "shape": routes.shape, "data": data}


def routes_from_json(document: Mapping[str, Any]) -> Routes:
    data = np.frombuffer(base64.b64decode(document["data"]), np.dtype(document["dtype"]))
    return data.reshape(document["shape"])
