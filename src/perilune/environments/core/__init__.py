"""The environment protocol and the parts that environments are built from."""
