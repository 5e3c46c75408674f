"""The control plane: it records what was requested and observed, and decides what to do."""
