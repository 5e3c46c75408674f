"""The optional package openvino, and the devices that it finds."""

import sys
from typing import Any

from perilune.errors import RequestError


def import_openvino() -> Any:
    """Return the package, without its telemetry.

    Raises:
        RequestError: when it is not installed.
    """
    # On import, openvino sends telemetry unless this package is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino as package
    except ImportError as error:
        raise RequestError(
            f"the package openvino is not installed ({error})", remedy='pip install "perilune[openvino]"'
        ) from None
    return package


def list_devices() -> list[str]:
    """Return the devices of this machine, such as CPU, GPU.0 and NPU.

    Raises:
        RequestError: when openvino is not installed.
    """
    return list(import_openvino().Core().available_devices)
