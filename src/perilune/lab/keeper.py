"""Ends the processes and machines of a lab when the lab ends, also if it is killed.

`python -m perilune.lab.keeper reconcile PID` reconciles until the process PID ends.
`python -m perilune.lab.keeper CLOUD PID` stops the machines of a fake cloud after the process PID has ended.
"""

import runpy
import sys
import time
from pathlib import Path

from perilune.execution.processes import Presence, ProcessIdentity, die_with_parent
from perilune.execution.providers.fake.machines import Machine

POLL_SECONDS = 0.5
POWER_OFF_ROUNDS = 6  # the cloud's server may create a machine while it shuts down


def end_machines(cloud: Path) -> None:
    """Stop all machines of a fake cloud."""
    for record in (cloud / "machines").glob("*/record.json"):
        Machine.load(record.parent).power_off()


def main() -> None:
    """Run the mode that the command line names."""
    mode, owner = sys.argv[1], int(sys.argv[2])
    if mode == "reconcile":
        die_with_parent(owner)
        sys.argv = ["perilune", "reconcile", "--watch"]
        runpy.run_module("perilune.cli.main", run_name="__main__")
    identity = ProcessIdentity.of(owner)
    while identity is not None and identity.presence() is Presence.PRESENT:
        time.sleep(POLL_SECONDS)
    for _ in range(POWER_OFF_ROUNDS):
        end_machines(Path(mode))
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
