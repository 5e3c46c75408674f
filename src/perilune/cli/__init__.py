"""The command line. Each package below is one panel of `perilune --help`."""
