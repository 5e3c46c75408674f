"""How a worker is started on a machine: as a plain process or in a container."""
