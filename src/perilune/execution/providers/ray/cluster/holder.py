"""The entrypoint of a Ray Job: holds the machines of one attempt, all or none, while they are needed.

`python -m perilune_ray.holder OPTIONS`, on the cluster. It exits with 0 at the end of its lifetime. If it is
stopped or a machine dies, all machines end, because Ray ends a job's actors with the job. Its last line gives
the reason of a failure. The line that begins with `READY_PREFIX` has the machines' addresses and token:
anyone who can read a job's log can run commands on the cluster anyway.
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

from .frames import READY_PREFIX
from .gateway import serve
from .machine import Machine

THREADS = 64  # per machine
LIFETIME_MARGIN_S = 30.0  # seconds after its lifetime when the kernel ends this process
NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # other resources keep their names


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
    signal.setitimer(signal.ITIMER_REAL, options.lifetime + LIFETIME_MARGIN_S)
    until = time.monotonic() + options.lifetime
    ray.init(namespace=options.namespace, log_to_driver=False)
    try:
        return hold_machines(options, until)
    except ray.exceptions.RayError as error:
        print(f"host failure: {type(error).__name__}", flush=True)
        return 1


def hold_machines(options: argparse.Namespace, until: float) -> int:
    """Create the machines, report them, and wait; returns 0 at the end of the lifetime.

    Raises:
        ray.exceptions.RayError: a machine cannot be created, or has died.
    """
    group = placement_group([options.resources] * options.nodes, strategy=options.strategy)
    while not group.wait(min(5.0, max(0.1, until - time.monotonic()))):
        if time.monotonic() >= until:
            return 0
    token = secrets.token_hex(32)
    machines = [create_machine(options, group, rank, token) for rank in range(options.nodes)]
    addresses: list[str] = ray.get([node.address.remote() for node in machines])
    host, _, port = options.listen.rpartition(":")
    threading.Thread(target=serve, args=(host, int(port), options.namespace), daemon=True).start()
    print(READY_PREFIX + json.dumps({"addresses": addresses, "token": token}), flush=True)
    died, _ = ray.wait([node.stay.remote() for node in machines], timeout=max(0.0, until - time.monotonic()))
    ray.get(died)
    return 0


def create_machine(options: argparse.Namespace, group: PlacementGroup, rank: int, token: str) -> Any:
    """Return the actor that is the machine of one rank, in the placement group's bundle of that number."""
    actor_options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for name, amount in options.resources.items():
        if name in NAMED:
            actor_options[NAMED[name]] = amount
        else:
            actor_options["resources"][name] = amount
    name = f"{options.name}-{rank}"
    actor = ray.remote(Machine).options(
        name=name,
        max_concurrency=THREADS,
        enable_task_events=False,  # otherwise Ray stores every call
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},  # Ray lowers the priority by default
        **actor_options,
    )
    return actor.remote(name, options.workspace, token, options.resources.get("CPU", 0.0))


if __name__ == "__main__":
    sys.exit(main())
