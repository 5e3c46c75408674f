"""Where a bundle runs: on this machine, later on others."""
