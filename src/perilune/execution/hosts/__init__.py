"""Hosts: ways to run a command on a machine."""
