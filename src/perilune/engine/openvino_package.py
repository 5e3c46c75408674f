"""The optional package openvino, and the devices that it finds."""

import sys
from functools import cache
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


def openvino_core() -> Any:
    """Return the process's `openvino.Core`, whose compiled models can share device memory.

    Raises:
        RequestError: when openvino is not installed.
    """
    return _create_core(import_openvino())


@cache
def _create_core(package: Any) -> Any:
    return package.Core()


def list_devices() -> list[str]:
    """Return the devices of this machine, such as CPU, GPU.0 and NPU.

    Raises:
        RequestError: when openvino is not installed.
    """
    return list(openvino_core().available_devices)
