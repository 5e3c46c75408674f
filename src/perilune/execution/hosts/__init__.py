"""Hosts: ways to run a command on a machine."""

from perilune.execution.hosts.protocol import Answer, Host, HostRefusedError, HostUnreachableError

__all__ = ["Answer", "Host", "HostRefusedError", "HostUnreachableError"]
