"""A script for the interpreter that has SkyPilot: answers questions about clusters with its Python API.

It uses only the standard library and `sky`. A question is a line of JSON on stdin, `{"call": name, ...}`; the
answer is a line on stdout, `{"answer": ...}` or `{"error": {"kind": ..., "message": ...}}`. Kinds of errors:
"refused" (nothing was created, and a retry is useless), "capacity" (nothing was created), "unknown" (the
effect is unknown).

SkyPilot's calls go to its API server, which it starts if necessary and which executes them as *requests*. A
call is complete when its request is.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from typing import Any

REFUSALS = {
    *("APINotSupportedError", "APIVersionMismatchError", "ApiServerAuthenticationError"),
    *("CloudUserIdentityError", "ClusterOwnerIdentityMismatchError", "InvalidCloudConfigs"),
    *("InvalidCloudCredentials", "InvalidClusterNameError", "InvalidSkyPilotConfigError"),
    *("NoCloudAccessError", "NoWorkspaceAccessError", "NotSupportedError", "PermissionDeniedError"),
    *("ProvisionPrechecksError", "ResourcesMismatchError", "TypeError", "UserRequestRejectedByPolicy"),
    "ValueError",
}
ACTIVE = {"PENDING", "WAITING", "RUNNING"}
POLL_SECONDS = 0.2
LOCAL_CLOUDS = {"kubernetes", "k8s", "ssh", "slurm"}  # without a catalog of prices


class AnswerError(Exception):
    """An error to send as the answer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


def classify_error(error: BaseException) -> AnswerError:
    if isinstance(error, AnswerError):
        return error
    name = type(error).__name__
    if name == "ResourcesUnavailableError":
        tried = bool(getattr(error, "failover_history", None))  # otherwise no cloud offers that kind
        return AnswerError("capacity" if tried else "refused", error_text(error))
    return AnswerError("refused" if name in REFUSALS else "unknown", error_text(error))


