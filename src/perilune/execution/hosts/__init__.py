"""Machines on which commands can be run, however one gets there."""

from perilune.execution.hosts.protocol import Answer, Host, HostRefusedError, HostUnreachableError

__all__ = ["Answer", "Host", "HostRefusedError", "HostUnreachableError"]
