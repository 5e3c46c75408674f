"""What a Ray Job of ours runs: hold the machines of one attempt, all of them or none, while they are needed.

`python -m perilune_ray.holder OPTIONS`, on the cluster. It ends with 0 when its time is over. That it is
stopped, or that a machine dies, ends all of them: Ray ends what a job has made when the job ends. Its last
line says why it failed; the line that begins with `READY` says where the machines are, and what their token
is: whoever may read the log of a job may run commands on the cluster anyway.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import threading
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .gateway import serve
from .machine import Machine

READY = "perilune-ready "
THREADS = 64  # of a machine
MARGIN = 30.0  # seconds after which the kernel ends what should have ended by itself
NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # the others are called as they are


def main() -> int:
    parser = argparse.ArgumentParser(prog="perilune_ray.holder")
    parser.add_argument("--name", required=True, help="of the attempt; its machines are NAME-0, NAME-1, ...")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--resources", type=json.loads, required=True, help="of one machine, as JSON")
    parser.add_argument("--strategy", required=True, help="of the placement group")
    parser.add_argument("--workspace", required=True, help="folder on every node")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--listen", required=True, help="HOST:PORT of the gateway")
    parser.add_argument("--lifetime", type=float, required=True, help="seconds")
    options = parser.parse_args()
    signal.setitimer(signal.ITIMER_REAL, options.lifetime + MARGIN)
    until = time.monotonic() + options.lifetime
    ray.init(namespace=options.namespace, log_to_driver=False)
    try:
        return hold(options, until)
    except ray.exceptions.RayError as error:
        print(f"host failure: {type(error).__name__}", flush=True)
        return 1


def hold(options: argparse.Namespace, until: float) -> int:
    """Get the machines, say so, and wait; 0 when time is over.

    Raises:
        RayError: a machine cannot be made, or has died.
    """
    group = placement_group([options.resources] * options.nodes, strategy=options.strategy)
    while not group.wait(min(5.0, max(0.1, until - time.monotonic()))):
        if time.monotonic() >= until:
            return 0
    token = secrets.token_hex(32)
    machines = [machine(options, group, rank, token) for rank in range(options.nodes)]
    addresses: list[str] = ray.get([one.address.remote() for one in machines])
    host, _, port = options.listen.rpartition(":")
    threading.Thread(target=serve, args=(host, int(port), options.namespace), daemon=True).start()
    print(READY + json.dumps({"addresses": addresses, "token": token}), flush=True)
    died, _ = ray.wait([one.stay.remote() for one in machines], timeout=max(0.0, until - time.monotonic()))
    ray.get(died)
    return 0


def machine(options: argparse.Namespace, group: PlacementGroup, rank: int, token: str) -> Any:
    """The actor that is the machine of one rank, in the bundle of its number."""
    wanted: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for name, amount in options.resources.items():
        if name in NAMED:
            wanted[NAMED[name]] = amount
        else:
            wanted["resources"][name] = amount
    name = f"{options.name}-{rank}"
    actor = ray.remote(Machine).options(
        name=name,
        max_concurrency=THREADS,
        enable_task_events=False,  # Ray would remember every call
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},  # else all that runs there yields to others
        **wanted,
    )
    return actor.remote(name, options.workspace, token)


if __name__ == "__main__":
    sys.exit(main())