def error_text(error: BaseException) -> str:
    """Return the message of an error on one line, without colors."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(plain.split())}"[:2000]


class Clusters:
    """The clusters of SkyPilot."""

    def __init__(self, sky: Any) -> None:
        self.sky = sky
        self._written: set[str] = set()  # clusters whose ssh configuration was requested
        self._reported: set[str] = set()  # requests whose failure was reported

    def look(self, prefix: str) -> list[dict[str, Any]]:
        """Return the clusters whose names begin with `prefix`, with pending launches, as the clouds report.

        If SkyPilot cannot ask a cloud, it answers from its own record, and `unseen` says so.
        """
        launching = self._launching(prefix)
        before = {
            cluster["name"]: cluster["status_updated_at"]
            for cluster in self.sky.get(self.sky.status())
            if cluster["name"].startswith(prefix)
        }
        force = self.sky.StatusRefreshMode.FORCE
        after = self.sky.get(self.sky.status(sorted(before), refresh=force)) if before else []
        clusters = {cluster["name"]: self._described(cluster) for cluster in after}
        for name, cluster in clusters.items():
            cluster["launching"] = name in launching
            renewed = cluster["updated"] != before.get(name) or abs(time.time() - cluster["updated"]) < 2
            cluster["unseen"] = "" if renewed or name in launching else "SkyPilot cannot ask its cloud"
            if cluster["status"] == "UP":
                self._write_ssh_config(name, cluster["ssh"])
        for name, created in launching.items():
            if name not in clusters:
                clusters[name] = {"cluster": name, "status": "INIT", "launching": True, "launched": created}
        return list(clusters.values())

    def create(self, cluster: str, task: dict[str, Any], patience: float) -> None:
        """Ensure that a cluster is launched or being launched; waits at most `patience` seconds.

        The failure of the last launch is reported before another is tried; a refusal is final.
        """
        if self._is_known(cluster):
            return
        launches = [request for request in self._requests(cluster) if request.name == "sky.launch"]
        if any(launch.status in ACTIVE for launch in launches):
            return
        if launches and launches[0].status == "FAILED":
            self._report(launches[0].request_id)
        request = self.sky.launch(self.task(task), cluster_name=cluster, retry_until_up=False)
        until = time.monotonic() + patience
        while (active := self._is_active(cluster, request)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if not active:
            self._report(request)

    def end(self, cluster: str) -> None:
        """Ensure that a cluster is being taken down and that no launch of it is pending.

        Raises:
            AnswerError: the last try failed; another was started.
        """
        requests = self._requests(cluster)
        launching = [row.request_id for row in requests if row.name == "sky.launch" and row.status in ACTIVE]
        if launching:
            self.sky.get(self.sky.api_cancel(launching))
        if not launching and not self._is_known(cluster):
            return
        downs = [request for request in requests if request.name == "sky.down"]
        if any(request.status in ACTIVE for request in downs):
            return
        self.sky.down(cluster)
        if downs and downs[0].status == "FAILED":
            try:
                self.sky.get(downs[0].request_id)
            except Exception as error:
                if type(error).__name__ != "ClusterDoesNotExist":
                    raise AnswerError("unknown", error_text(error)) from None

    def check(self, task: dict[str, Any]) -> dict[str, Any]:
        """Validate a task without asking a cloud; returns the problem or the task's configuration."""
        try:
            made = self.task(task)
            made.validate()
            for resources in made.resources:
                if self._with_accelerators(resources) == []:
                    raise ValueError(f"{resources.cloud} has no machine with {resources.accelerators} there")
        except OSError as error:  # the catalogs are downloaded
            return {"unchecked": f"SkyPilot's catalog is unavailable: {error_text(error)[:300]}"}
        except Exception as error:
            return {"problem": error_text(error)}
        return {"task": made.to_yaml_config()}

    def price(self, task: dict[str, Any]) -> float | None:
        """Return the highest price per hour of a task's resources in the catalog; None if it has no price."""
        prices = [self._price(resources) for resources in self.task(task).resources]
        known = [price for price in prices if price is not None]
        return max(known) if known and len(known) == len(prices) else None

    def task(self, task: dict[str, Any]) -> Any:
        """Return the task, which runs nothing, because only its machine is needed."""
        wanted = dict(task["resources"])
        if task.get("price") is not None and hasattr(self.sky.Resources, "max_hourly_cost"):
            wanted["max_hourly_cost"] = task["price"]
        if task.get("minutes") is not None:
            wanted["autostop"] = {"idle_minutes": task["minutes"], "down": True, "wait_for": "none"}
        config = {"name": task["kind"], "num_nodes": task["nodes"], "resources": wanted}
        return self.sky.Task.from_yaml_config(config)

    def _price(self, wanted: Any) -> float | None:
        if wanted.cloud is None or str(wanted.cloud).lower() in LOCAL_CLOUDS:
            return None
        from sky import catalog

        cloud, spot = str(wanted.cloud).lower(), wanted.use_spot
        if wanted.instance_type is not None:
            zones = catalog.get_region_zones_for_instance_type(wanted.instance_type, spot, clouds=cloud)
            names = [region.name for region in zones if wanted.region in {None, region.name}]
            return highest_price(
                catalog.get_hourly_cost(wanted.instance_type, spot, name, wanted.zone, clouds=cloud)
                for name in names
            )
        machines = self._with_accelerators(wanted)
        if machines is None or not all(isinstance(machine.instance_type, str) for machine in machines):
            return None  # the catalog has only the price of the accelerator
        return highest_price(machine.spot_price if wanted.use_spot else machine.price for machine in machines)

    def _with_accelerators(self, wanted: Any) -> Any:
        """Return the machines of the catalog with the requested accelerators; None if no cloud is given."""
        if not wanted.accelerators or wanted.cloud is None or str(wanted.cloud).lower() in LOCAL_CLOUDS:
            return None
        from sky import catalog

        ((name, count),) = wanted.accelerators.items()
        kinds = catalog.list_accelerators(
            gpus_only=False,
            name_filter=f"^{re.escape(name)}$",
            quantity_filter=count,
            clouds=str(wanted.cloud).lower(),
            all_regions=True,
        )
        return [row for rows in kinds.values() for row in rows if wanted.region in {None, row.region}]

    def _described(self, record: Any) -> dict[str, Any]:
        handle = record["handle"]
        ips = getattr(handle, "stable_internal_external_ips", None) or []
        resources = getattr(handle, "launched_resources", None)
        return {
            "cluster": record["name"],
            "status": record["status"].value,
            "ever_up": bool(record["cluster_ever_up"]),
            "why": record.get("init_status_reason") or "",
            "updated": record["status_updated_at"] or 0,
            "launched": record["launched_at"] or 0,
            "minutes": record["autostop"],
            "kind": kind_of(record.get("last_creation_yaml") or ""),
            "nodes": getattr(handle, "launched_nodes", None) or 1,
            "addresses": [inner for inner, _ in ips],
            "spot": bool(getattr(resources, "use_spot", False)),
            "price": hourly_price(resources),
            "ssh": ssh_config(record["name"]),
        }

    def _is_known(self, cluster: str) -> bool:
        return any(known["name"] == cluster for known in self.sky.get(self.sky.status()))

    def _is_active(self, cluster: str, request: str) -> bool:
        requests = self._requests(cluster)
        return any(item.status in ACTIVE for item in requests if item.request_id == request)

    def _requests(self, cluster: str) -> list[Any]:
        """Return the requests for a cluster, the newest first."""
        requests = self.sky.api_status(all_status=True, cluster_name=cluster)
        own = [request for request in requests if request.cluster_name == cluster]
        return sorted(own, key=lambda request: request.created_at, reverse=True)

    def _launching(self, prefix: str) -> dict[str, float]:
        """Return the clusters with a pending launch, and its time."""
        return {
            request.cluster_name: request.created_at
            for request in self.sky.api_status()
            if request.name == "sky.launch" and (request.cluster_name or "").startswith(prefix)
        }

    def _report(self, request: str) -> None:
        """Raise the error of a failed request: a refusal always, any other error once."""
        try:
            self.sky.get(request)
        except Exception as error:
            if request not in self._reported or classify_error(error).kind == "refused":
                self._reported.add(request)
                raise

    def _write_ssh_config(self, cluster: str, path: str) -> None:
        """Write the ssh configuration as `sky status CLUSTER` does, which the API server may not do here."""
        import subprocess

        if cluster not in self._written and not os.path.exists(path):  # noqa: PTH110
            self._written.add(cluster)
            command = [sys.executable, "-c", "from sky.cli import cli; cli()", "status", cluster]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=120, check=False)


