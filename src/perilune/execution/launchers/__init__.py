"""Launchers: ways to start a worker on a machine, as a plain process or in a container."""
