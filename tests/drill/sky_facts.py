"""A script that describes an installed `sky` package; a test compares the real one with our fake.

`python sky_facts.py CALLS`, and for the real one NAME ERRORS as well: JSON lists, and a cluster's name.
"""

import inspect
import json
import sys
from typing import Any

import sky


def shape(calls: list[str]) -> dict[str, Any]:
    """The parameters, statuses and modes of the package."""
    return {
        "calls": {name: list(inspect.signature(getattr(sky, name)).parameters) for name in calls},
        "statuses": sorted(status.value for status in sky.ClusterStatus),
        "modes": sorted(mode.name for mode in sky.StatusRefreshMode),
        "bound": hasattr(sky.Resources, "max_hourly_cost"),
    }


def more(name: str, errors: list[str]) -> dict[str, Any]:
    """Fields of the API server's responses and names that SkyPilot uses; for the real package only."""
    import builtins

    from sky import backends, exceptions
    from sky.backends import backend_utils
    from sky.schemas.api import responses
    from sky.server import constants
    from sky.server.requests import payloads, request_names, requests
    from sky.utils import cluster_utils, common_utils

    common_utils.check_cluster_name_is_valid(name)
    launch, down = request_names.RequestName.CLUSTER_LAUNCH, request_names.RequestName.CLUSTER_DOWN
    return {
        "record": list(responses.StatusResponse.model_fields),
        "request": list(payloads.RequestPayload.model_fields),
        "handle": list(inspect.signature(backends.CloudVmRayResourceHandle.__init__).parameters),
        "active": sorted(status.value for status in requests.RequestStatus.active_statuses()),
        "names": [constants.REQUEST_NAME_PREFIX + request.value for request in (launch, down)],
        "errors": [error for error in errors if hasattr(exceptions, error) or hasattr(builtins, error)],
        "source": inspect.getsource(backend_utils),
        "ssh": cluster_utils.SSHConfigHelper.ssh_cluster_path,
        "on_gcp": common_utils.make_cluster_name_on_cloud(name, 35),
    }


if __name__ == "__main__":
    calls, *rest = map(json.loads, sys.argv[1:])
    print(json.dumps([shape(calls), more(*rest) if rest else {}]))