def highest_price(prices: Any) -> float | None:
    """Return the highest of some prices; the catalog leaves some blank."""
    return max((price for price in prices if price is not None and not math.isnan(price)), default=None)


def hourly_price(resources: Any) -> float | None:
    """Return the price of one machine per hour, if SkyPilot knows it."""
    try:
        return float(resources.get_cost(3600))
    except Exception:
        return None


def ssh_config(cluster: str) -> str:
    """Return the path of SkyPilot's ssh configuration for a cluster."""
    from sky.utils.cluster_utils import SSHConfigHelper

    path: str = SSHConfigHelper.ssh_cluster_path.format(cluster)
    return os.path.expanduser(path)  # noqa: PTH111


def kind_of(creation: str) -> str:
    """Return the name of the task that created a cluster, which is the kind of its machines."""
    match = re.search(r"^name: *['\"]?([\w-]+)", creation, re.MULTILINE)
    return match[1] if match else ""


def answer_question(clusters: Clusters, question: dict[str, Any]) -> dict[str, Any]:
    call = question.pop("call")
    try:
        return {"answer": getattr(clusters, call)(**question)}
    except Exception as error:
        failure = (
            classify_error(error)
            if call in {"create", "price"}
            else AnswerError("unknown", error_text(error))
        )
        return {"error": {"kind": failure.kind, "message": failure.message}}


def main() -> None:
    """Answer questions, line by line, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SkyPilot prints to stdout
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]  # noqa: PTH120
    try:
        import sky
    except ImportError as error:
        print(
            json.dumps({"error": {"kind": "absent", "message": error_text(error)}}), file=answers, flush=True
        )
        return
    print(json.dumps({"answer": sky.__version__}), file=answers, flush=True)
    clusters = Clusters(sky)
    for line in sys.stdin:
        print(json.dumps(answer_question(clusters, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
