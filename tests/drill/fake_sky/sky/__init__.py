"""A fake `sky` package whose clouds are a file: the part of SkyPilot that our bridge calls, and its failures.

State and scripted failures ("weather") are in $FAKE_SKY/state.json. All processes share it, like SkyPilot's
API server. The parameters equal those of the real package (a test compares them). A request that is due
completes at the next call.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "0.14.1+fake"
FOLDER = Path(os.environ["FAKE_SKY"])
KEYS = {"infra", "accelerators", "instance_type", "cpus", "memory", "use_spot", "disk_size", "image_id"}


class StatusRefreshMode(enum.Enum):
    NONE = "NONE"
    AUTO = "AUTO"
    FORCE = "FORCE"


class ClusterStatus(enum.Enum):
    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"
    AUTOSTOPPING = "AUTOSTOPPING"
    PENDING = "PENDING"


class ApiServerConnectionError(RuntimeError): ...


class ClusterDoesNotExist(ValueError): ...


class CommandError(Exception): ...


class InvalidSkyPilotConfigError(ValueError): ...


class NoCloudAccessError(Exception): ...


class ResourcesUnavailableError(Exception):
    def __init__(self, message: str, failover_history: list[Exception]) -> None:
        super().__init__(message)
        self.failover_history = failover_history


ERRORS = {
    "capacity": lambda: ResourcesUnavailableError("\x1b[31mno A100 anywhere\x1b[0m", [Exception("zone a")]),
    "infeasible": lambda: ResourcesUnavailableError("no cloud has it", []),
    "refused": lambda: NoCloudAccessError("Cloud access is not set up. Run: sky check"),
    "broken": lambda: CommandError("setup failed"),
    "stuck": lambda: RuntimeError("the cloud said 500"),
    "absent": lambda: ClusterDoesNotExist("Cluster does not exist."),
}


class Resources:
    cloud = accelerators = None  # there is no catalog

    def __init__(self, max_hourly_cost: float | None = None) -> None:
        self._max_hourly_cost = max_hourly_cost

    @property
    def max_hourly_cost(self) -> float | None:
        return self._max_hourly_cost


class Task:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.resources = {Resources(config["resources"].get("max_hourly_cost"))}

    @staticmethod
    def from_yaml_config(config: dict[str, Any]) -> Task:
        strange = set(config["resources"]) - KEYS - {"autostop", "max_hourly_cost"}
        if strange:
            raise InvalidSkyPilotConfigError(f"Invalid resources YAML: unknown {sorted(strange)}")
        return Task(config)

    def validate(self) -> None: ...

    def to_yaml_config(self) -> dict[str, Any]:
        return self.config


@contextmanager
def state() -> Iterator[Any]:
    """The state after all due requests; written back at the end of the block."""
    with (FOLDER / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = FOLDER / "state.json"
        known = json.loads(path.read_text())
        for request in known["requests"]:
            if request["status"] == "RUNNING" and time.time() >= request["due"]:
                carry_out(known, request)
        yield known
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(known))
        draft.replace(path)


def carry_out(known: Any, request: Any) -> None:
    name, clusters = request["cluster_name"], known["clusters"]
    outcomes = known["weather"].get(request["name"], [])
    outcome = outcomes.pop(0) if outcomes else "ok"
    if request["name"] == "sky.down" and name not in clusters:
        outcome = "absent"
    request["status"] = "SUCCEEDED" if outcome == "ok" else "FAILED"
    request["error"] = "" if outcome == "ok" else outcome
    if request["name"] == "sky.launch" and outcome == "ok":
        addresses = [f"10.0.0.{1 + rank}" for rank in range(clusters[name]["nodes"])]
        clusters[name] |= {"status": "UP", "ever_up": True, "launched": time.time(), "addresses": addresses}
        known["made"].append(name)
        write_ssh_config(name, clusters[name]["nodes"])
    elif outcome != "broken" and not (request["name"] == "sky.down" and outcome != "ok"):
        clusters.pop(name, None)


def write_ssh_config(name: str, nodes: int) -> None:
    """Write an ssh config like SkyPilot's: no host key checks, and only the cluster's names as hosts."""
    folder = Path("~/.sky/generated/ssh").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    way = (FOLDER / "way").read_text()
    names = [name, *(f"{name}-worker{rank}" for rank in range(1, nodes))]
    quiet = "  StrictHostKeyChecking no\n  UserKnownHostsFile=/dev/null\n  GlobalKnownHostsFile=/dev/null\n"
    (folder / name).write_text("".join(f"Host {host}\n{way}{quiet}\n" for host in names))


def call(name: str, effect: Any = None) -> Any:
    """Call the API server: `effect` changes the state; scripted failures happen before or after it."""
    with state() as known:
        bad = {when: known["weather"].get(f"{when} {name}", 0) for when in ("before", "after", "death")}
        for when, left in bad.items():
            if left:
                known["weather"][f"{when} {name}"] = left - 1
        result = effect(known) if not bad["before"] else None
    if bad["death"]:
        os._exit(1)
    if bad["before"] or bad["after"]:
        raise ApiServerConnectionError("Could not connect to SkyPilot API server at http://127.0.0.1:46580.")
    return result


def request(known: Any, name: str, cluster: str, seconds: float) -> str:
    known["requests"].append({
        "request_id": f"request-{len(known['requests'])}", "name": name, "cluster_name": cluster,
        "status": "RUNNING", "created_at": time.time(), "due": time.time() + seconds, "error": "",
    })  # fmt: skip
    return str(known["requests"][-1]["request_id"])


def launch(task: Task, cluster_name: str | None = None, retry_until_up: bool = False) -> str:
    def effect(known: Any) -> str:
        config = task.to_yaml_config()
        known["tasks"].append(config)
        record = {
            "status": "INIT", "ever_up": False, "alive": True, "why": "", "nodes": config["num_nodes"],
            "spot": bool(config["resources"].get("use_spot")), "addresses": [], "launched": time.time(),
            "minutes": config["resources"]["autostop"]["idle_minutes"], "updated": int(time.time()),
            "creation": f"name: {config['name']}\nresources: ...\n",
        }  # fmt: skip
        known["clusters"].setdefault(str(cluster_name), record)
        return request(known, "sky.launch", str(cluster_name), known["weather"].get("launch_seconds", 0.0))

    return str(call("launch", effect))


def down(cluster_name: str, purge: bool = False) -> str:
    assert not purge

    def effect(known: Any) -> str:
        return request(known, "sky.down", cluster_name, known["weather"].get("down_seconds", 0.0))

    return str(call("down", effect))


def status(
    cluster_names: list[str] | None = None,
    refresh: StatusRefreshMode = StatusRefreshMode.NONE,
    all_users: bool = False,
) -> Any:
    def effect(known: Any) -> list[Any]:
        launching = {row["cluster_name"] for row in known["requests"] if row["status"] == "RUNNING"}
        for name, cluster in list(known["clusters"].items()):
            if refresh is StatusRefreshMode.NONE or name in launching or known["weather"].get("cloudy"):
                continue
            cluster["updated"] = int(time.time())
            if not cluster["alive"]:
                del known["clusters"][name]
        return [
            described(name, cluster)
            for name, cluster in known["clusters"].items()
            if cluster_names is None or name in cluster_names
        ]

    return call("status", effect)


def described(name: str, one: Any) -> dict[str, Any]:
    return {
        "name": name, "status": ClusterStatus(one["status"]), "cluster_ever_up": one["ever_up"],
        "init_status_reason": one["why"], "status_updated_at": one["updated"],
        "launched_at": int(one["launched"]), "autostop": one["minutes"],
        "last_creation_yaml": one["creation"],
        "handle": SimpleNamespace(
            launched_nodes=one["nodes"],
            stable_internal_external_ips=[(address, "127.0.0.1") for address in one["addresses"]],
            launched_resources=SimpleNamespace(use_spot=one["spot"], get_cost=lambda seconds: seconds / 1800),
        ),
    }  # fmt: skip


def get(request_id: Any) -> Any:
    if not isinstance(request_id, str):
        return request_id  # already the result of `status` or `api_cancel`
    while True:
        with state() as known:
            (row,) = [row for row in known["requests"] if row["request_id"] == request_id]
        if row["status"] == "FAILED":
            raise ERRORS[row["error"]]()
        if row["status"] != "RUNNING":
            return None
        time.sleep(0.02)


def api_status(
    request_ids: list[str] | None = None,
    all_status: bool = False,
    limit: int | None = None,
    fields: list[str] | None = None,
    cluster_name: str | None = None,
) -> list[Any]:
    def effect(known: Any) -> list[Any]:
        return [
            SimpleNamespace(**row)
            for row in known["requests"]
            if (all_status or row["status"] == "RUNNING") and cluster_name in {None, row["cluster_name"]}
        ]

    return list(call("api_status", effect))


def api_cancel(request_ids: list[str] | None = None) -> list[str]:
    def effect(known: Any) -> list[str]:
        for row in known["requests"]:
            if row["request_id"] in (request_ids or []) and row["status"] == "RUNNING":
                row["status"] = "CANCELLED"
        return list(request_ids or [])

    return list(call("api_cancel", effect))
