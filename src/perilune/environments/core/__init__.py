"""The environment protocol, and what environments are built from."""
