"""Probes that try to affect other processes."""

from collections.abc import Callable, Mapping
from typing import Any

Attempts = Mapping[str, Callable[[], Any]]


def signals(facts: Mapping[str, Any]) -> Attempts:
    """Send signals to processes of the host."""
    import os
    import signal

    def sent(process: int, number: int) -> str:
        os.kill(process, number)
        return f"signal {number} to process {process}"

    def by_descriptor() -> str:
        descriptor = os.pidfd_open(facts["victim"])
        signal.pidfd_send_signal(descriptor, 0)  # type: ignore[attr-defined,unused-ignore]
        return "a descriptor of it"

    return {
        "the owner": lambda: sent(facts["owner"], 0),
        "the supervisor": lambda: sent(facts["supervisor"], 0),
        "by a descriptor": by_descriptor,
        "kill another process": lambda: sent(facts["victim"], 9),
    }


def priorities(facts: Mapping[str, Any]) -> Attempts:
    """Change priority, processors and limits of processes of the host."""
    import os
    import resource

    victim = facts["victim"]

    def done(call: Callable[..., object], *arguments: Any) -> str:
        call(*arguments)
        return f"{call.__name__} was allowed"

    return {
        "priority": lambda: done(os.setpriority, os.PRIO_PROCESS, victim, 19),
        "processors": lambda: done(os.sched_setaffinity, victim, {0}),
        "limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (50, 50)),
    }
