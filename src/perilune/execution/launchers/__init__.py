"""How a worker is started: in a plain process, later in a container."""
